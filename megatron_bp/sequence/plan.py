"""SequencePlan: which corrupted rows exist and who computes which rows.

Made on the host from integers alone; the same on every rank. No torch, no process group, no noise.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_bp.sequence.blocks import block_grid, first_mixed
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.partition import Runs
from megatron_bp.sequence.shares import Work, by_place, by_unit
from megatron_bp.sequence.units import SequenceOptions, Unit, Units

__all__ = ["RankRows", "SequenceOptions", "SequencePlan", "Unit", "Units", "make_plan"]


@dataclass(frozen=True, eq=False)
class RankRows:
    """The rows of a sample that one rank computes, in the order in which they stand there.

    Attributes:
        clean: int32, positions; they come first.
        filling: rows that only fill up; they come next.
        corrupted: int64, places in the corrupted order; they come last.
        num_sent: of these rows the first `num_sent` are sent to the other ranks of the clean shard
            group: the clean ones, in mode CP all.
    """

    clean: NDArray[np.int32]
    filling: int
    corrupted: NDArray[np.int64]
    num_sent: int

    @property
    def num_clean(self) -> int:
        """Rows before the corrupted ones."""
        return len(self.clean) + self.filling

    @property
    def num_rows(self) -> int:
        """All rows."""
        return self.num_clean + len(self.corrupted)


@dataclass(frozen=True, eq=False)
class SequencePlan:
    """Everything about a packed row that does not depend on noise (T, N, U, R ranks as named).

    A clean position is *needed* if a unit sees it, or if clean rows are scored and it can be: in
    each document those before its last target block (`score_clean` "supervised": up to that block's
    end, "all": to the document's, if it has a target block). Others are computed by no rank in any
    mode.

    Attributes:
        block_of: int32[T], block of each position; -1 for padding.
        block_start, block_stop: int32[N].
        block_document_start: int32[N], first position of the block's document.
        block_index: int32[N], number of the block inside its document.
        units: the target units in corrupted order: by position, then by copy.
        unit_block: int32[U], the (first) block of each unit.
        unit_owner: int32[U], slot rank that computes the unit; -1 in mode CP, which splits units.
        clean_runs: clean positions that each slot rank computes; a position may have several.
        corrupted_runs: corrupted rows that each slot rank computes, by place in corrupted order.
        scorer: int32[T], the lowest slot rank that computes the clean position; -1 for none.
        cost: int64[R], work of each slot rank in visible pairs.
        options: what it was made with.
    """

    block_of: NDArray[np.int32]
    block_start: NDArray[np.int32]
    block_stop: NDArray[np.int32]
    block_document_start: NDArray[np.int32]
    block_index: NDArray[np.int32]
    units: Units
    unit_block: NDArray[np.int32]
    unit_owner: NDArray[np.int32]
    clean_runs: Runs
    corrupted_runs: Runs
    scorer: NDArray[np.int32]
    cost: NDArray[np.int64]
    options: SequenceOptions

    def clean_positions(self, rank: int) -> NDArray[np.int32]:
        """int32: the clean positions that slot rank `rank` computes, ascending."""
        return self.clean_runs.rows(rank).astype(np.int32)

    def corrupted_places(self, rank: int) -> NDArray[np.int64]:
        """int64: the corrupted rows that slot rank `rank` computes, by place, ascending."""
        return self.corrupted_runs.rows(rank)

    def rows_of(self, rank: int, multiple: int = 1) -> RankRows:
        """The rows of slot rank `rank`, filled up to a multiple of `multiple`, at least one row."""
        clean, corrupted = self.clean_positions(rank), self.corrupted_places(rank)
        rows = len(clean) + len(corrupted)
        filling = -rows % multiple if rows else multiple
        sent = rows + filling if self.options.splits_units else len(clean)
        return RankRows(clean, filling, corrupted, sent)

    def shard_group(self, rank: int) -> range:
        """The slot ranks that share clean rows with `rank`."""
        size = self.options.context_parallel_size
        first = rank // size * size
        return range(first, first + size)

    @property
    def num_rows(self) -> int:
        """Rows of the sample, each counted once: needed clean positions and corrupted rows."""
        return int(np.count_nonzero(self.scorer >= 0)) + int(self.units.offset[-1])


def refuse_mixed(sample: Sample, options: SequenceOptions) -> None:
    """Raise a ValueError if a block holds a response and a prompt that follows it."""
    place = first_mixed(
        sample.document, sample.position, options.block_size, sample.supervised, options.grid
    )
    if place is not None:
        key = sample.document_keys[sample.document[place]]
        raise ValueError(
            f"--response-end refuse: in the document with key {key} a response ends at token "
            f"{sample.position[place]}, inside a block of {options.block_size}, and a prompt "
            f"follows: its tokens would be seen by the response's; use --response-end cut, or pad "
            f"responses to whole blocks"
        )


def make_plan(sample: Sample, options: SequenceOptions) -> SequencePlan:
    """The plan of one packed row. A block no row of which can be scored has no corrupted rows.

    Raises:
        ValueError: a block holds a response and a prompt after it, and that is to be refused.
    """
    if options.response_end == "refuse":
        refuse_mixed(sample, options)
    grid = block_grid(
        sample.document, sample.position, options.block_size, sample.supervised, options.grid
    )
    used = int(np.count_nonzero(grid.block_of >= 0))
    scored = sample.supervised[:used]
    if options.alignment == "next":  # the row before a token scores it
        scored = np.append(scored[1:] & (sample.position[1:used] > 0), False)[:used]
    of_block = np.bincount(grid.block_of[:used], weights=scored, minlength=len(grid.start))
    target = np.repeat(np.flatnonzero(of_block > 0).astype(np.int32), options.copies)
    units = Units(
        copy=np.tile(np.arange(options.copies, dtype=np.int32), len(target) // options.copies),
        document=grid.document[target],
        start=grid.start[target],
        stop=grid.stop[target],
    )
    work = Work.of(grid, units, target, options)
    owner, clean, corrupted = (by_place if options.splits_units else by_unit)(work, options)
    scorer = np.full(len(grid.block_of), -1, dtype=np.int32)
    for start, stop, rank in zip(
        clean.start[::-1], clean.stop[::-1], clean.rank[::-1], strict=True
    ):
        scorer[start:stop] = rank  # runs come by rank, so the lowest is written last
    cost = np.zeros(options.slot, dtype=np.int64)
    for runs, total in ((clean, work.clean_cost), (corrupted, work.corrupted_cost)):
        np.add.at(cost, runs.rank, total[runs.stop] - total[runs.start])
    return SequencePlan(
        block_of=grid.block_of,
        block_start=grid.start,
        block_stop=grid.stop,
        block_document_start=grid.document_start,
        block_index=grid.index,
        units=units,
        unit_block=target,
        unit_owner=owner,
        clean_runs=clean,
        corrupted_runs=corrupted,
        scorer=scorer,
        cost=cost,
        options=options,
    )
