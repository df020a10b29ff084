"""Whether the learning rate's schedule is that of the checkpoint a run goes on from.

Megatron keeps the schedule in the checkpoint and stops with a bare assertion once it has loaded all
of it, if flags say another. Looked at here before anything is loaded.
"""

from argparse import Namespace
from typing import Any

from megatron_bp.arguments.contract import newest_checkpoint, saved_arguments


class ScheduleError(ValueError):
    """A resumed run's schedule is not its checkpoint's."""


def check_schedule(args: Namespace) -> None:
    """Compare with the checkpoint that the run is about to go on from, if there is one.

    Raises:
        ScheduleError: with what differs, and the way out.
    """
    chosen = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    if chosen or args.finetune or args.no_load_optim or args.skip_train:
        return
    folder = newest_checkpoint(args.load, getattr(args, "ckpt_step", None))
    if folder is None:
        return
    saved = saved_arguments(folder)
    if getattr(saved, "no_save_optim", False):
        return
    before, now = schedule(saved), schedule(args)
    found = [
        f"{name} was {before[name]}, is {now[name]}"
        for name in now
        if None not in (before[name], now[name]) and before[name] != now[name]
    ]
    if found:
        raise ScheduleError(
            f"{folder} was saved under another schedule: {'; '.join(found)}. Set it as it was, or "
            f"say --override-opt-param-scheduler to go on with the new one, or "
            f"--use-checkpoint-opt-param-scheduler to keep the saved one"
        )


def schedule(args: Namespace) -> dict[str, Any]:
    """What Megatron 0.19.2 compares (OptimizerParamScheduler), by name; None where not known.

    Lengths are in samples, as there: steps x global batch size.
    """

    def of(name: str) -> Any:
        return getattr(args, name, None)

    unit, kind = (1, "samples") if of("train_samples") else (of("global_batch_size"), "iters")
    whole = of(f"train_{kind}")
    decay = of(f"lr_decay_{kind}") or whole
    fraction, warmup = of("lr_warmup_fraction"), of(f"lr_warmup_{kind}")
    known = None not in (unit, whole)
    if known and fraction is not None:
        warmup_samples = fraction * (decay * unit)
    else:
        warmup_samples = warmup * unit if known and warmup is not None else None
    return {
        "--lr": of("lr"),
        "--min-lr": of("min_lr"),
        "--lr-decay-style": of("lr_decay_style"),
        "the warm-up (--lr-warmup-iters x --global-batch-size)": warmup_samples,
        "the decay (--lr-decay-iters, else --train-iters, x --global-batch-size)": (
            decay * unit if known else None
        ),
        "the run (--train-iters x --global-batch-size)": whole * unit if known else None,
        "the weight decay at the start": of("start_weight_decay"),
        "the weight decay at the end": of("end_weight_decay"),
        "--weight-decay-incr-style": of("weight_decay_incr_style"),
    }
