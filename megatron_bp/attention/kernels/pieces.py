"""Rows' key intervals cut into few pieces that fast kernels compute: an exact, disjoint cover.

Row i sees the keys [lo_i, hi_i). Three kinds of pieces cover every such pair once and nothing else:

    rectangle   consecutive rows that all see the same keys
    trapezoid   consecutive rows of which each sees one key more than the one before it: the causal
                mask of FlashAttention, aligned at the last row and key
    tiles       what is left, in batches of small masked rectangles of equal shape

A staircase of blocks has slope one, so it is a trapezoid and a triangle of tiles a block. Example,
block size 3, rows that see the blocks before their own and it (t trapezoid, b tiles):

    t b b . . .
    t t b . . .
    t t t . . .
    t t t t b b
    t t t t t b
    t t t t t t

Windows, several copies of a block and blocks after gaps are rectangles with tiles at their edges.
The cover is made by `cut.cut`. Host only: numpy, no torch.
"""

# Shapes: n rows, T tiles of a batch, t rows of a tile.

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rectangle(NamedTuple):
    """Rows [row_lo, row_hi) that all see the keys [key_lo, key_hi)."""

    row_lo: int
    row_hi: int
    key_lo: int
    key_hi: int


class Trapezoid(NamedTuple):
    """Of the n rows [row_lo, row_hi), row row_lo + i sees [key_lo, key_hi - (n - 1) + i).

    The last row sees all keys [key_lo, key_hi), and the first at least one.
    """

    row_lo: int
    row_hi: int
    key_lo: int
    key_hi: int


@dataclass(frozen=True, eq=False)
class Tiles:
    """A batch of T masked rectangles of `rows` x `keys`, all inside of the rows and keys.

    Row row[i] + j sees, of the keys from key[i] on, those in [lo[i, j], hi[i, j]); it is none of
    the tile's where lo = hi. A row is in at most one tile of a batch; keys may be in several.

    Attributes:
        row, key: int32[T], first row and first key of each tile.
        rows, keys: the size of all of them.
        lo, hi: int32[T, rows], relative to `key`.
        full: every row sees all keys.
    """

    row: NDArray[np.int32]
    key: NDArray[np.int32]
    rows: int
    keys: int
    lo: NDArray[np.int32]
    hi: NDArray[np.int32]
    full: bool


@dataclass(frozen=True, eq=False)
class Pieces:
    """The cover. Pieces of any kind may share rows with others, and keys, but no pair."""

    rectangles: tuple[Rectangle, ...]
    trapezoids: tuple[Trapezoid, ...]
    tiles: tuple[Tiles, ...]


@dataclass(frozen=True)
class Limits:
    """What is worth which piece.

    Attributes:
        trapezoid_rows: the fewest rows of a trapezoid.
        step_rows: rows that see the same keys are a rectangle from this many on, and no step of a
            staircase: what a trapezoid leaves of a step grows with its square.
        rectangle_pairs: the fewest pairs of a rectangle, as one call costs as much as some.
        rectangle_keys: the fewest keys of a rectangle.
        chunks: rows that share a rectangle, tried in this order.
        tile_rows: rows of a tile, rounded to whole steps.
        tile_keys: the most keys of a tile.
        batch_pairs: the most pairs of a batch, hidden ones included; bounds its memory.
    """

    trapezoid_rows: int = 128
    step_rows: int = 128
    rectangle_pairs: int = 8192
    rectangle_keys: int = 64
    chunks: tuple[int, ...] = (512, 256, 128, 64)
    tile_rows: int = 32
    tile_keys: int = 512
    batch_pairs: int = 1 << 18
