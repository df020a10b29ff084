"""The flags that this project adds to Megatron's. Names are fixed: docs/running.md lists them."""

import argparse
import difflib
import functools
from typing import NoReturn

from megatron_bp.arguments.attention import add_attention_flags, megatron_defaults
from megatron_bp.arguments.chats import add_chat_flags
from megatron_bp.arguments.from_checkpoint import add_new_run_flags
from megatron_bp.arguments.objective_flags import add_objective_flags

DRY_RUN_FLAGS = ("--dry-run-world-size", "--dry-run-json")
USAGE = "pretrain_bdlm.py [CONFIG.yaml] [--any-megatron-or-bdlm-flag VALUE ...]"


def add_block_diffusion_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron's `extra_args_provider`: adds our group to its parser."""
    group = parser.add_argument_group("block diffusion")
    add = group.add_argument
    add(
        "--block-parallel-size",
        type=int,
        default=1,
        help="BP: ranks that share the target blocks of one sequence. Unset CP means CP = BP.",
    )
    add(
        "--max-imbalance",
        type=float,
        default=1.03,
        help="Units are moved off the rank of their clean rows until the worst rank of a sequence "
        "has at most this many times the mean work.",
    )
    add_attention_flags(group)
    megatron_defaults(parser)
    add_objective_flags(group)
    add_chat_flags(group)
    add_new_run_flags(group)
    add(
        "--eval-draws",
        type=int,
        default=1,
        help="Noise draws of each validation sample; an evaluation runs --eval-iters of each.",
    )
    add(
        "--on-nonfinite",
        choices=["stop", "skip"],
        default="stop",
        help="A NaN or infinite loss stops the run, or its step's update is skipped on all ranks.",
    )
    add(
        "--print-config",
        action="store_true",
        help="Print what was given, resolved and derived, and exit.",
    )
    add(
        "--dry-run",
        action="store_true",
        help="Print degrees, shapes, parameters, rows, bytes and memory of a GPU, and exit.",
    )
    add(
        "--dry-run-world-size",
        type=int,
        default=None,
        metavar="N",
        help="Ranks of a dry run; default: WORLD_SIZE, else the fewest that the degrees allow.",
    )
    add(
        "--dry-run-json",
        default=None,
        metavar="FILE",
        help="Write what a dry run found there, too.",
    )
    add(
        "--preflight",
        action="store_true",
        help="Check machines, files, memory and communication on all ranks of the job, and exit.",
    )
    add(
        "--preflight-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="What a collective of a preflight may take; a check of a rank twice as long.",
    )
    add(
        "--metrics-file",
        default=None,
        help="Exact per-step rows as JSON lines; default: metrics.jsonl in the --save folder.",
    )
    _mend_help(parser)
    return parser


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Take help texts as they stand that argparse cannot format: one of Megatron's has a bare %."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if not action.help:
            continue
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")


class _Parser(argparse.ArgumentParser):
    """Megatron has 800 flags: an error must not print them all."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: --"):
            unknown, _, _ = message.split()[2].partition("=")
            near = difflib.get_close_matches(unknown, self._option_string_actions, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"pretrain_bdlm.py: error: {message}\nusage: {USAGE}\n")


@functools.cache
def full_parser() -> argparse.ArgumentParser:
    """Megatron's parser with our flags; made once, since its 800 flags take a while."""
    from megatron.training.arguments import add_megatron_arguments

    parser = _Parser(usage=USAGE, allow_abbrev=False)
    return add_block_diffusion_flags(add_megatron_arguments(parser))
