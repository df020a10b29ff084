"""Pieces as calls of a variable-length FlashAttention: which rows and keys stand in which call.

A call has segments: segment s holds some rows and some keys, and every row sees every key of it
(a rectangle), or, causal, the last row sees all keys and each row before it one less (a trapezoid:
FlashAttention aligns the mask at the bottom right). Rows of a call are all different, so that its
result can be merged at once; keys may be in several segments. Host only: numpy, no torch.
"""

# Shapes: N segments.

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_bp.attention.kernels.pieces import Pieces, Tiles

Integers = NDArray[np.int64]
Places = slice | Integers

SOLO_PAIRS = 1 << 22  # a segment of so many pairs is a call of its own: its slices need no copy
MOST_KEYS = 1 << 16  # copied keys of a call, unless one segment has more


@dataclass(frozen=True, eq=False)
class Call:
    """One call: its rows and keys, segment after segment.

    Attributes:
        rows, keys: where they stand among the part's; a slice needs no copy.
        row_offsets, key_offsets: int32[N + 1], where each segment begins in them.
        max_rows, max_keys: of the largest segment.
        causal: see above; False: rectangles.
        lag: of a causal call: its last row does not see the last `lag` keys either, and so on (a
            right window of -lag).
    """

    rows: Places
    keys: Places
    row_offsets: NDArray[np.int32]
    key_offsets: NDArray[np.int32]
    max_rows: int
    max_keys: int
    causal: bool
    lag: int = 0


def make_calls(
    pieces: Pieces, num_keys: int, windows: bool = False
) -> tuple[list[Call], tuple[Tiles, ...]]:
    """The calls for rectangles, trapezoids and full tiles; and the tiles that are masked.

    Args:
        pieces: the cover of the rows' intervals.
        num_keys: of the part.
        windows: whether calls may lag, which saves copies of packed documents' keys.
    """
    rectangles = [np.array(pieces.rectangles, dtype=np.int64).reshape(-1, 4)]
    masked = []
    for tiles in pieces.tiles:
        if tiles.full:
            row, key = tiles.row.astype(np.int64), tiles.key.astype(np.int64)
            rectangles.append(np.stack([row, row + tiles.rows, key, key + tiles.keys], axis=1))
        else:
            masked.append(tiles)
    trapezoids = np.array(pieces.trapezoids, dtype=np.int64).reshape(-1, 4)
    calls: list[Call] = []
    if windows:
        calls, trapezoids = _lagging(trapezoids, num_keys)
    calls += _calls(trapezoids, causal=True)
    calls += _calls(np.concatenate(rectangles), causal=False)
    return calls, tuple(masked)


def _calls(segments: Integers, causal: bool) -> list[Call]:
    """Calls of segments int64[N, 4] (row_lo, row_hi, key_lo, key_hi), in order of their rows."""
    segments = segments[np.argsort(segments[:, 0], kind="stable")]
    pairs = (segments[:, 1] - segments[:, 0]) * (segments[:, 3] - segments[:, 2])
    solo = pairs >= SOLO_PAIRS
    calls = [_call(segment[None], causal) for segment in segments[solo]]
    for wave in _waves(segments[~solo]):
        calls += [_call(some, causal) for some in _within_budget(wave)]
    return calls


def _waves(segments: Integers) -> list[Integers]:
    """The segments, sorted by row, in as few groups as can be without a row twice in a group."""
    if len(segments) == 0:
        return []
    if bool((segments[1:, 0] >= segments[:-1, 1]).all()):
        return [segments]
    ends: list[int] = []
    wave = np.zeros(len(segments), dtype=np.int64)
    for index, (row_lo, row_hi) in enumerate(segments[:, :2].tolist()):
        free = next((w for w, end in enumerate(ends) if end <= row_lo), len(ends))
        ends[free : free + 1] = [row_hi]
        wave[index] = free
    return [segments[wave == each] for each in range(len(ends))]


def _within_budget(segments: Integers) -> list[Integers]:
    """The segments of a wave, cut where the keys to copy would be more than MOST_KEYS."""
    if _joined(segments[:, 2], segments[:, 3]):
        return [segments]
    count = segments[:, 3] - segments[:, 2]
    part = (np.cumsum(count) - 1) // MOST_KEYS
    return np.split(segments, np.flatnonzero(np.diff(part)) + 1)


def _call(segments: Integers, causal: bool) -> Call:
    row_lo, row_hi, key_lo, key_hi = segments.T
    rows, keys = row_hi - row_lo, key_hi - key_lo
    return Call(
        rows=_places(row_lo, row_hi),
        keys=_places(key_lo, key_hi),
        row_offsets=_offsets(rows),
        key_offsets=_offsets(keys),
        max_rows=int(rows.max()),
        max_keys=int(keys.max()),
        causal=causal,
    )


def _joined(lo: Integers, hi: Integers) -> bool:
    """Whether each run [lo, hi) begins where the one before it ends."""
    return bool((lo[1:] == hi[:-1]).all())


def _places(lo: Integers, hi: Integers) -> Places:
    """The members of the runs [lo, hi), one run after the other."""
    if _joined(lo, hi):
        return slice(int(lo[0]), int(hi[-1]))
    size = hi - lo
    moved: Integers = np.repeat(lo - (np.cumsum(size) - size), size)
    return moved + np.arange(len(moved))


def _offsets(size: Integers) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(size)]).astype(np.int32)


def _lagging(trapezoids: Integers, num_keys: int) -> tuple[list[Call], Integers]:
    """Calls in which the keys between trapezoids stay, hidden by a lag; and other trapezoids.

    Corrupted rows of packed documents: between the keys of their trapezoids stands the last block
    of each document. With it every segment has `lag` keys more, and keys are one slice.
    """
    trapezoids = trapezoids[np.argsort(trapezoids[:, 0], kind="stable")]
    row_lo, row_hi, key_lo, key_hi = trapezoids.T
    gap = np.append(key_lo[1:] - key_hi[:-1], 0)
    follows = np.append(row_lo[1:] >= row_hi[:-1], False) & (gap > 0)
    calls: list[Call] = []
    other = np.ones(len(trapezoids), dtype=np.bool_)
    first = 0
    while first < len(trapezoids):
        last, lag = first, int(gap[first])
        while follows[last] and gap[last] == lag and key_hi[last + 1] + lag <= num_keys:
            last += 1
        if last > first:
            run = trapezoids[first : last + 1] + np.array([0, 0, 0, lag])
            calls.append(replace(_call(run, causal=True), lag=lag))
            other[first : last + 1] = False
        first = last + 1
    return calls, trapezoids[other]
