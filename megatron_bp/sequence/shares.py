"""Which rank computes which rows: units whole (by_unit), or all rows cut by place (by_place).

Integers only. Why: docs/design/0009-needed-prefix.md.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_bp.sequence.blocks import BlockGrid
from megatron_bp.sequence.chunks import WEIGHINGS, chunks
from megatron_bp.sequence.moving import Movable, moved
from megatron_bp.sequence.partition import Runs, UnitCosts, deal, expand, zigzag
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
    group of C ranks the blocks that it has rows of, clean or corrupted, are cut into 2 C chunks,
    dealt in zigzag. A unit's home is the rank of its block; some are moved where ranks have too
    much (`moving.py`).
    """
    units, offset = work.units, work.units.offset
    costs = UnitCosts.of(
        np.diff(work.corrupted_cost[offset]),
        work.clean_cost[work.need] - work.clean_cost[work.document_start],
        units.document,
    )
    bounds = costs.split(options.groups)
    # What the ranks of the dearest group have, if it is level; lighter groups may have as much.
    dearest = int(costs.shares(bounds).max(initial=0)) / options.context_parallel_size
    stay = options.align_chunks or math.isinf(options.max_imbalance)
    # A hundredth of the excess is left over: `row_cost` is rounded to whole pairs.
    most = None if stay else int((1 + 0.99 * (options.max_imbalance - 1)) * dearest)
    owner = np.zeros(len(units), dtype=np.int32)
    clean = []
    for group in range(options.groups):
        mine = slice(int(bounds[group]), int(bounds[group + 1]))
        if mine.start == mine.stop:
            continue
        first = group * options.context_parallel_size
        of_group, runs = _in_group(work, mine, options.context_parallel_size, most)
        owner[mine] = of_group + np.int32(first)
        clean.append(Runs(runs.start, runs.stop, runs.rank + np.int32(first)))
    first_unit = np.flatnonzero(np.diff(owner, prepend=-1))
    corrupted = Runs.of(
        offset[first_unit], offset[np.append(first_unit[1:], len(units))], owner[first_unit]
    )
    return owner, _joined(clean), corrupted


def _in_group(
    work: Work, mine: slice, ranks: int, most: int | None
) -> tuple[NDArray[np.int32], Runs]:
    """(rank of each unit, clean runs) inside a group of `ranks` ranks, counted from 0.

    Args:
        work: see `Work`.
        mine: the group's units.
        ranks: of the group.
        most: work that a rank should have at most; None: units stay at home.
    """
    grid, block = work.grid, work.unit_block[mine]
    spans = work.prefixes(mine.start, mine.stop)
    span = np.searchsorted(spans[0], grid.start, side="right") - 1
    needed = (span >= 0) & (grid.start < spans[1][span])
    rows = np.where(needed, grid.stop - grid.start, 0).astype(np.int64)
    total = np.where(needed, np.diff(work.clean_cost[np.append(grid.start, grid.stop[-1])]), 0)
    offset = work.units.offset[mine.start : mine.stop + 1]
    cost = np.diff(work.corrupted_cost[offset])
    np.add.at(rows, block, np.diff(offset))
    np.add.at(total, block, cost)
    best: tuple[int, NDArray[np.int32], Runs] | None = None
    for weighing in WEIGHINGS:
        first, rank = chunks(rows, total, ranks, weighing)
        clean = deal(*spans, grid.start[first].astype(np.int64), rank)
        owner = rank[np.searchsorted(first, block, side="right") - 1]
        load = np.zeros(ranks, dtype=np.int64)
        np.add.at(load, clean.rank, work.clean_cost[clean.stop] - work.clean_cost[clean.start])
        if most is None:
            return owner, clean
        # Moving units cannot help a rank whose clean rows alone are too much: other chunks may.
        too_much = load.max() > most
        if too_much and weighing:
            continue
        document = np.cumsum(np.diff(work.units.document[mine], prepend=-1) > 0) - 1
        start = work.units.start[mine].astype(np.int64)
        movable = Movable(cost, start, document, owner, load, _reach(clean, spans, ranks))
        owner, worst = moved(movable, most)
        if best is None or worst < best[0]:
            best = worst, owner, clean
        if not too_much:
            break
    assert best is not None
    return best[1], best[2]


def _reach(
    clean: Runs, spans: tuple[NDArray[np.int64], NDArray[np.int64]], ranks: int
) -> NDArray[np.int64]:
    """int64[C, K]: how far in each document a rank has clean rows; its start where it has none."""
    reach = np.tile(spans[0], (ranks, 1))
    first = np.searchsorted(spans[0], clean.start, side="right") - 1
    stop = np.searchsorted(spans[0], clean.stop, side="left")
    run = np.repeat(np.arange(len(first)), stop - first)
    document = expand(first, stop)
    np.maximum.at(
        reach, (clean.rank[run], document), np.minimum(clean.stop[run], spans[1][document])
    )
    return reach


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
