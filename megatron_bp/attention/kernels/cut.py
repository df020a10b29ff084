"""Cutting rows' key intervals into pieces: steps, staircases, chunks, and tiles of what is left."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp.attention.kernels.cut_tiles import Integers, Rows, cut_tiles, runs
from megatron_bp.attention.kernels.pieces import Limits, Pieces, Rectangle, Tiles, Trapezoid


def cut(lo: NDArray[Any], hi: NDArray[Any], limits: Limits | None = None) -> Pieces:
    """The pieces of rows that see the keys [lo_i, hi_i), none empty.

    Args:
        lo: integers [n].
        hi: integers [n].
        limits: what is worth which piece.
    """
    limits = limits or Limits()
    if len(lo) == 0:
        return Pieces((), (), ())
    wide_lo, wide_hi = lo.astype(np.int64), hi.astype(np.int64)
    assert bool((wide_hi > wide_lo).all()), "a row without keys"
    row = np.arange(len(lo), dtype=np.int64)
    rest = Rows(row, wide_lo, wide_hi, np.zeros_like(row))
    rectangles, rest = _steps(rest, limits)
    trapezoids, rest = _staircases(rest, limits)
    layers = [rest]
    for size in limits.chunks:
        layers, found = _chunks(layers, size, limits)
        rectangles += found
    tiles: list[Tiles] = []
    for layer in _joined(layers, len(lo)):
        tiles += cut_tiles(layer, len(lo), int(wide_hi.max()), limits)
    return Pieces(tuple(rectangles), tuple(trapezoids), tuple(tiles))


def _steps(rows: Rows, limits: Limits) -> tuple[list[Rectangle], Rows]:
    """Many rows that see the same keys: rectangles, and the other rows."""
    first, size = runs(rows.changes(0))
    row, lo, hi, _ = (x[first] for x in rows)
    keys = hi - lo
    worth = (size >= limits.step_rows) & (keys >= limits.rectangle_keys)
    worth &= size * keys >= limits.rectangle_pairs
    found = _rectangles(row[worth], size[worth], lo[worth], hi[worth])
    return found, rows.keep(~np.repeat(worth, size))


def _rectangles(row: Integers, size: Integers, lo: Integers, hi: Integers) -> list[Rectangle]:
    columns = (x.tolist() for x in (row, row + size, lo, hi))
    return [Rectangle(*bounds) for bounds in zip(*columns, strict=True)]


def _staircases(rows: Rows, limits: Limits) -> tuple[list[Trapezoid], Rows]:
    """Trapezoids under staircases of slope one, and what they leave of all rows.

    A step may be as high as it is long itself, or as the one before it is: rows that see their own
    block, or the blocks before it.
    """
    first, size = runs(rows.changes(0))
    if len(first) == 0:
        return [], rows
    row, lo, hi, _ = (x[first] for x in rows)
    rise = np.diff(hi)
    joins = (np.diff(lo) == 0) & (row[1:] == (row + size)[:-1])
    joins &= (rise == size[1:]) | (rise == size[:-1])
    joins &= (size[1:] < limits.step_rows) & (size[:-1] < limits.step_rows)
    stair, steps = runs(np.append(True, ~joins))
    # Row r of a trapezoid sees [lo, r + lead).
    lead = np.minimum.reduceat(hi - (row + size - 1), stair)
    most = np.maximum.reduceat(hi - row, stair)
    stop = (row + size)[stair + steps - 1]
    start = np.maximum(row[stair], lo[stair] - lead + 1)
    count = stop - start
    in_all = np.add.reduceat((hi - lo) * size, stair)
    in_it = count * (start + stop - 1 + 2 * (lead - lo[stair])) // 2
    worth = (count >= limits.trapezoid_rows) & (2 * in_it >= in_all)
    worth &= most - lead <= 2 * limits.step_rows
    columns = (x[worth].tolist() for x in (start, stop, lo[stair], stop - 1 + lead))
    found = [Trapezoid(*bounds) for bounds in zip(*columns, strict=True)]
    entries = np.add.reduceat(size, stair)
    covered = rows.row + np.repeat(lead, entries)
    left = np.where(np.repeat(worth, entries), np.maximum(rows.lo, covered), rows.lo)
    # A row of which nothing is left stays where it holds two others together.
    some = np.pad(rows.hi > left, 1)
    number = np.repeat(np.where(worth, np.arange(1, len(stair) + 1), 0), entries)
    left_over = rows._replace(lo=left, stair=number)
    return found, left_over.keep(some[1:-1] | (some[:-2] & some[2:]))


def _chunks(layers: list[Rows], size: int, limits: Limits) -> tuple[list[Rows], list[Rectangle]]:
    """Rectangles of about `size` rows under what they all see, and what is left and right of it."""
    left: list[Rows] = []
    found: list[Rectangle] = []
    for rows in layers:
        if len(rows.row) == 0:
            continue
        starts = rows.changes(size)
        starts[1:] |= (rows.lo[1:] >= rows.hi[:-1]) | (rows.hi[1:] <= rows.lo[:-1])
        place = rows.row - np.repeat(rows.row[starts], runs(starts)[1])
        step, length = runs(rows.changes(0))
        place = np.repeat(place[step], length) // size  # no step is divided
        starts[1:] |= np.diff(place) != 0
        first, count = runs(starts)
        lo, hi = np.maximum.reduceat(rows.lo, first), np.minimum.reduceat(rows.hi, first)
        keys = hi - lo
        worth = (keys >= limits.rectangle_keys) & (keys * count >= limits.rectangle_pairs)
        found += _rectangles(rows.row[first][worth], count[worth], lo[worth], hi[worth])
        cut_off, lo, hi = (np.repeat(x, count) for x in (worth, lo, hi))
        before = rows._replace(hi=np.where(cut_off, lo, rows.hi))
        left.append(before.keep(~cut_off | (lo > rows.lo)))
        left.append(rows._replace(lo=hi).keep(cut_off & (rows.hi > hi)))
    return left, found


def _joined(layers: list[Rows], num_rows: int) -> list[Rows]:
    """As few layers, in each of which no row is twice: the first that has room takes the next."""
    taken: list[NDArray[np.bool_]] = []
    members: list[list[Rows]] = []
    for rows in layers:
        if len(rows.row) == 0:
            continue
        for held, member in zip(taken, members, strict=True):
            if not held[rows.row].any():
                held[rows.row] = True
                member.append(rows)
                break
        else:
            taken.append(np.zeros(num_rows, dtype=np.bool_))
            taken[-1][rows.row] = True
            members.append([rows])
    joined = []
    for member in members:
        together = Rows(*(np.concatenate(x) for x in zip(*member, strict=True)))
        order = np.argsort(together.row)
        joined.append(Rows(*(x[order] for x in together)))
    return joined
