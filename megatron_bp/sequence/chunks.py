"""The clean chunks of a shard group: where they are cut, which rank each goes to. Integers only."""

import numpy as np
from numpy.typing import NDArray

from megatron_bp.sequence.partition import nearest_cuts, zigzag

# Chunks of the second half are larger by one part in this many, those of the first half smaller: a
# rank sees what lies before its later chunk, and the larger those are, the earlier most begin.
LATE = 64
# How much of a block's weight is its work, not its rows, in sixteenths: tried in turn.
WEIGHINGS = (0, 1, 2, 3, 4, 6, 8, 12, 16)


def chunks(
    rows: NDArray[np.int64], work: NDArray[np.int64], ranks: int, of_work: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """(first block, rank in the group) of each chunk, int64 and int32; empty ones are left out.

    The blocks that have rows are cut into 2 C chunks, dealt head-tail (zigzag).

    Args:
        rows: int64[N], rows of each block of the packed row in this group, clean and corrupted.
        work: int64[N], their work.
        ranks: of the group.
        of_work: sixteenths of a block's weight that are its work: 0 for chunks of about equal rows,
            16 for about equal work.
    """
    if ranks == 1:
        return np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int32)
    weight = rows * (16 - of_work) + work * (rows.sum() * of_work) // max(1, int(work.sum()))
    blocks = np.flatnonzero(weight)
    edges = np.append(0, np.cumsum(weight[blocks]))
    half = np.arange(ranks + 1)
    early, late = half * (LATE - 1), half * (LATE + 1)
    ideal = np.append(early, early[-1] + late[1:]) * edges[-1] / (2 * ranks * LATE)
    cuts = nearest_cuts(edges, ideal)
    real = cuts[1:] > cuts[:-1]
    return blocks[cuts[:-1][real]], zigzag(2 * ranks)[real]
