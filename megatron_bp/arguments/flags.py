"""The flags that this project adds to Megatron's. Names are fixed: docs/running.md lists them."""

import argparse
import functools
from typing import NoReturn

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
    # Megatron has a flag of this name. Ours takes its place; Megatron's value keeps its default.
    group.conflict_handler = "resolve"
    add(
        "--cp-comm-type",
        dest="bdlm_cp_comm_type",
        choices=["all_gather", "p2p", "a2a", "clean_all_gather"],
        default="all_gather",
        help="How K/V cross ranks in mode CP (BP 1, CP above 1); only all_gather runs yet.",
    )
    group.conflict_handler = "error"
    parser.set_defaults(cp_comm_type=["p2p"])
    add(
        "--clean-kv-exchange",
        choices=["auto", "all_gather"],
        default="auto",
        help="How clean K/V cross ranks. auto is all_gather.",
    )
    add(
        "--attention-kernel",
        choices=["auto", "tiled"],
        default="auto",
        help="Attention kernel. auto is tiled, in pure PyTorch.",
    )
    add("--objective", choices=["block_diffusion"], default="block_diffusion", help="Preset.")
    add(
        "--diffusion-block-size", type=int, default=32, help="Tokens a block; the last may be short"
    )
    add("--mask-token-id", type=int, default=None, help="Id that a corrupted token becomes.")
    add(
        "--noise",
        choices=["absorbing", "uniform"],
        default="absorbing",
        help="A corrupted token becomes the mask, or a random id of the true vocabulary.",
    )
    add(
        "--noise-per",
        choices=["block", "document"],
        default="block",
        help="What shares a noise level.",
    )
    add(
        "--noise-schedule",
        choices=["linear", "cosine"],
        default="linear",
        help="p(t) = t, or p(t) = 1 - cos(pi t / 2).",
    )
    add(
        "--noise-interval",
        type=float,
        nargs=2,
        default=[1e-3, 1.0],
        metavar=("A", "B"),
        help="Training draws t from (A, B]; evaluation always from (0, 1].",
    )
    add(
        "--loss-weighting",
        choices=["bound", "one", "inverse_p"],
        default="bound",
        help="Weight of a corrupted token: p'(t)/p(t), the likelihood bound's; 1; or 1/p(t).",
    )
    add(
        "--antithetic",
        action="store_true",
        help="Spread the noise levels of a document's blocks evenly over the interval.",
    )
    add("--diffusion-loss-weight", type=float, default=1.0, help="Factor of the diffusion term.")
    add(
        "--ar-loss-weight",
        type=float,
        default=0.0,
        help="Factor of the next-token term on clean rows; needs --clean-relation token.",
    )
    add(
        "--clean-relation",
        choices=["block", "token"],
        default="block",
        help="A clean row sees up to the end of its block, or up to itself.",
    )
    add(
        "--own-relation",
        choices=["bidirectional", "causal"],
        default="bidirectional",
        help="A corrupted row sees its whole block, or its block up to itself.",
    )
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
        "--metrics-file",
        default=None,
        help="Exact per-step rows as JSON lines; default: metrics.jsonl in the --save folder.",
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """Megatron has 800 flags: an error must not print them all."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"pretrain_bdlm.py: error: {message}\nusage: {USAGE}\n")


@functools.cache
def full_parser() -> argparse.ArgumentParser:
    """Megatron's parser with our flags; made once, since its 800 flags take a while."""
    from megatron.training.arguments import add_megatron_arguments

    parser = _Parser(usage=USAGE, allow_abbrev=False)
    return add_block_diffusion_flags(add_megatron_arguments(parser))
