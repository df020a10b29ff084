"""Whether a checkpoint can be gone on from with the optimizer and degrees of this run.

Weights and the state of either optimizer load under any degrees. What Megatron 0.19.2 cannot do is
change over between its plain and its distributed optimizer: see docs/design/0010.
"""

from argparse import Namespace

from megatron_bp.arguments.contract import newest_checkpoint, saved_arguments


class ReshapeError(ValueError):
    """The optimizer state of a checkpoint does not fit this run's optimizer."""


def check_reshape(args: Namespace) -> None:
    """Compare with the checkpoint that the run is about to go on from, if there is one.

    Raises:
        ReshapeError: with what the checkpoint holds, and the way out.
    """
    if args.finetune or args.no_load_optim:
        return
    folder = newest_checkpoint(args.load, getattr(args, "ckpt_step", None))
    if folder is None:
        return
    problem = differs(saved_arguments(folder), args)
    if problem is not None:
        raise ReshapeError(f"{folder} {problem}")


def differs(saved: Namespace, args: Namespace) -> str | None:
    """What does not fit, in words; None if all does."""
    if getattr(saved, "no_save_optim", False):
        return None
    before = getattr(saved, "use_distributed_optimizer", None)
    if before is None:
        return None
    out = (
        "or take the weights alone: --no-load-optim goes on with a fresh optimizer, --finetune "
        "starts a new run"
    )
    if before != args.use_distributed_optimizer:
        kind = "was saved with" if before else "was saved without"
        way = "add it" if before else "leave it out"
        return (
            f"{kind} --use-distributed-optimizer, and its optimizer state does not load into the "
            f"other kind: {way} (any degrees will do), {out}"
        )
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    moved = any(getattr(saved, name, 1) != getattr(args, name) for name in degrees)
    if before and moved and not getattr(saved, "dist_ckpt_optim_fully_reshardable", False):
        return (
            f"was saved without --dist-ckpt-optim-fully-reshardable (which this project sets), so "
            f"its optimizer state loads under the same tensor and pipeline degrees alone: keep "
            f"them, {out}"
        )
    return None
