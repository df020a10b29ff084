"""Visibility: who sees whom, as two intervals a row.

Every mask of this field says, for one query row: these clean positions, and these corrupted rows of
my own unit. Example, one document of 6 tokens, block size 3, block-causal clean rows:

    clean row 1   clean [0, 3)  own []        corrupted row of token 1   clean []      own [0, 3)
    clean row 4   clean [0, 6)  own []        corrupted row of token 4   clean [0, 3)  own [3, 6)

It is the only thing that the attention code knows of blocks, documents and objectives.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.sequence.plan import SequencePlan


@dataclass(frozen=True, eq=False)
class Visibility:
    """What each of S rows sees: int32[S] tensors on the CPU, clean rows first.

    Attributes:
        clean_lo, clean_hi: visible clean positions [lo, hi), counted in the packed row.
        own_lo, own_hi: visible corrupted rows [lo, hi), counted in the sample's corrupted order;
            empty for a clean row.
        index: position in the packed row (clean row) or place in the corrupted order (corrupted
            row); -1 for a row that only fills up and sees nothing.
        num_clean: the first `num_clean` rows are clean.
    """

    clean_lo: Tensor
    clean_hi: Tensor
    own_lo: Tensor
    own_hi: Tensor
    index: Tensor
    num_clean: int

    def pairs(self) -> int:
        """The exact number of visible (row, key) pairs."""
        clean = (self.clean_hi - self.clean_lo).clamp(min=0).sum(dtype=torch.int64)
        own = (self.own_hi - self.own_lo).clamp(min=0).sum(dtype=torch.int64)
        return int(clean + own)


def corrupted_positions(plan: SequencePlan) -> NDArray[np.int32]:
    """int32[X]: the clean position of each row in the corrupted order."""
    sizes = plan.units.stop - plan.units.start
    first = np.repeat(plan.units.start - plan.units.offset[:-1], sizes)
    return (first + np.arange(len(first))).astype(np.int32)


def visibility(
    plan: SequencePlan,
    clean: NDArray[np.int32],
    corrupted: NDArray[np.int64],
    window: int | None = None,
    filling: int = 0,
) -> Visibility:
    """The visibility of some rows of a packed row.

    Args:
        plan: the row's plan.
        clean: clean positions, in the order of the rows.
        corrupted: places in the corrupted order, in the order of the rows.
        window: sliding window in tokens (Mistral, arXiv 2310.06825): a row at position p sees clean
            positions >= p - (window - 1). The own unit is never cut.
        filling: rows that only fill up, added after the clean rows; they see nothing.
    """
    unit = np.searchsorted(plan.units.offset, corrupted, side="right") - 1
    position = corrupted_positions(plan)[corrupted]
    block = plan.unit_block[unit]
    first, last = plan.units.offset[unit], plan.units.offset[unit + 1]
    if plan.options.own_relation == "causal":
        last = corrupted + 1
    clean_block = plan.block_of[clean]
    block_causal = plan.options.clean_relation == "block"
    clean_hi = plan.block_stop[clean_block] if block_causal else clean + 1
    clean_lo = plan.block_document_start[clean_block]
    own_clean_lo = plan.block_document_start[block]
    own_clean_hi = plan.block_start[block]
    if window is not None:
        clean_lo = np.maximum(clean_lo, clean - (window - 1))
        anchor = position if plan.options.window_anchor == "row" else own_clean_hi
        own_clean_lo = np.minimum(np.maximum(own_clean_lo, anchor - (window - 1)), own_clean_hi)
    none, nobody = np.zeros(len(clean), dtype=np.int32), np.zeros(filling, dtype=np.int32)

    def join(of_clean: NDArray[np.int32], of_filling: NDArray[np.int32], of_own: object) -> Tensor:
        joined = np.concatenate([of_clean, of_filling, np.asarray(of_own)])
        return torch.from_numpy(joined.astype(np.int32))

    return Visibility(
        clean_lo=join(clean_lo, nobody, own_clean_lo),
        clean_hi=join(clean_hi, nobody, own_clean_hi),
        own_lo=join(none, nobody, first),
        own_hi=join(none, nobody, last),
        index=join(clean, nobody - 1, corrupted),
        num_clean=len(clean) + filling,
    )
