"""The flags of an objective's parts. What a preset sets them to: `presets.py`."""

import argparse
from typing import Any

from megatron_bp.arguments.presets import PRESETS

SWITCH = argparse.BooleanOptionalAction  # a preset's switch can be switched off


def add_objective_flags(group: Any) -> None:
    """Add them to a parser or a group of it."""
    add = group.add_argument
    add(
        "--objective",
        choices=sorted(PRESETS),
        default="block_diffusion",
        help="Preset: sets the flags of this group that are not given.",
    )
    add(
        "--diffusion-block-size", type=int, default=32, help="Tokens a block; the last may be short"
    )
    add(
        "--block-grid",
        choices=["document", "response"],
        default="document",
        help="Blocks count from a document's start, or anew from the start of each response.",
    )
    add(
        "--response-end",
        choices=["cut", "refuse"],
        default="cut",
        help="A block that a response ends inside of is cut there, or a following prompt in it is "
        "an error.",
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
        "--antithetic",
        action=SWITCH,
        default=False,
        help="Spread the noise levels of a document's blocks evenly over the interval.",
    )
    add(
        "--corrupted-copies",
        type=int,
        default=1,
        help="Corrupted copies of each target block, all with the one clean pass.",
    )
    add(
        "--complementary-copies",
        action=SWITCH,
        default=False,
        help="Copies 2k and 2k+1 share a draw: the second corrupts what the first left.",
    )
    add(
        "--never-corrupt-ids",
        type=int,
        nargs="*",
        default=[],
        metavar="ID",
        help="Ids that are never corrupted nor scored by the diffusion term.",
    )
    add(
        "--alignment",
        choices=["same", "next"],
        default="same",
        help="The row of a token predicts that token, or the next one.",
    )
    add(
        "--scored-tokens",
        choices=["corrupted", "all"],
        default="corrupted",
        help="Supervised tokens that the diffusion term scores: corrupted ones, or all.",
    )
    add(
        "--loss-weighting",
        choices=["bound", "one", "inverse_p"],
        default="bound",
        help="Weight of a scored token: p'(t)/p(t), the likelihood bound's; 1; or 1/p(t).",
    )
    add(
        "--loss-count",
        choices=["supervised", "corrupted", "joint"],
        default="supervised",
        help="What divides the diffusion sum: supervised tokens that can be scored, corrupted "
        "ones, or these and the next-token pairs together, for both terms.",
    )
    add(
        "--exclude-mask-logit",
        action=SWITCH,
        default=False,
        help="The diffusion term's softmax leaves the mask token out (SUBS).",
    )
    add("--diffusion-loss-weight", type=float, default=1.0, help="Factor of the diffusion term.")
    add(
        "--ar-loss-weight",
        type=float,
        default=0.0,
        help="Factor of the next-token term on clean rows; needs --clean-relation token.",
    )
    add(
        "--ar-scored-tokens",
        choices=["supervised", "all"],
        default="supervised",
        help="Next tokens that the next-token term scores: supervised ones, or prompts' too.",
    )
    add(
        "--self-conditioning",
        type=float,
        default=0.0,
        metavar="P",
        help="Probability that a document's corrupted rows see a first pass's prediction.",
    )
    add(
        "--self-conditioning-width",
        type=int,
        default=None,
        metavar="N",
        help="Hidden units of the self-conditioning module; default: --hidden-size.",
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
        "--window-anchor",
        choices=["row", "block"],
        default="row",
        help="Where a corrupted row's sliding window counts from: itself, or its block's start.",
    )
