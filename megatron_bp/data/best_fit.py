"""Which chats share a row: best fit for training, in file order for evaluation.

Integers in and out; a chat is never split. Knows nothing of files, noise or ranks.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 1 << 14  # chats that are packed at once


@dataclass(frozen=True, eq=False)
class Rows:
    """R rows of whole chats.

    Attributes:
        chats: int64, chats of the first row, then those of the second, and so on.
        start: int64[R + 1]: row i holds `chats[start[i]:start[i + 1]]`.
    """

    chats: NDArray[np.int64]
    start: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start) - 1

    def of(self, row: int) -> NDArray[np.int64]:
        """int64: the chats of a row, in order."""
        return self.chats[self.start[row] : self.start[row + 1]]

    def sums(self, of_chats: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[R]: the sum over each row of a number that each chat has."""
        total = np.append(0, np.cumsum(of_chats[self.chats], dtype=np.int64))
        return np.asarray(total[self.start[1:]] - total[self.start[:-1]])

    def reordered(self, order: NDArray[np.int64]) -> "Rows":
        """The rows in another order."""
        sizes = np.diff(self.start)[order]
        start = np.append(0, np.cumsum(sizes, dtype=np.int64))
        place = np.arange(start[-1]) + np.repeat(self.start[order] - start[:-1], sizes)
        return Rows(self.chats[place], start)


def best_fit(
    chats: NDArray[np.int64], tokens: NDArray[np.int64], length: int, window: int = WINDOW
) -> Rows:
    """Rows of at most `length` tokens that hold each of the chats once.

    Best fit decreasing: the longest chat first, each into the fullest row that has room for it, or
    into a new one. It is done in windows of consecutive chats, so that which chats come at about
    the same time stays a matter of their order, and the work is n log n. Each window may end with
    rows that are not full.

    Args:
        chats: int64[n], chats in the (shuffled) order in which windows take them.
        tokens: int64[C], tokens of each chat; at most `length`, and at least 1 of those in `chats`.
        length: tokens of a row.
        window: chats of a window.
    """
    rows: list[NDArray[np.int64]] = []
    for begin in range(0, len(chats), window):
        part = chats[begin : begin + window]
        sizes = tokens[part]
        assert len(sizes) == 0 or (sizes.min() >= 1 and sizes.max() <= length)
        members: list[list[int]] = []
        room: list[tuple[int, int]] = []  # (tokens left, row), ascending
        for place in np.argsort(-sizes, kind="stable").tolist():
            size = int(sizes[place])
            at = bisect_left(room, (size, -1))
            if at == len(room):
                left, row = length, len(members)
                members.append([])
            else:
                left, row = room.pop(at)
            members[row].append(int(part[place]))
            if left > size:
                insort(room, (left - size, row))
        rows += [np.array(row, dtype=np.int64) for row in members]
    return _rows(rows)


def in_order(chats: NDArray[np.int64], tokens: NDArray[np.int64], length: int) -> Rows:
    """Rows that hold the chats in their order: one that does not fit begins the next row.

    Args:
        chats: int64[n].
        tokens: int64[C], tokens of each chat, at most `length`.
        length: tokens of a row.
    """
    start, used = [0], 0
    for place, size in enumerate(tokens[chats].tolist()):
        if used + size > length:
            start.append(place)
            used = 0
        used += size
    if len(chats):
        start.append(len(chats))
    return Rows(chats.astype(np.int64), np.array(start, dtype=np.int64))


def _rows(rows: list[NDArray[np.int64]]) -> Rows:
    sizes = [len(row) for row in rows]
    chats = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
    return Rows(chats, np.append(0, np.cumsum(sizes, dtype=np.int64)))
