"""What a run was given, what that resolves to, and what follows from it: printed and saved.

The text is YAML; its `given` section is a config file of its own that makes the same run.
"""

import os
from argparse import Namespace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_bp.arguments.build import settings
from megatron_bp.arguments.command_line import given_values
from megatron_bp.arguments.exchanged import exchanged
from megatron_bp.arguments.flags import full_parser
from megatron_bp.data.document import Document
from megatron_bp.parallel.mode import parallel_mode
from megatron_bp.sequence.packing import pack
from megatron_bp.sequence.plan import make_plan


def describe(args: Namespace, argv: list[str]) -> str:
    """YAML text of the run.

    Args:
        args: Megatron's validated arguments.
        argv: the command line as it was given.
    """
    parser = full_parser()
    defaults = {a.dest: a.default for a in parser._actions if a.dest != "help"}
    changed = {
        name: _plain(getattr(args, name))
        for name in sorted(defaults)
        if hasattr(args, name) and _plain(getattr(args, name)) != _plain(defaults[name])
    }
    sections = {
        "given": given_values(argv, parser),
        "resolved": changed,
        "derived": derived(args),
    }
    return "\n".join(
        f"# {comment}\n{yaml.safe_dump({name: sections[name]}, sort_keys=False)}"
        for name, comment in (
            ("given", "what was given: this section alone makes the same run"),
            ("resolved", "all of Megatron's and our arguments that are not at their default"),
            ("derived", "what follows; rows, units and bytes are of one document of full length"),
        )
    )


def derived(args: Namespace) -> dict[str, Any]:
    """Rows, units, bytes and divisors that follow from the arguments.

    Of a rank: those of the rank that has most. They are counted in the plan of one full document.
    """
    if args.objective == "ar":
        return _derived_ar(args)
    bp, cp = args.block_parallel_size, args.bdlm_clean_shard_size
    slot, length = max(bp, cp), args.bdlm_seq_length
    text = Document(np.zeros(length, np.int32), np.ones(length, np.bool_), 0)
    plan = make_plan(pack([text], length), settings(args).sequence)
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    multiple = tp if args.sequence_parallel else 1
    shards = [plan.rows_of(rank, multiple) for rank in range(slot)]
    units = [
        len(np.unique(np.searchsorted(plan.units.offset, s.corrupted, "right"))) for s in shards
    ]
    sent = exchanged(args, plan, shards)
    return {
        "mode": parallel_mode(bp, cp),
        "ranks_per_sequence": slot,
        "clean_shard_groups": slot // cp,
        "ranks_per_clean_shard_group": cp,
        "tensor_parallel_size": tp,
        "pipeline_stages": pp,
        "data_parallel_size": args.data_parallel_size,
        "micro_batches_per_step": args.global_batch_size
        // (args.data_parallel_size * args.micro_batch_size),
        "clean_rows_per_sequence": int(np.count_nonzero(plan.scorer >= 0)),
        "corrupted_rows_per_sequence": int(plan.units.offset[-1]),
        "rows_per_sequence_with_replicas": sum(s.num_rows for s in shards),
        "rows_per_rank": max(s.num_rows for s in shards),
        "clean_rows_per_rank": max(len(s.clean) for s in shards),
        "units_per_sequence": len(plan.units),
        "units_per_rank": max(units),
        "clean_tokens_per_step": args.global_batch_size * length,
        "true_vocabulary": args.bdlm_vocabulary,
        "padded_vocabulary": args.padded_vocab_size,
        "exchange": sent.form,
        "exchanged_bytes_per_row_and_layer": sent.row_bytes,
        "exchanged_bytes_per_rank_and_sequence": sent.in_training,
        **_first_pass(args, sent.in_a_forward),
        "loss_divisor": "supervised tokens of the whole step, each term by its own count",
    }


def _first_pass(args: Namespace, sent: int) -> dict[str, Any]:
    """What self-conditioning adds where a document's coin is on."""
    if args.self_conditioning == 0:
        return {}
    return {
        "self_conditioning_parameters": (3 * args.self_conditioning_width + 1) * args.hidden_size,
        "exchanged_bytes_of_a_first_pass_per_rank": sent,
    }


def _derived_ar(args: Namespace) -> dict[str, Any]:
    """What follows in the autoregressive mode."""
    return {
        "mode": "autoregressive, Megatron's own model",
        "tensor_parallel_size": args.tensor_model_parallel_size,
        "pipeline_stages": args.pipeline_model_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "micro_batches_per_step": args.global_batch_size
        // (args.data_parallel_size * args.micro_batch_size),
        "clean_tokens_per_step": args.global_batch_size * args.bdlm_seq_length,
        "true_vocabulary": args.bdlm_vocabulary,
        "padded_vocabulary": args.padded_vocab_size,
        "loss_divisor": "supervised next tokens of the whole step",
    }


def save_resolved(args: Namespace, text: str) -> None:
    """Write it beside the checkpoints, from one rank, before anything is started.

    Raises:
        ValueError: the folder cannot be written: better now than at the first save.
    """
    if not args.save or args.rank != 0:
        return
    path = Path(args.save) / "config.yaml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".tmp")
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    except OSError as error:
        raise ValueError(
            f"--save {args.save}: cannot be written ({error.strerror}); choose a folder that can, "
            f"or make room"
        ) from error


def check_writable(args: Namespace) -> None:
    """Check that --metrics-file and --data-cache-path can be written, before anything is started.

    Raises:
        ValueError: one cannot.
    """
    if args.rank != 0:
        return
    files = {"--metrics-file": args.metrics_file}
    if args.data_cache_path is not None:
        files["--data-cache-path"] = str(Path(args.data_cache_path) / "megatron_bp.writable")
    for flag, path in files.items():
        try:
            if path is not None:
                _try_to_write(Path(path))
        except OSError as error:
            raise ValueError(
                f"{flag} {path}: cannot be written ({error.strerror}); choose a place that can"
            ) from error


def _try_to_write(path: Path) -> None:
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8"):
        pass
    if new:
        path.unlink()


def _plain(value: Any) -> Any:
    """The value as YAML can hold it."""
    if isinstance(value, Enum):  # before the numbers: a signal is one
        return value.name
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return getattr(value, "name", str(value))
