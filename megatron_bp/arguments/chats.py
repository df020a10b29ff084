"""Chats: their flags, what is refused, and what is done to them before they are packed."""

from argparse import Namespace
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp.arguments.refused import no
from megatron_bp.data.answers import ChatPolicy
from megatron_bp.data.catalogue import refuse_overlong
from megatron_bp.data.indexed import read_index
from megatron_bp.data.supervised import supervised_of
from megatron_bp.sequence.blocks import first_mixed

TOKENS_AT_ONCE = 1 << 22
OF_CHATS = ("--overlong-chats", "--answer-fill", "--print-samples")


def add_chat_flags(group: Any) -> None:
    """Add them to a parser or a group of it."""
    add = group.add_argument
    add(
        "--chats",
        action="store_true",
        help="All data sets are chats: whole ones packed into rows, supervised where P.supervised "
        "says.",
    )
    add(
        "--overlong-chats",
        choices=["refuse", "truncate", "drop"],
        default="refuse",
        help="A chat longer than --seq-length is an error, is cut to that, or is left out.",
    )
    add(
        "--answer-fill",
        choices=["none", "eos"],
        default="none",
        help="A chat's last answer is filled up to the end of its block with the tokenizer's "
        "end-of-document id, supervised, in place of what follows it.",
    )
    add(
        "--print-samples",
        type=int,
        default=1,
        metavar="N",
        help="Chats that are printed at the start, with supervised text marked.",
    )


def refuse_chats(args: Namespace, prefixes: list[str], given: Collection[str]) -> None:
    """Check that the data are of the kind that the flags say.

    Args:
        args: flags as parsed.
        prefixes: of the data sets.
        given: names of the flags that were given.

    Raises:
        RefusedError, DataError: with the reason.
    """
    if not args.chats and (named := [flag for flag in OF_CHATS if flag in given]):
        no(f"{' and '.join(named)}: of chats alone; add --chats, or leave it out")
    for prefix in prefixes:
        has_mask = supervised_of(prefix) is not None
        if has_mask and not args.chats:
            no(
                f"{prefix}: is a data set of chats ({prefix}.supervised.npy), and without --chats "
                f"prompts would be trained on and chats cut anywhere; add --chats"
            )
        if args.chats and not has_mask:
            no(
                f"--chats: {prefix} has no {prefix}.supervised.npy, so it is no data set of chats; "
                f"prepare it as chats, or leave --chats out and train on all of its text"
            )


def check_chats(args: Namespace, prefix: str) -> None:
    """Look at one data set of chats once the tokenizer is there.

    Raises:
        DataError: a chat is longer than a row and is to be refused, or is no single sequence.
        RefusedError: answers are to be filled, and the tokenizer has no id for that.
    """
    index = read_index(f"{prefix}.idx")
    if len(index.lengths) != len(index.boundaries) - 1:
        no(
            f"{prefix}: {len(index.lengths)} sequences in {len(index.boundaries) - 1} documents, "
            f"and a chat is a document of one sequence; prepare the data again"
        )
    refuse_overlong(index.lengths.astype(np.int64), chat_policy(args), prefix)
    if args.response_end == "refuse":
        _refuse_mixed(args, prefix, index.lengths.astype(np.int64))


def _refuse_mixed(args: Namespace, prefix: str, sizes: NDArray[np.int64]) -> None:
    """Refuse a response that ends inside a block of the grid with a prompt after it.

    Only what is trained on is looked at: not the chats that are dropped as longer than a row, nor
    what a cut leaves out.
    """
    mask = supervised_of(prefix)
    length = args.bdlm_seq_length
    kept = np.where(sizes <= length, sizes, length if args.overlong_chats == "truncate" else 0)
    assert mask is not None
    before = np.append(0, np.cumsum(sizes))
    first = 0
    while first < len(sizes):  # some chats at once
        last = int(np.searchsorted(before, before[first] + TOKENS_AT_ONCE, side="right")) - 1
        last = max(last, first + 1)
        part = sizes[first:last]
        document = np.repeat(np.arange(len(part), dtype=np.int32), part)
        position = np.arange(len(document)) - np.repeat(np.cumsum(part) - part, part)
        supervised = mask.of(int(before[first]), len(document))
        here = position < kept[first:last][document]
        document, position, supervised = document[here], position[here], supervised[here]
        place = None
        if here.any():
            place = first_mixed(
                document,
                position.astype(np.int32),
                args.diffusion_block_size,
                supervised,
                args.block_grid,
            )
        if place is not None:
            no(
                f"--response-end refuse: in chat {first + document[place]} of {prefix} a response "
                f"ends at token {position[place]}, inside a block of {args.diffusion_block_size}, "
                f"and a prompt follows; use --response-end cut, or pad responses to whole blocks"
            )
        first = last


def chat_policy(args: Namespace, row_cost: int = 0) -> ChatPolicy:
    """What is done to chats, from Megatron's validated arguments."""
    return ChatPolicy(
        length=args.bdlm_seq_length,
        block_size=args.diffusion_block_size,
        grid=args.block_grid,
        overlong=args.overlong_chats,
        fill=_fill(args) if args.answer_fill == "eos" else None,
        row_cost=row_cost,
    )


def _fill(args: Namespace) -> int:
    """The id that answers are filled up with: the tokenizer's end of document, or of sequence."""
    from megatron.training import get_tokenizer

    for name in ("eod", "eos"):
        try:
            token = getattr(get_tokenizer(), name, None)
        except (AttributeError, NotImplementedError):
            continue
        if token is not None and 0 <= token < args.bdlm_vocabulary:
            return int(token)
    no(
        "--answer-fill eos: the tokenizer has no end-of-document or end-of-sequence id inside its "
        "vocabulary; give it one (--null-tokenizer-eod-id for bytes), or use --answer-fill none"
    )
