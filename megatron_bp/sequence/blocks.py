"""The block grid of a packed row: blocks count from each document's own start.

Example, block size 4, documents of 5 and 6 tokens and one padding position:

    document  0 0 0 0 0 1 1 1 1 1 1 -1
    block     0 0 0 0 1 2 2 2 2 3 3 -1

Integers only; no units, noise or ranks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
    document: NDArray[np.int32], position: NDArray[np.int32], block_size: int
) -> BlockGrid:
    """The grid of blocks of `block_size` tokens; a document's last block may be short.

    Args:
        document: int32[T], document ordinal, -1 for padding (only at the end).
        position: int32[T], position inside the document.
        block_size: tokens a block, at least 1.
    """
    if block_size < 1:
        raise ValueError(f"the diffusion block size must be at least 1, got {block_size}")
    length = len(document)
    used = int(np.count_nonzero(document >= 0))
    starts = np.flatnonzero(position[:used] % block_size == 0).astype(np.int32)
    stops = np.append(starts[1:], used).astype(np.int32) if len(starts) else starts
    block_of = np.full(length, -1, dtype=np.int32)
    block_of[:used] = np.repeat(np.arange(len(starts), dtype=np.int32), stops - starts)
    return BlockGrid(
        block_of=block_of,
        start=starts,
        stop=stops,
        document=document[starts],
        document_start=starts - position[starts],
        index=position[starts] // np.int32(block_size),
    )
