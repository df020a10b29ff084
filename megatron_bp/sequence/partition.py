"""Who computes what: clean chunks over CP ranks, units over slot ranks.

Integers only; no process group is known here.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_bp.sequence.blocks import BlockGrid


@dataclass(frozen=True)
class Chunk:
    """Clean positions [start, stop) computed by rank `rank` of the clean shard group."""

    start: int
    stop: int
    rank: int


def clean_chunks(grid: BlockGrid, ranks: int) -> tuple[Chunk, ...]:
    """The clean rows in zigzag: 2 * ranks chunks of about equal length, cut at block edges.

    Rank r holds chunks r and 2 * ranks - 1 - r, so that the early (cheap) and the late (dear) rows
    of a causal row balance. One rank holds everything in one chunk. Chunks come in order of
    position; empty ones (fewer blocks than chunks) are left out.
    """
    if len(grid.start) == 0:
        return ()
    edges = np.append(grid.start, grid.stop[-1]).astype(np.int64)
    if ranks == 1:
        return (Chunk(int(edges[0]), int(edges[-1]), 0),)
    parts = 2 * ranks
    ideal = edges[0] + (edges[-1] - edges[0]) * np.arange(parts + 1) / parts
    right = np.clip(np.searchsorted(edges, ideal), 1, len(edges) - 1)
    left = right - 1
    nearer_left = ideal - edges[left] < edges[right] - ideal
    cuts = np.where(nearer_left, edges[left], edges[right])
    cuts[0], cuts[-1] = edges[0], edges[-1]
    chunks = []
    for part in range(parts):
        rank = part if part < ranks else parts - 1 - part
        if cuts[part] < cuts[part + 1]:
            chunks.append(Chunk(int(cuts[part]), int(cuts[part + 1]), rank))
    return tuple(chunks)


def home_owners(unit_start: NDArray[np.int32], chunks: tuple[Chunk, ...]) -> NDArray[np.int32]:
    """int32[U]: the rank of the clean chunk in which each unit's first position lies."""
    starts = np.array([c.start for c in chunks], dtype=np.int64)
    ranks = np.array([c.rank for c in chunks], dtype=np.int32)
    if len(unit_start) == 0:
        return np.zeros(0, dtype=np.int32)
    return ranks[np.searchsorted(starts, unit_start, side="right") - 1]
