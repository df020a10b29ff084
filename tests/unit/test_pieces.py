"""Pieces cover what rows see: every visible pair once, no hidden one, in little work."""

from itertools import pairwise

import numpy as np
import pytest
from cases import Case
from intervals import ALL_CASES, KINDS, MODES, plan_parts, random_intervals

from megatron_bp.attention.kernels.cut import cut
from megatron_bp.attention.kernels.pieces import Limits, Pieces

# Small enough that every kind of piece appears among few rows.
SMALL = Limits(
    trapezoid_rows=8,
    step_rows=16,
    rectangle_pairs=64,
    rectangle_keys=4,
    chunks=(64, 16),
    tile_rows=8,
    tile_keys=24,
    batch_pairs=500,
)


def cover(pieces: Pieces, rows: int, keys: int) -> np.ndarray:
    """How often the pieces cover each pair, by the definition of each kind."""
    times = np.zeros((rows, keys), dtype=np.int64)
    for row_lo, row_hi, key_lo, key_hi in pieces.rectangles:
        times[row_lo:row_hi, key_lo:key_hi] += 1
    for row_lo, row_hi, key_lo, key_hi in pieces.trapezoids:
        stop = key_hi - np.arange(row_hi - row_lo)[::-1, None]
        times[row_lo:row_hi, key_lo:key_hi] += np.arange(key_lo, key_hi) < stop
    for batch in pieces.tiles:
        key = np.arange(batch.keys)
        inside = (key >= batch.lo[..., None]) & (key < batch.hi[..., None])
        for row, first, there in zip(batch.row, batch.key, inside, strict=True):
            times[row : row + batch.rows, first : first + batch.keys] += there
    return times


def check(lo: np.ndarray, hi: np.ndarray, limits: Limits | None = None) -> Pieces:
    pieces = cut(lo, hi, limits)
    rows, keys = len(lo), int(hi.max())
    key = np.arange(keys)
    seen = (key >= lo[:, None]) & (key < hi[:, None])
    np.testing.assert_array_equal(cover(pieces, rows, keys), seen)
    for row_lo, row_hi, key_lo, key_hi in pieces.rectangles:
        assert row_lo < row_hi
        assert key_lo < key_hi
    for row_lo, row_hi, key_lo, key_hi in pieces.trapezoids:
        assert 0 < row_hi - row_lo <= key_hi - key_lo
    most = (limits or Limits()).batch_pairs
    for batch in pieces.tiles:
        assert batch.row.min() >= 0
        assert batch.row.max() + batch.rows <= rows
        assert batch.key.min() >= 0
        assert batch.key.max() + batch.keys <= keys
        assert batch.lo.shape == batch.hi.shape == (len(batch.row), batch.rows)
        used = (batch.row[:, None] + np.arange(batch.rows))[batch.hi > batch.lo]
        assert len(np.unique(used)) == len(used), "a row is in two tiles of a batch"
        assert batch.full == bool((batch.hi - batch.lo == batch.keys).all())
        assert len(batch.row) == 1 or len(batch.row) * batch.rows * batch.keys <= most
    return pieces


def padded(pieces: Pieces) -> int:
    """Pairs that tiles compute, hidden ones included."""
    return sum(len(batch.row) * batch.rows * batch.keys for batch in pieces.tiles)


@pytest.mark.parametrize("limits", [None, SMALL], ids=["usual", "small"])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_cover_random_intervals(kind: str, limits: Limits | None) -> None:
    for seed in range(20):
        check(*random_intervals(kind, seed), limits)


@pytest.mark.parametrize("limits", [None, SMALL], ids=["usual", "small"])
@pytest.mark.parametrize("case", ALL_CASES.values(), ids=ALL_CASES.keys())
def test_pieces_cover_plans_in_every_mode(case: Case, limits: Limits | None) -> None:
    for degrees in MODES:
        for lo, hi in plan_parts(case, degrees, copies=3 if degrees == (2, 2) else 1):
            check(lo, hi, limits)


def test_nothing_is_cut_into_nothing() -> None:
    nobody = np.zeros(0, dtype=np.int32)
    pieces = cut(nobody, nobody)
    assert (pieces.rectangles, pieces.trapezoids, pieces.tiles) == ((), (), ())


def test_the_standard_layout_is_two_trapezoids_and_a_band_of_tiles() -> None:
    length, block = 1024, 32
    start = np.arange(length) // block * block
    lo = np.zeros(2 * length - block, dtype=np.int32)
    hi = np.concatenate([start + block, start[block:]]).astype(np.int32)
    pieces = check(lo, hi)
    assert pieces.rectangles == ()
    assert pieces.trapezoids == (
        (0, length, 0, length),
        (length, 2 * length - block, 0, length - block),
    )
    (band,) = pieces.tiles
    assert (band.rows, band.keys) == (block, block - 1)
    assert padded(pieces) <= 2 * length * block


def test_own_blocks_are_full_tiles() -> None:
    start = np.arange(2048) // 32 * 32
    (batch,) = check(start, start + 32).tiles
    assert batch.full
    assert (len(batch.row), batch.rows, batch.keys) == (64, 32, 32)


def test_large_blocks_are_rectangles_alone() -> None:
    start = np.arange(2048) // 256 * 256
    pieces = check(np.zeros_like(start), start + 256)
    assert (len(pieces.rectangles), pieces.trapezoids, pieces.tiles) == (8, (), ())


@pytest.mark.parametrize(("block", "window", "most"), [(32, 1024, 0.2), (32, 256, 0.6)])
def test_windows_waste_little(block: int, window: int, most: float) -> None:
    row = np.arange(2048)
    hi = row // block * block + block
    lo = np.maximum(0, row - (window - 1))
    pieces = check(lo, hi)
    assert padded(pieces) < most * (hi - lo).sum()


def test_packed_documents_waste_little() -> None:
    lengths = np.random.default_rng(0).integers(200, 1500, 8)
    edges = np.append(0, np.cumsum(lengths))
    row = np.arange(edges[-1])
    first = np.repeat(edges[:-1], lengths)
    start = first + (row - first) // 32 * 32
    hi = np.minimum(start + 32, np.repeat(edges[1:], lengths))
    pieces = check(first, hi)
    assert len(pieces.trapezoids) == len(lengths)
    assert padded(pieces) < 0.1 * (hi - first).sum()
    assert all(a.row_hi <= b.row_lo for a, b in pairwise(pieces.trapezoids))
