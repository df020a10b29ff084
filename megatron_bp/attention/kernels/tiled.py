"""Pure-PyTorch tiled attention with an online softmax: any intervals, any device, any float dtype.

The reference path, and the one that trains on CPUs. It never builds rows x keys; it skips tiles
that nobody sees and masks only tiles that some rows see in part. Online softmax: Milakov and
Gimelshein, arXiv 1805.02867; tiling and backward: FlashAttention, arXiv 2205.14135.
"""

# Shapes: H key heads, G query heads a key head, n rows (t in a tile), K keys (c in a tile),
# D head dimension.

from itertools import pairwise

import torch
from torch import Tensor

from megatron_bp.attention.kernels.contract import Intervals, RowTile

TILE_ROWS = 256
TILE_KEYS = 1024


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; everything else accumulates in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(
    q_HGnD: Tensor, k_HKD: Tensor, v_HKD: Tensor, spec: Intervals, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [H, G, n, D], lse [H, G, n]) in the accumulation dtype; see contract.Kernel."""
    dtype = accumulation_dtype(q_HGnD.dtype)
    H, G, n, D = q_HGnD.shape
    out_HGnD = q_HGnD.new_empty((H, G, n, D), dtype=dtype)
    lse_HGn = q_HGnD.new_empty((H, G, n), dtype=dtype)
    k_HKD, v_HKD = k_HKD.to(dtype), v_HKD.to(dtype)
    for tile in spec.tiles:
        rows = slice(tile.row_lo, tile.row_hi)
        q_HxD = q_HGnD[:, :, rows].to(dtype).reshape(H, -1, D) * scale
        top_Hx = q_HxD.new_full(q_HxD.shape[:2], -torch.inf)
        total_Hx = torch.zeros_like(top_Hx)
        sum_HxD = torch.zeros_like(q_HxD)
        for first, last in _key_tiles(tile):
            score_Hxc = q_HxD @ k_HKD[:, first:last].mT
            _hide(score_Hxc, G, tile, spec, first, last)
            new_Hx = torch.maximum(top_Hx, score_Hxc.amax(-1))
            safe_Hx = new_Hx.masked_fill(new_Hx == -torch.inf, 0.0)
            p_Hxc = score_Hxc.sub_(safe_Hx[..., None]).exp_()
            keep_Hx = torch.exp(top_Hx - safe_Hx)
            total_Hx = total_Hx * keep_Hx + p_Hxc.sum(-1)
            sum_HxD = sum_HxD.mul_(keep_Hx[..., None]).baddbmm_(p_Hxc, v_HKD[:, first:last])
            top_Hx = new_Hx
        out_HGnD[:, :, rows] = (sum_HxD / total_Hx[..., None]).view(H, G, -1, D)
        lse_HGn[:, :, rows] = (top_Hx + total_Hx.log()).view(H, G, -1)
    return out_HGnD, lse_HGn


def backward(
    dout_HGnD: Tensor,
    q_HGnD: Tensor,
    k_HKD: Tensor,
    v_HKD: Tensor,
    out_HGnD: Tensor,
    lse_HGn: Tensor,
    spec: Intervals,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this part, given the final out and lse; see contract.Kernel."""
    dtype = accumulation_dtype(q_HGnD.dtype)
    H, G, _, D = q_HGnD.shape
    dq_HGnD = torch.zeros_like(q_HGnD, dtype=dtype)
    dk_HKD = torch.zeros_like(k_HKD, dtype=dtype)
    dv_HKD = torch.zeros_like(v_HKD, dtype=dtype)
    k_HKD, v_HKD = k_HKD.to(dtype), v_HKD.to(dtype)
    for tile in spec.tiles:
        rows = slice(tile.row_lo, tile.row_hi)
        q_HxD = q_HGnD[:, :, rows].to(dtype).reshape(H, -1, D) * scale
        dout_HxD = dout_HGnD[:, :, rows].to(dtype).reshape(H, -1, D)
        delta_Hx1 = (dout_HxD * out_HGnD[:, :, rows].to(dtype).reshape(H, -1, D)).sum(-1, True)
        lse_Hx1 = lse_HGn[:, :, rows].reshape(H, -1, 1)
        dq_HxD = torch.zeros_like(q_HxD)
        for first, last in _key_tiles(tile):
            score_Hxc = q_HxD @ k_HKD[:, first:last].mT
            _hide(score_Hxc, G, tile, spec, first, last)
            p_Hxc = score_Hxc.sub_(lse_Hx1).exp_()
            dv_HKD[:, first:last].baddbmm_(p_Hxc.mT, dout_HxD)
            ds_Hxc = (dout_HxD @ v_HKD[:, first:last].mT).sub_(delta_Hx1).mul_(p_Hxc)
            dk_HKD[:, first:last].baddbmm_(ds_Hxc.mT, q_HxD)
            dq_HxD.baddbmm_(ds_Hxc, k_HKD[:, first:last])
        dq_HGnD[:, :, rows] = dq_HxD.mul_(scale).view(H, G, -1, D)
    return dq_HGnD, dk_HKD, dv_HKD


def _key_tiles(tile: RowTile) -> list[tuple[int, int]]:
    """[first, last) of each tile of keys that some row of the tile sees.

    Cut where the keys that all rows see begin and end, so that masks are as small as they can be.
    """
    cuts = [tile.key_lo, tile.full_lo, tile.full_hi, tile.key_hi]
    if tile.full_lo >= tile.full_hi:
        cuts = [tile.key_lo, tile.key_hi]
    return [
        (first, min(first + TILE_KEYS, stop))
        for start, stop in pairwise(cuts)
        for first in range(start, stop, TILE_KEYS)
    ]


def _hide(
    score_Hxc: Tensor, groups: int, tile: RowTile, spec: Intervals, first: int, last: int
) -> None:
    """Set to -inf the scores of keys outside each row's interval, where the tile has any."""
    if tile.full_lo <= first and last <= tile.full_hi:
        return
    keys_c = torch.arange(first, last, device=score_Hxc.device, dtype=spec.lo.dtype)
    lo_t1 = spec.lo[tile.row_lo : tile.row_hi, None]
    hi_t1 = spec.hi[tile.row_lo : tile.row_hi, None]
    hidden_tc = (keys_c < lo_t1) | (keys_c >= hi_t1)
    heads = score_Hxc.shape[0]
    score_Hxc.view(heads, groups, *hidden_tc.shape).masked_fill_(hidden_tc, -torch.inf)
