"""Which clean positions the rows of a rank see, and which of them it lacks, as intervals.

The rows of a run see one interval of clean positions, and those of a unit another: no row is looked
at by itself. Every rank does this for all ranks of its clean shard group, for each window. Integers
only; no torch, no process group.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_bp.sequence.partition import expand
from megatron_bp.sequence.plan import SequencePlan

Spans = tuple[NDArray[np.int64], NDArray[np.int64]]


def seen(plan: SequencePlan, rank: int, window: int | None = None) -> Spans:
    """(start, stop), int64: the clean positions that at least one row of a rank sees.

    Disjoint, ascending, none empty, none touching the next. The union of [clean_lo, clean_hi) over
    the rows of the rank in `visibility(plan, clean, corrupted, window)`.

    Args:
        plan: the packed row's.
        rank: slot rank.
        window: sliding window in tokens, None for none (see `visibility`).
    """
    of_clean = _seen_by_clean(plan, rank, window)
    of_corrupted = _seen_by_corrupted(plan, rank, window)
    return union(
        np.concatenate([of_clean[0], of_corrupted[0]]),
        np.concatenate([of_clean[1], of_corrupted[1]]),
    )


def lacked_spans(plan: SequencePlan, rank: int, window: int | None = None) -> Spans:
    """(start, stop), int64: the clean positions that a rank sees and does not hold, as `seen`."""
    return difference(seen(plan, rank, window), plan.clean_runs.spans(rank))


def lacked(plan: SequencePlan, rank: int, window: int | None = None) -> NDArray[np.int32]:
    """int32: the clean positions that a rank sees and does not hold, ascending."""
    return expand(*lacked_spans(plan, rank, window)).astype(np.int32)


def union(start: NDArray[np.int64], stop: NDArray[np.int64]) -> Spans:
    """Intervals in any order, some maybe empty, joined where they overlap or touch."""
    real = np.flatnonzero(stop > start)
    order = real[np.argsort(start[real], kind="stable")]
    start, stop = start[order], np.maximum.accumulate(stop[order])
    first = np.ones(len(start), dtype=np.bool_)
    first[1:] = start[1:] > stop[:-1]
    last = np.append(first[1:], True)[: len(first)]
    return start[first], stop[last]


def difference(spans: Spans, held: Spans) -> Spans:
    """What is left of some intervals without others; both ascend and are disjoint."""
    edges = np.unique(np.concatenate([*spans, *held]))
    if len(edges) == 0:
        return spans
    start, stop = edges[:-1], edges[1:]
    left = _inside(start, spans) & ~_inside(start, held)
    return union(start[left], stop[left])


def _inside(point: NDArray[np.int64], spans: Spans) -> NDArray[np.bool_]:
    """bool: whether each point lies in one of some ascending, disjoint intervals."""
    begun = np.searchsorted(spans[0], point, side="right")
    return begun > np.searchsorted(spans[1], point, side="right")


def _seen_by_clean(plan: SequencePlan, rank: int, window: int | None) -> Spans:
    """What a rank's clean rows see, run by run.

    Each sees itself, and both ends of what it sees only ascend, also where a document ends: so rows
    next to each other see one interval together.
    """
    start, stop = plan.clean_runs.spans(rank)
    lo = plan.block_document_start[plan.block_of[start]].astype(np.int64)
    if window is not None:
        lo = np.maximum(lo, start - (window - 1))
    if plan.options.clean_relation == "block":
        stop = plan.block_stop[plan.block_of[stop - 1]].astype(np.int64)
    return lo, stop


def _seen_by_corrupted(plan: SequencePlan, rank: int, window: int | None) -> Spans:
    """What a rank's corrupted rows see: of each unit, what the first of them does."""
    start, stop = plan.corrupted_runs.spans(rank)
    offset = plan.units.offset
    unit_stop = np.searchsorted(offset, stop, side="left")
    unit_start = np.searchsorted(offset, start, side="right") - 1
    unit = expand(unit_start, unit_stop)
    block = plan.unit_block[unit]
    lo = plan.block_document_start[block].astype(np.int64)
    hi = plan.block_start[block].astype(np.int64)
    if window is not None:
        anchor = hi
        if plan.options.window_anchor == "row":  # in mode CP a run may start inside a unit
            place = np.maximum(offset[unit], np.repeat(start, unit_stop - unit_start))
            anchor = plan.units.start[unit] + place - offset[unit]
        lo = np.minimum(np.maximum(lo, anchor - (window - 1)), hi)
    return lo, hi
