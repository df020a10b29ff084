"""What a kernel is: attention of some rows over one contiguous run of keys.

Every kernel offers `forward` and `backward` with these shapes. The part's result is (out, lse); its
backward is given the *final* out and lse of all parts and returns this part's exact share.
"""

# Shapes: H key heads, G query heads a key head, n rows, K keys, D head dimension.

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SMALL_TILE = 64


class RowTile(NamedTuple):
    """Rows [row_lo, row_hi) and the keys they see.

    None of them sees a key outside [key_lo, key_hi); all see every key in [full_lo, full_hi).
    """

    row_lo: int
    row_hi: int
    key_lo: int
    key_hi: int
    full_lo: int
    full_hi: int


@dataclass(frozen=True, eq=False)
class Intervals:
    """Row i sees keys [lo_i, hi_i), none empty; with a tile map made on the host.

    Attributes:
        lo, hi: int32[n] on the device of the keys.
        tiles: the rows cut into tiles.
    """

    lo: Tensor
    hi: Tensor
    tiles: tuple[RowTile, ...]


def row_tiles(lo: NDArray[np.int32], hi: NDArray[np.int32], tile_rows: int) -> tuple[RowTile, ...]:
    """The tile map of rows whose intervals are [lo, hi), of at most `tile_rows` rows a tile.

    Rows that see little (a block's own rows) get small tiles, which waste less on what they hide.
    """
    tile_rows = min(tile_rows, max(SMALL_TILE, 4 * int(np.median(hi - lo))))
    tiles = []
    for first in range(0, len(lo), tile_rows):
        last = min(first + tile_rows, len(lo))
        low, high = lo[first:last], hi[first:last]
        tiles.append(
            RowTile(
                row_lo=first,
                row_hi=last,
                key_lo=int(low.min()),
                key_hi=int(high.max()),
                full_lo=int(low.max()),
                full_hi=int(high.min()),
            )
        )
    return tuple(tiles)


class Kernel(Protocol):
    """One implementation of attention over a part."""

    TILE_ROWS: int

    def forward(
        self, q_HGnD: Tensor, k_HKD: Tensor, v_HKD: Tensor, spec: Intervals, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(out [H, G, n, D], lse [H, G, n]), in the accumulation dtype."""
        ...

    def backward(
        self,
        dout_HGnD: Tensor,
        q_HGnD: Tensor,
        k_HKD: Tensor,
        v_HKD: Tensor,
        out_HGnD: Tensor,
        lse_HGn: Tensor,
        spec: Intervals,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq [H, G, n, D], dk [H, K, D], dv [H, K, D]), in the accumulation dtype."""
        ...
