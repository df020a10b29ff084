"""LocalBatch: the rows that one rank computes, cut from the sample by the plan.

Every rank derives its own rows; nothing is broadcast. Rows come clean first (by position), then
those that only fill up, then corrupted (by place). Takes ranks as integers, sees no process group.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.diffusion.corruption import Corruption, Term
from megatron_bp.sequence.cache import once
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import RankRows, SequencePlan
from megatron_bp.sequence.visibility import corrupted_positions


@dataclass(frozen=True, eq=False)
class LocalTerm:
    """One loss term on this rank's S rows.

    Attributes:
        name: see `diffusion.corruption.Term`, as are all others.
        labels: int64[S], id that each row predicts.
        weights: float32[S], weight of its cross-entropy; 0 = not scored.
        count: this rank's share of the term's count. A clean row that several ranks compute is
            scored, and counted, by `SequencePlan.scorer` alone.
        factor, joint: see there.
    """

    name: str
    labels: Tensor
    weights: Tensor
    count: int
    factor: float
    joint: bool = False


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """The S rows of this rank (tensors on the CPU).

    Attributes:
        input_ids: int64[S], token of each row.
        position_ids: int64[S], position inside its document.
        terms: the loss terms.
        p: float32[S], probability with which the token that a corrupted row is scored on was
            corrupted; 0 for a clean row.
        corruptible, corrupted: how many of the rows' tokens could be corrupted, and were.
        num_clean: the first `num_clean` rows are clean.
        index: int32[S], position in the packed row (clean row) or place in the corrupted order
            (corrupted row); -1 for a row that only fills up.
        clean_tokens: this rank's share of the sample's tokens, computed or not (padding left out):
            all of them on the slot's first rank.
        own_rows: bool[S], rows that this rank counts where each row of the sample counts once
            (auxiliary losses, router statistics); False where a row fills up or is a replica whose
            scorer is another rank. Over the slot they add up to `SequencePlan.num_rows`.
        shards: the rows of each rank of this rank's clean shard group, in the group's order.
    """

    input_ids: Tensor
    position_ids: Tensor
    terms: tuple[LocalTerm, ...]
    p: Tensor
    corruptible: int
    corrupted: int
    num_clean: int
    index: Tensor
    clean_tokens: int
    own_rows: Tensor
    shards: tuple[RankRows, ...]


def local_batch(
    sample: Sample,
    plan: SequencePlan,
    corruption: Corruption,
    rank: int,
    multiple: int = 1,
) -> LocalBatch:
    """The rows of slot rank `rank`.

    Args:
        sample: the packed row.
        plan: who computes which of its rows.
        corruption: what the corrupted rows hold, and what rows are scored on.
        rank: slot rank.
        multiple: rows that only fill up are added until there is a multiple of this many (under
            sequence parallelism TP), and at least one.

    Raises:
        ValueError: the plan has no scored clean rows, and the corruption does.
    """
    nobody = plan.scorer < 0
    if any(term.counted[: len(nobody)][nobody].any() for term in corruption.terms):
        raise ValueError(
            "clean rows are scored that no rank computes: plan with SequenceOptions(score_clean)"
        )
    group = plan.shard_group(rank)
    shards = tuple(
        once(plan, ("rows", peer, multiple), partial(plan.rows_of, peer, multiple))
        for peer in group
    )
    mine = shards[group.index(rank)]
    clean, corrupted, filling = mine.clean, mine.corrupted, mine.filling
    length = len(sample.tokens)
    of_corrupted = corrupted_positions(plan)[corrupted]
    scorer = plan.scorer[clean] == rank

    def join(of_clean: NDArray[Any], of_corrupted: NDArray[Any], fill: int = 0) -> Tensor:
        nothing = np.full(filling, fill, dtype=of_corrupted.dtype)
        parts = [of_clean.astype(of_corrupted.dtype), nothing, of_corrupted]
        return torch.from_numpy(np.concatenate(parts))

    def local(term: Term) -> LocalTerm:
        def of_rows(column: NDArray[Any]) -> Tensor:
            of_clean = np.where(scorer, column[clean], column.dtype.type(0))
            return join(of_clean, column[length + corrupted])

        count = int(torch.count_nonzero(of_rows(term.counted)))
        return LocalTerm(
            name=term.name,
            labels=of_rows(term.labels),
            weights=of_rows(term.weights),
            count=count,
            factor=term.factor,
            joint=term.joint,
        )

    return LocalBatch(
        input_ids=join(sample.tokens[clean], corruption.tokens[corrupted]),
        position_ids=join(sample.position[clean], sample.position[of_corrupted].astype(np.int64)),
        terms=tuple(local(term) for term in corruption.terms),
        p=join(np.zeros(len(clean)), corruption.scored_p[corrupted]),
        corruptible=int(np.count_nonzero(corruption.corruptible[corrupted])),
        corrupted=int(np.count_nonzero(corruption.corrupted[corrupted])),
        num_clean=mine.num_clean,
        index=join(clean, corrupted.astype(np.int32), -1),
        clean_tokens=int(np.count_nonzero(sample.document >= 0)) if rank == 0 else 0,
        own_rows=join(scorer, np.ones(len(corrupted), dtype=np.bool_)),
        shards=shards,
    )
