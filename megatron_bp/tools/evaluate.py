"""The validation bound of a checkpoint, by the same code that evaluates while training.

    python -m megatron_bp.tools.evaluate runs/mine --data data/mine --draws 4
    torchrun --nproc-per-node 4 -m megatron_bp.tools.evaluate runs/mine --data data/mine

The run's own settings come from the config.yaml beside its checkpoints; flags after `--` override
them. Same samples and same noise on any number of ranks, and as in the run's own evaluations while
the split, the number of samples and the draws are the run's.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_bp import cpu

# Of the training run, and of no use or harm here.
DROPPED = (
    "save",
    "load",
    "metrics_file",
    "save_interval",
    "exit_interval",
    "exit_duration_in_mins",
    "tensorboard_dir",
    "wandb_project",
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "async_save",
    "ckpt_step",
    "finetune",
    "pretrained_checkpoint",
    "data_args_path",
    "per_split_data_args_path",
    "micro_batch_size",
    "rampup_batch_size",
)

MODEL_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "sequence_parallel",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
)


def evaluation_flags(given: dict[str, Any], options: argparse.Namespace, ranks: int) -> list[str]:
    """The command line of an evaluation of the run that was `given` these values.

    Args:
        given: flag name in snake case -> value, from the run's config.yaml.
        options: as parsed by `main`.
        ranks: ranks that were started. All share a sequence, unless the run's own degrees fit them
            or a flag after `--` says otherwise.
    """
    from megatron_bp.arguments.config_file import to_flags
    from megatron_bp.arguments.flags import full_parser

    values = {key: value for key, value in given.items() if key not in DROPPED}
    if "global_batch_size" in values:  # of training; an evaluation on other ranks has its own
        values.setdefault("eval_global_batch_size", values.pop("global_batch_size"))
    if values.get("eval_iters") == 0 and options.samples is None:
        raise ValueError("the run never evaluated (eval_iters 0): say how many rows with --samples")
    if ranks % _together(values):
        values["block_parallel_size"] = ranks
        for name in ("context_parallel_size", "cp_comm_type", *MODEL_PARALLEL):
            values.pop(name, None)
    experts = int(values.get("expert_model_parallel_size") or 1)
    if ranks % (experts * int(values.get("pipeline_model_parallel_size") or 1)):
        values.pop("expert_model_parallel_size")
    flags = to_flags(values, full_parser(), str(options.checkpoint))
    folder, step = options.checkpoint, None
    if folder.name.startswith("iter_"):
        folder, step = folder.parent, int(folder.name.removeprefix("iter_"))
    flags += ["--load", str(folder), "--exit-on-missing-checkpoint", "--skip-train"]
    flags += ["--no-load-optim", "--no-load-rng"]
    flags += [] if step is None else ["--ckpt-step", str(step)]
    flags += ["--data-path", *options.data]
    for name, value in (("--split", options.split), ("--eval-draws", options.draws)):
        flags += [] if value is None else [name, str(value)]
    flags += ["--global-batch-size", str(max(1, ranks // _together(values)))]
    if options.samples is not None:
        flags += _batches(options.samples, given, values, ranks)
    return [*flags, *options.more]


def _together(values: dict[str, Any]) -> int:
    """Ranks that work on one sequence under these flags."""
    degree = {
        name: int(values.get(f"{name}_parallel_size") or 1)
        for name in ("block", "context", "tensor_model", "pipeline_model")
    }
    return (
        max(degree["block"], degree["context"]) * degree["tensor_model"] * degree["pipeline_model"]
    )


def _batches(samples: int, given: dict[str, Any], values: dict[str, Any], ranks: int) -> list[str]:
    """Flags that read `samples` rows in steps no larger than the run's own."""
    at_once = max(1, ranks // _together(values))
    if samples < 1 or samples % at_once:
        raise ValueError(
            f"--samples {samples}: {ranks} ranks work on {at_once} rows at a time; give a positive "
            f"multiple of {at_once}"
        )
    most = int(given.get("eval_global_batch_size", given.get("global_batch_size", at_once)))
    fitting = range(at_once, max(min(most, samples), at_once) + 1, at_once)
    batch = max(size for size in fitting if samples % size == 0)
    return ["--eval-global-batch-size", str(batch), "--eval-iters", str(samples // batch)]


def settings_of(checkpoint: Path) -> dict[str, Any]:
    """What the run was given, from the config.yaml beside its checkpoints.

    Raises:
        ValueError: there is none, or it says nothing.
    """
    folder = checkpoint.parent if checkpoint.name.startswith("iter_") else checkpoint
    path = folder / "config.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path}: cannot be read ({error}); it is written by pretrain_bdlm.py beside the "
            f"checkpoints of its --save folder: give that folder, or one iter_ folder in it"
        ) from error
    given = content.get("given") if isinstance(content, dict) else None
    if not isinstance(given, dict):
        raise ValueError(f"{path}: has no `given` section; was it changed by hand?")
    return given


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with what stands after `--` in `more`."""
    own, more = list(argv), []
    if "--" in own:
        cut = own.index("--")
        own, more = own[:cut], own[cut + 1 :]
    parser = argparse.ArgumentParser("python -m megatron_bp.tools.evaluate", description=__doc__)
    add = parser.add_argument
    add(
        "checkpoint", type=Path, help="--save folder of a run (its newest checkpoint), or iter_ one"
    )
    add("--data", nargs="+", required=True, metavar="PREFIX", help="as for --data-path")
    add(
        "--split",
        help="as for --split; default the run's own. 0,1,0 draws its rows from all of the data",
    )
    add("--samples", type=int, metavar="N", help="rows of each draw, default as in training")
    add("--draws", type=int, metavar="N", help="noise draws of each row, default as in training")
    add("--json", type=Path, metavar="FILE", help="write the row there too")
    options = parser.parse_args(own)
    options.more = more
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate; the last rank prints one line and writes the JSON."""
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        given = settings_of(options.checkpoint)
    except ValueError as error:
        sys.exit(f"evaluate: error: {error}")
    if cpu.needed():
        cpu.install()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    import pretrain_bdlm
    from megatron_bp.training.record import read_metrics

    try:
        flags = evaluation_flags(given, options, ranks)
    except ValueError as error:
        sys.exit(f"evaluate: error: {error}")
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        pretrain_bdlm.main([*flags, "--metrics-file", str(metrics)])
        if rank != ranks - 1:
            return
        rows = read_metrics(metrics)
    (row,) = (r for r in rows if r["kind"] == "validation")
    if options.json is not None:
        options.json.write_text(json.dumps(row) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
