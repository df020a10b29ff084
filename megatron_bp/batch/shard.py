"""LocalBatch: the rows that one rank computes, cut from the sample by the plan.

Every rank derives its own rows; nothing is broadcast. Rows come clean first (in the order of the
rank's chunks), then corrupted (unit after unit). Takes ranks as integers, sees no process group.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_bp.diffusion.corruption import Corruption
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequencePlan
from megatron_bp.sequence.visibility import (
    Visibility,
    corrupted_positions,
    corrupted_rows,
    visibility,
)


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """The S rows of this rank (int64[S] unless said, on the CPU).

    Attributes:
        input_ids: token of each row.
        position_ids: position inside its document.
        labels: id it predicts.
        weights: float32[S], weight of its cross-entropy; 0 = not scored.
        num_clean: the first `num_clean` rows are clean.
        visibility: one for each distinct window of the model's layers (None = no window).
        count: this rank's share of the loss count.
        clean_tokens: clean rows that are tokens of the sample (rows that fill up left out).
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    weights: Tensor
    num_clean: int
    visibility: dict[int | None, Visibility]
    count: int
    clean_tokens: int


def local_batch(
    sample: Sample,
    plan: SequencePlan,
    corruption: Corruption,
    rank: int,
    windows: Iterable[int | None] = (None,),
) -> LocalBatch:
    """The rows of slot rank `rank`; a rank without any row gets one that only fills up."""
    clean = plan.clean_positions(rank)
    corrupted = corrupted_rows(plan, plan.owned_units(rank))
    filling = 1 if len(clean) + len(corrupted) == 0 else 0
    length = len(sample.tokens)
    of_corrupted = corrupted_positions(plan)[corrupted]

    def rows(of_clean: np.ndarray, of_own: np.ndarray, dtype: type) -> Tensor:
        nothing = np.zeros(filling, dtype=dtype)
        return torch.from_numpy(
            np.concatenate([of_clean.astype(dtype), nothing, of_own.astype(dtype)])
        )

    scored = np.concatenate([clean, length + corrupted])
    return LocalBatch(
        input_ids=rows(sample.tokens[clean], corruption.tokens[corrupted], np.int64),
        position_ids=rows(sample.position[clean], sample.position[of_corrupted], np.int64),
        labels=rows(
            corruption.labels[scored[: len(clean)]],
            corruption.labels[scored[len(clean) :]],
            np.int64,
        ),
        weights=rows(
            corruption.weights[scored[: len(clean)]],
            corruption.weights[scored[len(clean) :]],
            np.float32,
        ),
        num_clean=len(clean) + filling,
        visibility={w: visibility(plan, clean, corrupted, w, filling) for w in windows},
        count=int(np.count_nonzero(sample.supervised[of_corrupted])),
        clean_tokens=len(clean),
    )
