"""Rows, visible pairs and exchanged rows of each rank of a slot, from the plan that training makes.

No model is known here: one count serves all models with the same windows and sequence options.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megatron_bp.attention.exchange.count import Sending, sending
from megatron_bp.data.document import Document
from megatron_bp.planning.layout import Layout
from megatron_bp.sequence.cache import once
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import RankRows, SequenceOptions, SequencePlan
from megatron_bp.sequence.visibility import visibility

Window = int | None


@dataclass(frozen=True)
class RankCounts:
    """What one rank of a slot computes and sends of a micro-batch, by window where layers differ.

    Attributes:
        clean: clean rows, with those that only fill up.
        corrupted: corrupted rows.
        scored: rows that carry a loss if every corruptible token is scored: at most those do.
        pairs: visible (row, key) pairs. Where heads are exchanged, those of all rows by its share
            of the heads.
        local_pairs: those of them whose key is its own.
        sent: what it sends in one layer; none where heads are exchanged.
        arriving: rows of K|V of other ranks in one layer.
        clean_sent: what it sends in a layer of a pass over clean rows alone; by needed rows it is
            taken to be as much as in one over all.
    """

    clean: int
    corrupted: int
    scored: int
    pairs: dict[Window, int]
    local_pairs: dict[Window, int]
    sent: dict[Window, Sending]
    arriving: dict[Window, int]
    clean_sent: dict[Window, Sending] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """All rows."""
        return self.clean + self.corrupted


@dataclass(frozen=True)
class SlotCounts:
    """All ranks of a slot, and the micro-batch that they share.

    Attributes:
        tokens: clean tokens of the micro-batch, counted once.
        ranks: one a slot rank.
        shards: the rows of each, for exchanges that are counted by head.
    """

    tokens: int
    ranks: tuple[RankCounts, ...]
    shards: tuple[RankRows, ...]

    @property
    def pairs(self) -> dict[Window, int]:
        """Of all ranks together."""
        windows = self.ranks[0].pairs
        return {w: sum(rank.pairs[w] for rank in self.ranks) for w in windows}


def full_rows(length: int, micro_batch: int = 1) -> Sample:
    """A micro-batch of rows that are one document of full length each, all of it supervised."""
    tokens, supervised = np.zeros(length, np.int32), np.ones(length, np.bool_)
    return pack([Document(tokens, supervised, k) for k in range(micro_batch)], length * micro_batch)


def options_of(options: SequenceOptions, layout: Layout) -> SequenceOptions:
    """The sequence options of a task under a layout's degrees."""
    return replace(
        options,
        block_parallel_size=layout.bp,
        context_parallel_size=layout.cp,
        align_chunks=layout.aligned,
        max_imbalance=float("inf") if layout.aligned else options.max_imbalance,
    )


def count(plan: SequencePlan, layout: Layout, windows: Iterable[Window]) -> SlotCounts:
    """The counts of a micro-batch under a layout.

    Args:
        plan: made with `options_of(..., layout)`.
        layout: of it the exchange, and whether rows are filled up for sequence parallelism.
        windows: the distinct windows of the layers.
    """
    multiple = layout.tp if layout.sequence_parallel else 1
    shards = tuple(plan.rows_of(rank, multiple) for rank in range(layout.slot))
    windows = tuple(windows)
    ranks = [_rank(plan, shards, rank, layout, windows) for rank in range(layout.slot)]
    if layout.over_heads:
        every = {w: sum(rank.pairs[w] for rank in ranks) // layout.slot for w in windows}
        ranks = [
            replace(rank, pairs=every, local_pairs=every, sent={}, clean_sent={}) for rank in ranks
        ]
    tokens = int(np.count_nonzero(plan.block_of >= 0))
    return SlotCounts(tokens, tuple(ranks), shards)


def _rank(
    plan: SequencePlan,
    shards: tuple[RankRows, ...],
    rank: int,
    layout: Layout,
    windows: tuple[Window, ...],
) -> RankCounts:
    mine, group = shards[rank], tuple(shards[peer] for peer in plan.shard_group(rank))
    found = {w: once(plan, ("pairs", rank, w), partial(_pairs, plan, mine, w)) for w in windows}
    sent = {w: sending(plan, group, rank, w, layout.exchange) for w in windows}
    alone = sent
    if plan.options.splits_units:
        only = tuple(replace(shard, num_sent=shard.num_clean) for shard in group)
        alone = {w: sending(plan, only, rank, w, layout.exchange) for w in windows}
    scored = len(mine.corrupted)
    if plan.options.score_clean != "none":
        scored += int(np.count_nonzero(plan.scorer == rank))
    return RankCounts(
        clean=mine.num_clean,
        corrupted=len(mine.corrupted),
        scored=scored,
        pairs={w: every for w, (every, _) in found.items()},
        local_pairs={w: own for w, (_, own) in found.items()},
        sent=sent,
        arriving={w: _arriving(s, group, mine) for w, s in sent.items()},
        clean_sent=alone,
    )


def _pairs(plan: SequencePlan, mine: RankRows, window: Window) -> tuple[int, int]:
    """(visible pairs of a rank's rows, those whose key it holds)."""
    v = visibility(plan, mine.clean, mine.corrupted, window)
    positions, places = len(plan.block_of), int(plan.units.offset[-1])
    local = _held(mine.clean, positions, v.clean_lo.numpy(), v.clean_hi.numpy())
    local += _held(mine.corrupted, places, v.own_lo.numpy(), v.own_hi.numpy())
    return v.pairs(), local


def _held(
    held: NDArray[np.int32] | NDArray[np.int64],
    length: int,
    lo: NDArray[np.int32],
    hi: NDArray[np.int32],
) -> int:
    """How many of the keys in some intervals of range(length) are held."""
    below = np.zeros(length + 1, np.int32)
    below[held + 1] = 1
    np.cumsum(below, out=below)
    return int(np.maximum(below[hi] - below[lo], 0).sum(dtype=np.int64))


def _arriving(sent: Sending, group: tuple[RankRows, ...], mine: RankRows) -> int:
    """Rows of K|V of other ranks, in all arrivals."""
    if sent.form == "needed_rows":
        return sent.returned
    return sum(shard.num_sent for shard in group) - mine.num_sent
