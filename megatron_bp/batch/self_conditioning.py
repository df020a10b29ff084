"""LocalCondition: which rows of one rank are conditioned, and on the predictions of which.

Takes ranks' rows as integers, sees no process group.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.sequence.plan import RankRows


@dataclass(frozen=True, eq=False)
class LocalCondition:
    """K of this rank's rows (tensors on the CPU).

    Attributes:
        rows: int64[K], rows that are conditioned, ascending; all are corrupted.
        sources: int64[K], the row of this rank whose prediction each sees.
        needed: whether any row of the sample is conditioned: the same on all ranks of the slot.
    """

    rows: Tensor
    sources: Tensor
    needed: bool


def local_condition(source: NDArray[np.int64], rows: RankRows) -> LocalCondition:
    """What one rank has of it.

    Args:
        source: int64[X], see `diffusion.self_conditioning.source_places`.
        rows: this rank's rows.
    """
    wanted = source[rows.corrupted]
    here = np.flatnonzero(wanted >= 0)
    sources = np.searchsorted(rows.corrupted, wanted[here])
    # Rank holds whole units, or each row is its own source: arguments/self_conditioning.py.
    assert np.array_equal(rows.corrupted[sources], wanted[here])
    return LocalCondition(
        rows=torch.from_numpy(rows.num_clean + here),
        sources=torch.from_numpy(rows.num_clean + sources),
        needed=bool((source >= 0).any()),
    )
