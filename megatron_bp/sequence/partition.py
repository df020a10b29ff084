"""Who computes what: units over groups of ranks, clean and corrupted rows over ranks.

Integers only; no process group is known here. See docs/design/0009-needed-prefix.md.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Runs:
    """Rows dealt to ranks: rank[i] computes rows [start[i], stop[i]), K runs, none empty.

    Sorted by rank, then by start. What a rank holds stands in its memory in this order, so the rows
    that it holds of any interval are one interval there.

    Attributes:
        start, stop: int64[K].
        rank: int32[K], slot rank.
    """

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    rank: NDArray[np.int32]

    @classmethod
    def of(
        cls, start: NDArray[np.int64], stop: NDArray[np.int64], rank: NDArray[np.int32]
    ) -> "Runs":
        """Runs in any order, sorted; empty ones are left out, touching ones of a rank joined."""
        real = np.flatnonzero(stop > start)
        order = real[np.lexsort((start[real], rank[real]))]
        start, stop, rank = start[order], stop[order], rank[order]
        first = np.ones(len(start), dtype=np.bool_)
        first[1:] = (start[1:] != stop[:-1]) | (rank[1:] != rank[:-1])
        last = np.append(first[1:], True)[: len(first)]
        return cls(start[first], stop[last], rank[first])

    def spans(self, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(start, stop), int64: the runs of a rank, ascending."""
        mine = slice(*np.searchsorted(self.rank, [rank, rank + 1]))
        return self.start[mine], self.stop[mine]

    def rows(self, rank: int) -> NDArray[np.int64]:
        """int64: the rows of a rank, ascending."""
        return expand(*self.spans(rank))


def expand(start: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64: the numbers of all intervals [start, stop), one after the other."""
    size = stop - start
    before = np.cumsum(size) - size
    return np.repeat(start - before, size) + np.arange(size.sum())


def zigzag(parts: int) -> NDArray[np.int32]:
    """int32[parts]: ranks of 2 R parts, dealt head-tail: r holds parts r and 2 R - 1 - r."""
    part = np.arange(parts, dtype=np.int32)
    return np.minimum(part, parts - 1 - part)


def nearest_cuts(edges: NDArray[np.int64], ideal: NDArray[np.float64]) -> NDArray[np.int64]:
    """int64: for each ideal cut the number of the edge nearest to it; the first and last are kept.

    Args:
        edges: ascending, at least two.
        ideal: ascending, from edges[0] to edges[-1]; neighbours may get the same edge.
    """
    right = np.clip(np.searchsorted(edges, ideal), 1, len(edges) - 1)
    left = right - 1
    nearer_left = ideal - edges[left] < edges[right] - ideal
    cuts: NDArray[np.int64] = np.where(nearer_left, left, right)
    cuts[0], cuts[-1] = 0, len(edges) - 1
    return cuts


def deal(
    span_start: NDArray[np.int64],
    span_stop: NDArray[np.int64],
    part_start: NDArray[np.int64],
    part_rank: NDArray[np.int32],
) -> Runs:
    """Spans of positions cut where parts begin: what lies in part i goes to part_rank[i].

    Args:
        span_start: of disjoint spans, ascending; empty ones are allowed.
        span_stop: see span_start.
        part_start: ascending; the first is at or before the first span.
        part_rank: of each part.
    """
    real = span_stop > span_start
    span_start, span_stop = span_start[real], span_stop[real]
    if len(span_start) == 0:
        return Runs.of(span_start, span_stop, np.zeros(0, dtype=np.int32))
    edges = np.unique(np.concatenate([span_start, span_stop, part_start]))
    start, stop = edges[:-1], edges[1:]
    span = np.searchsorted(span_start, start, side="right") - 1
    inside = (span >= 0) & (start < span_stop[span])
    start, stop = start[inside], stop[inside]
    part = np.searchsorted(part_start, start, side="right") - 1
    return Runs.of(start, stop, part_rank[part])


@dataclass(frozen=True, eq=False)
class UnitCosts:
    """What consecutive units cost a group: cost(a, b) = S[b] - S[a] + Q[b - 1] - D[a].

    That is the units' own rows, and, document by document, the clean prefix up to the last of them.
    It never falls when the interval grows.

    Attributes:
        own: int64[U + 1], S: own cost of all units before.
        reach: int64[U], Q: cost of the clean prefix that a unit needs, plus those of all documents
            before its own up to their last units.
        before: int64[U], D: the same without its own document's.
    """

    own: NDArray[np.int64]
    reach: NDArray[np.int64]
    before: NDArray[np.int64]

    @classmethod
    def of(
        cls, own: NDArray[np.int64], prefix: NDArray[np.int64], document: NDArray[np.int32]
    ) -> "UnitCosts":
        """From the own cost and the needed prefix's cost of each unit, and its document."""
        first = np.flatnonzero(np.diff(document, prepend=-1))
        whole = np.maximum.reduceat(prefix, first) if len(first) else prefix
        before = np.repeat(np.cumsum(whole) - whole, np.diff(first, append=len(document)))
        return cls(np.append(0, np.cumsum(own)), before + prefix, before)

    def shares(self, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[groups]: what each of consecutive shares costs; an empty one nothing."""
        cost = np.zeros(len(bounds) - 1, dtype=np.int64)
        real = np.flatnonzero(bounds[1:] > bounds[:-1])
        first, stop = bounds[real], bounds[real + 1]
        cost[real] = self.own[stop] - self.own[first] + self.reach[stop - 1] - self.before[first]
        return cost

    def split(self, groups: int) -> NDArray[np.int64]:
        """int64[groups + 1]: bounds of consecutive shares whose dearest costs as little as can be.

        Whether a bound on the cost suffices is known by filling one group after the other, since
        the cost only grows; the smallest that does is found by halving. Late groups may be empty.
        """
        units = len(self.reach)
        if units == 0:
            return np.zeros(groups + 1, dtype=np.int64)
        stop_cost: list[int] = (self.own[1:] + self.reach).tolist()
        start_cost: list[int] = (self.own[:-1] + self.before).tolist()

        def fill(most: int) -> list[int]:
            """Bounds when each group takes all that `most` allows; they may not reach U."""
            bounds = [0]
            for _ in range(groups):
                first = bounds[-1]
                if first < units:
                    first = bisect_right(stop_cost, start_cost[first] + most)
                bounds.append(first)
            return bounds

        low = int((self.own[1:] + self.reach - self.own[:-1] - self.before).max())
        high = stop_cost[-1] - start_cost[0]
        while low < high:
            middle = (low + high) // 2
            if fill(middle)[-1] == units:
                high = middle
            else:
                low = middle + 1
        return np.array(fill(high), dtype=np.int64)
