"""Pure-PyTorch tiled attention with an online softmax: any intervals, any device, any float dtype.

The reference of the other kernels. It never builds rows x keys; it skips tiles that nobody sees and
masks only tiles that some rows see in part. Online softmax: Milakov and Gimelshein, arXiv
1805.02867; tiling and backward: FlashAttention, arXiv 2205.14135.
"""

# Shapes: n rows (t in a tile), K keys (c in a tile), Q query heads, H key heads, G = Q / H, D head
# dimension, x = G * t.

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.attention.kernels.contract import accumulation_dtype
from megatron_bp.attention.merge import merge_into

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


@dataclass(frozen=True)
class Tiled:
    """The kernel, with tiles of at most `rows` x `keys`."""

    rows: int = 256
    keys: int = 1024
    name: str = "tiled"

    def prepare(
        self, lo: NDArray[np.int32], hi: NDArray[np.int32], device: torch.device
    ) -> Intervals:
        """See contract.Kernel, as for the other two."""
        return Intervals(
            lo=torch.from_numpy(lo).to(device),
            hi=torch.from_numpy(hi).to(device),
            tiles=row_tiles(lo, hi, self.rows),
        )

    def forward(
        self,
        q_nQD: Tensor,
        k_KHD: Tensor,
        v_KHD: Tensor,
        spec: Intervals,
        scale: float,
        out_nQD: Tensor,
        lse_nQ: Tensor,
    ) -> None:
        """Merge this part into out_nQD and lse_nQ."""
        dtype, heads = accumulation_dtype(q_nQD.dtype), k_KHD.shape[1]
        k_HKD, v_HKD = (x.transpose(0, 1).to(dtype).contiguous() for x in (k_KHD, v_KHD))
        for tile in spec.tiles:
            rows = slice(tile.row_lo, tile.row_hi)
            q_HxD = _heads_first(q_nQD[rows], heads).to(dtype) * scale
            top_Hx = q_HxD.new_full(q_HxD.shape[:2], -torch.inf)
            total_Hx = torch.zeros_like(top_Hx)
            sum_HxD = torch.zeros_like(q_HxD)
            for first, last in self._key_tiles(tile):
                score_Hxc = q_HxD @ k_HKD[:, first:last].mT
                _hide(score_Hxc, tile, spec, first, last)
                new_Hx = torch.maximum(top_Hx, score_Hxc.amax(-1))
                safe_Hx = new_Hx.masked_fill(new_Hx == -torch.inf, 0.0)
                p_Hxc = score_Hxc.sub_(safe_Hx[..., None]).exp_()
                keep_Hx = torch.exp(top_Hx - safe_Hx)
                total_Hx = total_Hx * keep_Hx + p_Hxc.sum(-1)
                sum_HxD = sum_HxD.mul_(keep_Hx[..., None]).baddbmm_(p_Hxc, v_HKD[:, first:last])
                top_Hx = new_Hx
            merge_into(
                out_nQD[rows],
                lse_nQ[rows],
                _rows_first(sum_HxD / total_Hx[..., None], q_nQD.shape[1]),
                _rows_first((top_Hx + total_Hx.log())[..., None], q_nQD.shape[1])[..., 0],
            )

    def backward(
        self,
        dout_nQD: Tensor,
        q_nQD: Tensor,
        k_KHD: Tensor,
        v_KHD: Tensor,
        out_nQD: Tensor,
        lse_nQ: Tensor,
        spec: Intervals,
        scale: float,
        dq_nQD: Tensor,
        dk_KHD: Tensor,
        dv_KHD: Tensor,
    ) -> None:
        """Add this part's share to dq_nQD, dk_KHD and dv_KHD."""
        dtype, heads = accumulation_dtype(q_nQD.dtype), k_KHD.shape[1]
        k_HKD, v_HKD = (x.transpose(0, 1).to(dtype).contiguous() for x in (k_KHD, v_KHD))
        dk_HKD, dv_HKD = torch.zeros_like(k_HKD), torch.zeros_like(v_HKD)
        for tile in spec.tiles:
            rows = slice(tile.row_lo, tile.row_hi)
            q_HxD = _heads_first(q_nQD[rows], heads).to(dtype) * scale
            dout_HxD = _heads_first(dout_nQD[rows], heads).to(dtype)
            out_HxD = _heads_first(out_nQD[rows], heads).to(dtype)
            delta_Hx1 = (dout_HxD * out_HxD).sum(-1, True)
            lse_Hx1 = _heads_first(lse_nQ[rows][..., None], heads)
            dq_HxD = torch.zeros_like(q_HxD)
            for first, last in self._key_tiles(tile):
                score_Hxc = q_HxD @ k_HKD[:, first:last].mT
                _hide(score_Hxc, tile, spec, first, last)
                p_Hxc = score_Hxc.sub_(lse_Hx1).exp_()
                dv_HKD[:, first:last].baddbmm_(p_Hxc.mT, dout_HxD)
                ds_Hxc = (dout_HxD @ v_HKD[:, first:last].mT).sub_(delta_Hx1).mul_(p_Hxc)
                dk_HKD[:, first:last].baddbmm_(ds_Hxc.mT, q_HxD)
                dq_HxD.baddbmm_(ds_Hxc, k_HKD[:, first:last])
            dq_nQD[rows] += _rows_first(dq_HxD.mul_(scale), q_nQD.shape[1])
        dk_KHD += dk_HKD.transpose(0, 1)
        dv_KHD += dv_HKD.transpose(0, 1)

    def _key_tiles(self, tile: RowTile) -> list[tuple[int, int]]:
        """[first, last) of each tile of keys that some row of the tile sees.

        Cut where the keys that all rows see begin and end, so that masks are as small as can be.
        """
        cuts = [tile.key_lo, tile.full_lo, tile.full_hi, tile.key_hi]
        if tile.full_lo >= tile.full_hi:
            cuts = [tile.key_lo, tile.key_hi]
        return [
            (first, min(first + self.keys, stop))
            for start, stop in pairwise(cuts)
            for first in range(start, stop, self.keys)
        ]


def _heads_first(x_tQD: Tensor, key_heads: int) -> Tensor:
    """[t, Q, D] as [H, G * t, D]: what one key head serves stands together."""
    rows, dim = len(x_tQD), x_tQD.shape[-1]
    return x_tQD.reshape(rows, key_heads, -1, dim).permute(1, 2, 0, 3).reshape(key_heads, -1, dim)


def _rows_first(x_HxD: Tensor, heads: int) -> Tensor:
    """[H, G * t, D] as [t, Q, D]."""
    return x_HxD.reshape(heads, -1, x_HxD.shape[-1]).transpose(0, 1)


def _hide(score_Hxc: Tensor, tile: RowTile, spec: Intervals, first: int, last: int) -> None:
    """Set to -inf the scores of keys outside each row's interval, where the tile has any."""
    if tile.full_lo <= first and last <= tile.full_hi:
        return
    keys_c = torch.arange(first, last, device=score_Hxc.device, dtype=spec.lo.dtype)
    lo_t1 = spec.lo[tile.row_lo : tile.row_hi, None]
    hi_t1 = spec.hi[tile.row_lo : tile.row_hi, None]
    hidden_tc = (keys_c < lo_t1) | (keys_c >= hi_t1)
    score_Hxc.view(-1, *hidden_tc.shape).masked_fill_(hidden_tc, -torch.inf)
