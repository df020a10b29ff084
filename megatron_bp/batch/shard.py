"""LocalBatch: the rows that one rank computes, cut from the sample by the plan.

Every rank derives its own rows; nothing is broadcast. Rows come clean first (in the order of the
rank's chunks), then corrupted (unit after unit). Takes ranks as integers, sees no process group.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.diffusion.corruption import Corruption, Term
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequencePlan
from megatron_bp.sequence.visibility import (
    Visibility,
    corrupted_positions,
    corrupted_rows,
    visibility,
)


@dataclass(frozen=True, eq=False)
class LocalTerm:
    """One loss term on this rank's S rows.

    Attributes:
        name: see `diffusion.corruption.Term`, as are all others.
        labels: int64[S], id that each row predicts.
        weights: float32[S], weight of its cross-entropy; 0 = not scored.
        count: this rank's share of the term's count.
        factor: of the term in the total.
    """

    name: str
    labels: Tensor
    weights: Tensor
    count: int
    factor: float


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """The S rows of this rank (tensors on the CPU).

    Attributes:
        input_ids: int64[S], token of each row.
        position_ids: int64[S], position inside its document.
        terms: the loss terms.
        p: float32[S], probability with which the row's token was corrupted; 0 for a clean row.
        corrupted: how many of the rows' tokens were corrupted.
        num_clean: the first `num_clean` rows are clean.
        visibility: one for each distinct window of the model's layers (None = no window).
        clean_tokens: clean rows that are tokens of the sample (rows that fill up left out).
    """

    input_ids: Tensor
    position_ids: Tensor
    terms: tuple[LocalTerm, ...]
    p: Tensor
    corrupted: int
    num_clean: int
    visibility: dict[int | None, Visibility]
    clean_tokens: int


def local_batch(
    sample: Sample,
    plan: SequencePlan,
    corruption: Corruption,
    rank: int,
    windows: Iterable[int | None] = (None,),
    multiple: int = 1,
) -> LocalBatch:
    """The rows of slot rank `rank`, and rows that only fill up.

    They make the number of rows a multiple of `multiple`, and at least that many.
    """
    clean = plan.clean_positions(rank)
    corrupted = corrupted_rows(plan, plan.owned_units(rank))
    rows = len(clean) + len(corrupted)
    filling = -(-max(rows, 1) // multiple) * multiple - rows
    length = len(sample.tokens)
    of_corrupted = corrupted_positions(plan)[corrupted]

    def join(of_clean: NDArray[Any], of_corrupted: NDArray[Any]) -> Tensor:
        nothing = np.zeros(filling, dtype=of_corrupted.dtype)
        parts = [of_clean.astype(of_corrupted.dtype), nothing, of_corrupted]
        return torch.from_numpy(np.concatenate(parts))

    def local(term: Term) -> LocalTerm:
        def of_rows(column: NDArray[Any]) -> Tensor:
            return join(column[clean], column[length + corrupted])

        count = int(torch.count_nonzero(of_rows(term.counted)))
        return LocalTerm(term.name, of_rows(term.labels), of_rows(term.weights), count, term.factor)

    return LocalBatch(
        input_ids=join(sample.tokens[clean], corruption.tokens[corrupted]),
        position_ids=join(sample.position[clean], sample.position[of_corrupted].astype(np.int64)),
        terms=tuple(local(term) for term in corruption.terms),
        p=join(np.zeros(len(clean)), corruption.p[corrupted]),
        corrupted=int(np.count_nonzero(corruption.corrupted[corrupted])),
        num_clean=len(clean) + filling,
        visibility={w: visibility(plan, clean, corrupted, w, filling) for w in windows},
        clean_tokens=len(clean),
    )
