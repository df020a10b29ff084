"""Units moved off their home until no rank has much more than its part of the work.

A unit's home is the rank of its clean chunk. A rank sees the clean rows of a document up to its
*reach* there. A unit that starts before it costs nothing to take but its work; one that starts
later makes its taker see, and so be sent, the clean rows in between. Whoever gives a unit away goes
on seeing what it saw: its clean rows do. Integers only. Why so: docs/design/0015-moving-units.md.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Further clean rows for a unit of work are kept as an integer, this many times as large. Rows are
# fewer than 2^22, so that it fits.
_SCALE = 1 << 40
# A run by itself counts as so many further rows: few long runs rather than many of a unit or two.
_RUN = 512
# Of a rank's runs of units only so many, the dearest, are looked at: time, with many documents.
_PIECES = 64


@dataclass(frozen=True, eq=False)
class Movable:
    """The U units of a clean shard group of C ranks, in corrupted order, and its K documents.

    Attributes:
        cost: int64[U], work of each, at least 1.
        start: int64[U], end of the clean rows that each sees; it only ascends.
        document: int64[U], ordinal in the group, 0 to K - 1; it only ascends.
        home: int32[U], rank of the group, 0 to C - 1.
        load: int64[C], work of each rank without its units.
        reach: int64[C, K], end of the clean rows of a document that a rank sees without any unit;
            where it sees none, the document's start.
    """

    cost: NDArray[np.int64]
    start: NDArray[np.int64]
    document: NDArray[np.int64]
    home: NDArray[np.int32]
    load: NDArray[np.int64]
    reach: NDArray[np.int64]


def moved(units: Movable, most: int) -> tuple[NDArray[np.int32], int]:
    """(rank of each unit, work of the rank that then has most), int32[U]; few are away from home.

    Again and again the rank that has most gives a run of units away, until none has more than
    `most`, or the one that has most cannot be helped. Moves that did not help the worst of all
    ranks, as another one is as bad, are taken back.

    Args:
        units: see `Movable`.
        most: work that a rank may have; not less than the mean, or they move until all is level.
    """
    state = _State(units, most)
    owner, worst = state.owner.copy(), int(state.load.max())
    while state.load.max() > most and state.step():
        if state.load.max() < worst:
            owner, worst = state.owner.copy(), int(state.load.max())
    return owner, worst


class _State:
    """Who has what by now."""

    def __init__(self, units: Movable, most: int) -> None:
        self.units, self.most = units, most
        self.owner, self.load, self.reach = units.home.copy(), units.load.copy(), units.reach.copy()
        self._before = np.append(0, np.cumsum(units.cost))
        np.add.at(self.load, self.owner, units.cost)
        np.maximum.at(self.reach, (self.owner, units.document), units.start)

    def step(self) -> bool:
        """One run of units goes from the rank that has most; False if no move helps it."""
        donor = int(self.load.argmax())
        first, stop = self._pieces(donor)
        move = self._within(donor, first, stop) or self._level(donor)
        if move is None:
            return False
        a, b, taker = move
        work = self._before[b] - self._before[a]
        document = self.units.document[a]
        self.owner[a:b] = taker
        self.load[donor] -= work
        self.load[taker] += work
        self.reach[taker, document] = max(self.reach[taker, document], self.units.start[b - 1])
        return True

    def _pieces(self, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(first, stop), int64[P]: runs of a rank's units that follow each other in one document.

        The dearest, in order.
        """
        mine = np.flatnonzero(self.owner == rank)
        cut = (np.diff(mine) > 1) | (np.diff(self.units.document[mine]) > 0)
        begins = np.append(True, cut)[: len(mine)]
        ends = np.append(cut, True)[: len(mine)]
        first, stop = mine[begins], mine[ends] + 1
        if len(first) > _PIECES:
            work = self._before[stop] - self._before[first]
            dearest = np.sort(np.argsort(-work, kind="stable")[:_PIECES])
            first, stop = first[dearest], stop[dearest]
        return first, stop

    def _within(
        self, donor: int, first: NDArray[np.int64], stop: NDArray[np.int64]
    ) -> tuple[int, int, int] | None:
        """(first unit, stop, taker) of the best run that its taker has room for; None for none.

        Of each piece and taker there are two, none longer than it takes to help the donor: the last
        units within the taker's reach, and the first units wherever that ends. The one with the
        fewest further clean rows for its work is best, where a run by itself counts for some.
        """
        before, start = self._before, self.units.start
        reach = self.reach[:, self.units.document[first]].T
        first, stop = first[:, None], stop[:, None]
        beyond = np.clip(np.searchsorted(start, reach, side="right"), first, stop)
        surplus, room = self.load[donor] - self.most, np.maximum(self.most - self.load, 0)
        # The last units within reach: [begin, beyond).
        begin = np.searchsorted(before, before[beyond] - surplus, side="right") - 1
        begin = np.maximum(begin, np.searchsorted(before, before[beyond] - room, side="left"))
        begin = np.clip(begin, first, beyond)
        # The first units: [first, end).
        end = np.searchsorted(before, before[first] + surplus, side="left")
        end = np.minimum(end, np.searchsorted(before, before[first] + room, side="right") - 1)
        end = np.clip(end, first, stop)
        a = np.stack([begin, np.broadcast_to(first, end.shape)])
        b = np.stack([beyond, end])
        work = before[b] - before[a]
        if work.max(initial=0) == 0:
            return None
        further = np.maximum(start[np.maximum(b, 1) - 1] - reach, 0) + _RUN
        price = further * _SCALE // np.maximum(work, 1)
        price[work == 0] = np.iinfo(np.int64).max
        which = np.unravel_index(price.argmin(), price.shape)
        return int(a[which]), int(b[which]), int(which[2])

    def _level(self, donor: int) -> tuple[int, int, int] | None:
        """(unit, unit + 1, taker): one that leaves both with less than the donor had.

        For when no rank has room: units are few, or the mean is more than `most`. The one for which
        the taker sees the fewest further clean rows is best, then the one that leaves them most
        level. None if none helps.
        """
        mine = np.flatnonzero(self.owner == donor)
        cost = self.units.cost[mine][:, None]
        left, taken = self.load[donor] - cost, self.load + cost
        higher = np.maximum(left, taken)
        helps = taken < self.load[donor]
        if not helps.any():
            return None
        seen = self.reach[:, self.units.document[mine]].T
        further = np.maximum(self.units.start[mine][:, None] - seen, 0)
        fewest = helps & (further == further[helps].min())
        best = np.where(fewest, higher, self.load[donor]).argmin()
        piece, taker = np.unravel_index(best, higher.shape)
        return int(mine[piece]), int(mine[piece]) + 1, int(taker)
