"""Which rank computes which rows: units whole (by_unit), or all rows cut by place (by_place).

Integers only. Why: docs/design/0009-needed-prefix.md.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_bp.sequence.blocks import BlockGrid
from megatron_bp.sequence.partition import Runs, UnitCosts, deal, nearest_cuts, zigzag
from megatron_bp.sequence.units import SequenceOptions, Units


@dataclass(frozen=True, eq=False)
class Work:
    """What there is to deal out.

    Attributes:
        clean_cost: int64[used + 1], cost of all clean rows before a position, without any window.
        corrupted_cost: int64[X + 1], of all corrupted rows before a place.
        document_start: int64[U], first position of the unit's document.
        need: int64[U], the unit needs the clean positions [document_start, need) on its ranks.
    """

    grid: BlockGrid
    units: Units
    unit_block: NDArray[np.int32]
    clean_cost: NDArray[np.int64]
    corrupted_cost: NDArray[np.int64]
    document_start: NDArray[np.int64]
    need: NDArray[np.int64]

    @classmethod
    def of(
        cls, grid: BlockGrid, units: Units, unit_block: NDArray[np.int32], options: SequenceOptions
    ) -> "Work":
        size = (grid.stop - grid.start).astype(np.int64)
        before = (grid.start - grid.document_start).astype(np.int64)
        sees = np.repeat(before, size)
        if options.clean_relation == "block":
            sees += np.repeat(size, size)
        else:
            sees += _count_up(size)
        rows = size[unit_block]
        of_unit = np.repeat(before[unit_block], rows)
        of_unit += (
            np.repeat(rows, rows) if options.own_relation == "bidirectional" else _count_up(rows)
        )
        need = units.start.astype(np.int64)
        if options.score_clean != "none" and len(need):
            last = np.append(np.diff(units.document) != 0, True)
            end = units.stop
            if options.score_clean == "all":  # of the document
                after = np.searchsorted(grid.document, units.document, side="right")
                end = grid.stop[after - 1]
            need = np.where(last, end, need)
        return cls(
            grid=grid,
            units=units,
            unit_block=unit_block,
            clean_cost=np.append(0, np.cumsum(sees + options.row_cost)),
            corrupted_cost=np.append(0, np.cumsum(of_unit + options.row_cost)),
            document_start=grid.document_start[unit_block].astype(np.int64),
            need=need,
        )

    def prefixes(self, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Clean positions that the units [first, stop) need: [start, stop) of each document."""
        document = self.units.document[first:stop]
        if len(document) == 0:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        begins = np.flatnonzero(np.diff(document, prepend=-1))
        return (
            self.document_start[first:stop][begins],
            np.maximum.reduceat(self.need[first:stop], begins),
        )


def _count_up(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64: 1, 2, ... size for each size."""
    before = np.cumsum(sizes) - sizes
    return np.arange(1, sizes.sum() + 1) - np.repeat(before, sizes)


def by_unit(work: Work, options: SequenceOptions) -> tuple[NDArray[np.int32], Runs, Runs]:
    """(owner of each unit, clean runs, corrupted runs) where units are whole.

    Consecutive units go to each clean shard group, which computes the prefixes they need. Inside a
    group of C ranks the blocks that it has rows of, clean or corrupted, are cut into 2 C parts of
    about equal rows, dealt in zigzag: a unit stands with its block.
    """
    units, offset, grid = work.units, work.units.offset, work.grid
    ranks = options.context_parallel_size
    bounds = UnitCosts.of(
        np.diff(work.corrupted_cost[offset]),
        work.clean_cost[work.need] - work.clean_cost[work.document_start],
        units.document,
    ).split(options.groups)
    owner = np.zeros(len(units), dtype=np.int32)
    clean = []
    for group in range(options.groups):
        first, stop = int(bounds[group]), int(bounds[group + 1])
        spans = work.prefixes(first, stop)
        if first == stop:
            continue
        part_start, part_rank = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int32)
        if ranks > 1:
            part_start, part_rank = _zigzag_parts(work, slice(first, stop), spans, 2 * ranks)
        part_rank = part_rank + np.int32(group * ranks)
        home = (
            np.searchsorted(part_start, grid.start[work.unit_block[first:stop]], side="right") - 1
        )
        owner[first:stop] = part_rank[home]
        clean.append(deal(*spans, part_start, part_rank))
    first_unit = np.flatnonzero(np.diff(owner, prepend=-1))
    corrupted = Runs.of(
        offset[first_unit], offset[np.append(first_unit[1:], len(units))], owner[first_unit]
    )
    return owner, _joined(clean), corrupted


def _zigzag_parts(
    work: Work,
    mine: slice,
    spans: tuple[NDArray[np.int64], NDArray[np.int64]],
    parts: int,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """(first position, rank in the group) of each part of a group's rows, empty parts left out.

    Args:
        work: see `Work`.
        mine: the group's units.
        spans: the clean positions that it needs.
        parts: how many to aim at.
    """
    grid, offset = work.grid, work.units.offset
    span = np.searchsorted(spans[0], grid.start, side="right") - 1
    needed = (span >= 0) & (grid.start < spans[1][span])
    weight = np.where(needed, grid.stop - grid.start, 0).astype(np.int64)
    np.add.at(weight, work.unit_block[mine], np.diff(offset)[mine])
    blocks = np.flatnonzero(weight)
    edges = np.append(0, np.cumsum(weight[blocks]))
    cuts = nearest_cuts(edges, parts)
    real = cuts[1:] > cuts[:-1]
    first = blocks[np.searchsorted(edges, cuts[:-1][real])]
    return grid.start[first].astype(np.int64), zigzag(parts)[real]


def _joined(runs: list[Runs]) -> Runs:
    """All runs of several."""
    nothing = np.zeros(0, dtype=np.int64)
    return Runs.of(
        np.concatenate([nothing, *(r.start for r in runs)]),
        np.concatenate([nothing, *(r.stop for r in runs)]),
        np.concatenate([nothing.astype(np.int32), *(r.rank for r in runs)]),
    )


def by_place(work: Work, options: SequenceOptions) -> tuple[NDArray[np.int32], Runs, Runs]:
    """(-1 for each unit, clean runs, corrupted runs) in mode CP.

    The rows [corrupted, needed clean] are cut into 2 C equal chunks, wherever that falls, dealt
    head-tail.
    """
    ranks = zigzag(2 * options.context_parallel_size)
    spans = work.prefixes(0, len(work.units))
    size = spans[1] - spans[0]
    corrupted, clean = int(work.units.offset[-1]), int(size.sum())
    cuts = (corrupted + clean) * np.arange(len(ranks) + 1, dtype=np.int64) // len(ranks)
    of_corrupted = np.clip(cuts, 0, corrupted)
    of_clean = np.clip(cuts - corrupted, 0, clean)
    real = of_clean[1:] > of_clean[:-1]
    compact = of_clean[:-1][real]
    before = np.cumsum(size) - size
    held = size > 0  # searchsorted must not land on a document of which nothing is needed
    span = np.searchsorted(before[held], compact, side="right") - 1
    part_start = spans[0][held][span] + compact - before[held][span]
    return (
        np.full(len(work.units), -1, dtype=np.int32),
        deal(*spans, part_start, ranks[real]),
        Runs.of(of_corrupted[:-1], of_corrupted[1:], ranks),
    )
