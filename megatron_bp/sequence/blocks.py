"""The block grid of a packed row.

Blocks count from each document's own start ("document"). Example, block size 4, documents of 5 and
6 tokens and one padding position:

    document  0 0 0 0 0 1 1 1 1 1 1 -1
    block     0 0 0 0 1 2 2 2 2 3 3 -1

On the grid "response" they count anew where a response, a run of supervised tokens, starts, and
where it ends. Either way a block is cut where a response ends: its corrupted rows would see the
prompt that follows. Example, block size 4, prompt (.) and responses (x) of one document:

    supervised     . . . x x x x x x . . . . . x
    "document"     0 0 0 0 1 1 1 1 2 3 3 3 4 4 4
    "response"     0 0 0 1 1 1 1 2 2 3 3 3 3 4 5

Integers only; no units, noise or ranks.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Grid = Literal["document", "response"]


@dataclass(frozen=True, eq=False)
class BlockGrid:
    """Blocks of a packed row, in order of position (T positions, N blocks).

    Attributes:
        block_of: int32[T], block of each position; -1 for padding.
        start, stop: int32[N], clean positions [start, stop) of each block.
        document: int32[N], document of each block.
        document_start: int32[N], first position of that document.
        index: int32[N], the block's number inside its document.
    """

    block_of: NDArray[np.int32]
    start: NDArray[np.int32]
    stop: NDArray[np.int32]
    document: NDArray[np.int32]
    document_start: NDArray[np.int32]
    index: NDArray[np.int32]


def block_grid(
    document: NDArray[np.int32],
    position: NDArray[np.int32],
    block_size: int,
    supervised: NDArray[np.bool_] | None = None,
    grid: Grid = "document",
) -> BlockGrid:
    """The grid of blocks of `block_size` tokens; a document's last block may be short.

    Args:
        document: int32[T], document ordinal, -1 for padding (only at the end).
        position: int32[T], position inside the document.
        block_size: tokens a block, at least 1.
        supervised: bool[T], responses; None for a text that is one. A block never holds a response
            and what follows it: it is cut where a response ends.
        grid: see the head of this file.
    """
    if block_size < 1:
        raise ValueError(f"the diffusion block size must be at least 1, got {block_size}")
    length = len(document)
    used = int(np.count_nonzero(document >= 0))
    starts = _starts(position[:used], block_size, supervised, grid)
    stops = np.append(starts[1:], used).astype(np.int32) if len(starts) else starts
    block_of = np.full(length, -1, dtype=np.int32)
    block_of[:used] = np.repeat(np.arange(len(starts), dtype=np.int32), stops - starts)
    document_start = starts - position[starts]
    return BlockGrid(
        block_of=block_of,
        start=starts,
        stop=stops,
        document=document[starts],
        document_start=document_start,
        index=(np.arange(len(starts)) - block_of[document_start]).astype(np.int32),
    )


def _starts(
    position: NDArray[np.int32],
    block_size: int,
    supervised: NDArray[np.bool_] | None,
    grid: Grid,
) -> NDArray[np.int32]:
    """int32[N]: where blocks start, in a row without its padding."""
    if supervised is None or grid == "document":
        begins = position % block_size == 0
    if supervised is not None:
        here, first = supervised[: len(position)], position == 0
        before = np.append(False, here[:-1])[: len(here)] & ~first
        ends = ~here & before
        if grid == "response":
            anchor = np.flatnonzero(first | ends | (here & ~before))
            since = np.arange(len(position)) - np.repeat(
                anchor, np.diff(anchor, append=len(position))
            )
            begins = since % block_size == 0
        begins = begins | ends
    return np.flatnonzero(begins).astype(np.int32)


def first_mixed(
    document: NDArray[np.int32],
    position: NDArray[np.int32],
    block_size: int,
    supervised: NDArray[np.bool_],
    grid: Grid,
) -> int | None:
    """The first position after a response that ends inside a block, if a prompt follows there.

    That is where `block_grid` cuts a block; None where no document needs a cut. What follows a
    document's last response is no prompt.

    The arguments are those of `block_grid`.
    """
    used = int(np.count_nonzero(document >= 0))
    here, first = supervised[:used], position[:used] == 0
    before = np.append(False, here[:-1])[:used] & ~first
    origin = np.flatnonzero(first if grid == "document" else first | (here & ~before))
    since = np.arange(used) - np.repeat(origin, np.diff(origin, append=used))
    responses_after = np.cumsum((here & ~before)[::-1])[::-1]
    last = np.flatnonzero(np.append(first[1:], True))
    of_later_documents = np.append(responses_after, 0)[last + 1]
    follows = responses_after > np.repeat(of_later_documents, np.diff(last, prepend=-1))
    mixed = ~here & before & (since % block_size != 0) & follows
    return int(np.argmax(mixed)) if mixed.any() else None
