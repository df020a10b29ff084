"""Rows that see few keys each, cut into batches of tiles."""

# Shapes: n rows, T tiles of a batch, t rows of a tile.

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_bp.attention.kernels.pieces import Limits, Tiles

Integers = NDArray[np.int64]


class Rows(NamedTuple):
    """Rows in ascending order, none twice, the keys [lo, hi) of each, and of which stair it is."""

    row: Integers
    lo: Integers
    hi: Integers
    stair: Integers

    def keep(self, chosen: NDArray[np.bool_]) -> "Rows":
        return Rows(*(x[chosen] for x in self))

    def changes(self, most: int) -> NDArray[np.bool_]:
        """bool[n]: where rows do not go on, or lo or hi changes by more than `most`."""
        change = np.ones(len(self.row), dtype=np.bool_)
        change[1:] = (np.diff(self.row) != 1) | (np.diff(self.stair) != 0)
        for bound in (self.lo, self.hi):
            change[1:] |= np.abs(np.diff(bound)) > most
        return change


def runs(starts: NDArray[np.bool_]) -> tuple[Integers, Integers]:
    """Where runs start, and how long they are; starts[0] is True, if there is one."""
    first = np.flatnonzero(starts)
    return first, np.diff(first, append=len(starts))


def cut_tiles(rows: Rows, num_rows: int, num_keys: int, limits: Limits) -> list[Tiles]:
    """All of these rows in batches of tiles."""
    # A tile holds one long step, or part of it, or some short ones.
    size = runs(rows.changes(0))[1]
    length = np.repeat(size, size)
    long = 2 * length > limits.tile_rows
    height = np.where(long, np.minimum(length, 4 * limits.tile_rows), limits.tile_rows)
    starts = rows.changes(2 * limits.tile_rows)
    starts[1:] |= np.diff(np.where(long, length, 0)) != 0
    place = rows.row - np.repeat(rows.row[starts], runs(starts)[1])
    starts[1:] |= np.diff(place // height) != 0
    first, count = runs(starts)
    key, stop = np.minimum.reduceat(rows.lo, first), np.maximum.reduceat(rows.hi, first)
    full = np.maximum.reduceat(rows.lo, first) == key
    full &= np.minimum.reduceat(rows.hi, first) == stop

    # What spans too many keys is divided; `part` numbers the tiles of the same rows.
    parts = -(-(stop - key) // limits.tile_keys)
    of = np.repeat(np.arange(len(first)), parts)
    part = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
    first, count, full, key = first[of], count[of], full[of], key[of] + part * limits.tile_keys
    width = np.minimum(stop[of] - key, limits.tile_keys)

    # Full tiles of one shape need no mask; others go with those of about their shape.
    _, same, often = np.unique(
        np.where(full, _code(part, count, width), -1), return_inverse=True, return_counts=True
    )
    plain = full & (often[same] >= 4)
    kind = np.where(plain, _code(part, count, width), _code(part, _power(count), _power(width)))
    _, batch, members = np.unique(2 * kind + plain, return_inverse=True, return_counts=True)
    batches = []
    for mine in np.split(np.argsort(batch, kind="stable"), np.cumsum(members)[:-1]):
        most = max(1, limits.batch_pairs // int(count[mine].max() * width[mine].max()))
        for some in np.split(mine, range(most, len(mine), most)):
            cells = _Cells(first[some], count[some], key[some], width[some])
            batches.append(_batch(rows, cells, num_rows, num_keys))
    return batches


def _code(part: Integers, count: Integers, width: Integers) -> Integers:
    """One number for three of less than 2^20 each."""
    return (part << 40) + (count << 20) + width


def _power(size: Integers) -> Integers:
    """The next power of two, from 16 on."""
    return np.int64(1) << np.ceil(np.log2(np.maximum(size, 16))).astype(np.int64)


class _Cells(NamedTuple):
    """Tiles before they are padded: index of the first entry, entries, first key, keys."""

    first: Integers
    entries: Integers
    key: Integers
    width: Integers


def _batch(rows: Rows, cells: _Cells, num_rows: int, num_keys: int) -> Tiles:
    """The tiles in one shape, moved to where they stand inside of all rows and keys."""
    height, width = int(cells.entries.max()), int(cells.width.max())
    row = np.minimum(rows.row[cells.first], num_rows - height)
    key = np.minimum(cells.key, num_keys - width)
    place = np.arange(height) - (rows.row[cells.first] - row)[:, None]
    real = (place >= 0) & (place < cells.entries[:, None])
    entry = cells.first[:, None] + np.where(real, place, 0)
    first, stop = cells.key[:, None], (cells.key + cells.width)[:, None]
    lo, hi = np.maximum(rows.lo[entry], first), np.minimum(rows.hi[entry], stop)
    real &= hi > lo  # a row may see no key of a part
    return Tiles(
        row=row.astype(np.int32),
        key=key.astype(np.int32),
        rows=height,
        keys=width,
        lo=np.where(real, lo - key[:, None], 0).astype(np.int32),
        hi=np.where(real, hi - key[:, None], 0).astype(np.int32),
        full=bool((real & (hi - lo == width)).all()),
    )
