"""`pretrain_bdlm.py CONFIG --dry-run`: sets the stage, and prints what is found.

GPUs are hidden from the process, so that it does and prints the same on any machine. Nothing is
started; nothing is written but what --dry-run-json asks for.
"""

import contextlib
import io
import json
import logging
import math
import os
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_bp import cpu


def dry_run(argv: list[str]) -> None:
    """Print what the run of a command line would be; exits with 2 where it would be refused."""
    if int(os.environ.get("RANK", "0")) > 0:
        return  # the first rank speaks for all
    given = os.environ.get("WORLD_SIZE")
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "RANK": "0", "WORLD_SIZE": "1"}
    logging.disable(logging.WARNING)  # of GPUs and their packages; the process does nothing else
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        cpu.install()
        from megatron_bp import arguments
    try:
        ranks, ranks_from = _ranks(argv, None if given is None else int(given))
    except ValueError as error:
        arguments.fail(str(error), error)
    os.environ["WORLD_SIZE"] = str(ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        facts, path = _facts(argv)
    facts |= {"ranks": ranks, "ranks_from": ranks_from}
    from megatron_bp.tools.dry_run.text import lines

    print("\n".join(lines(facts)), flush=True)
    if path is not None:
        try:
            Path(path).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            reason = f"--dry-run-json {path}: cannot be written ({error.strerror})"
            arguments.fail(f"{reason}; choose a place that can", error)


def _facts(argv: list[str]) -> tuple[dict[str, Any], str | None]:
    """(what there is to tell, where it is to be written)."""
    from megatron_bp import arguments
    from megatron_bp.arguments.absent import DryRun
    from megatron_bp.arguments.command_line import given_values
    from megatron_bp.arguments.flags import full_parser
    from megatron_bp.tools.dry_run.facts import gather

    dry = DryRun()
    args = arguments.parse(argv, dry)
    try:
        found = gather(args, dry.fused)
    except (AssertionError, ValueError, NotImplementedError) as error:
        arguments.fail(f"the model cannot be made: {error}", error)
    config = argv[0] if not argv[0].startswith("-") else "a command line"
    given = given_values(argv, full_parser())
    return {"config": config, "given": given, **found, "notes": dry.notes}, args.dry_run_json


def _ranks(argv: list[str], started: int | None) -> tuple[int, str]:
    """How many ranks, and who says so.

    Raises:
        ValueError: bad input.
    """
    from megatron_bp import arguments
    from megatron_bp.arguments.flags import full_parser
    from megatron_bp.arguments.refused import no

    flags, _, _ = arguments.resolve(argv, absent=lambda message: None)
    args = full_parser().parse_args(flags)
    if args.dry_run_world_size is not None:
        if args.dry_run_world_size < 1:
            no(f"--dry-run-world-size {args.dry_run_world_size}: must be at least 1")
        return args.dry_run_world_size, "--dry-run-world-size"
    if started is not None:
        return started, "WORLD_SIZE"
    return fewest(args), "the fewest that the degrees allow: --dry-run-world-size sets another"


def fewest(args: Namespace) -> int:
    """The smallest world that the degrees divide.

    Args:
        args: flags as parsed for Megatron: its CP degree is the slot.
    """
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or tp)
    if args.num_experts is None:
        experts = 1
    return math.lcm(tp * pp * args.context_parallel_size, experts * pp)


if __name__ == "__main__":
    dry_run(sys.argv[1:])
