"""FlashAttention for rectangles and trapezoids, batched matrix products for the rest.

Strict prefixes of blocks become plain causal calls by the shift of `pieces`; no call visits a tile
that nobody sees. FlashAttention's backward takes the final output and log-sum-exp, and returns the
part's exact share (arXiv 2205.14135, section 3.1). Whose FlashAttention it is, the two operations
say that a `Flash` is made with: torch's (aten), or FlashAttention-4's own.
"""

# Shapes: n rows and K keys of a part, m rows and c keys of a call, Q query heads, H key heads, D
# head dimension.

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.attention.kernels.cut import cut
from megatron_bp.attention.kernels.flash_ops import ATEN, FOUR, Operations, Segments, aten
from megatron_bp.attention.kernels.pieces import Limits
from megatron_bp.attention.kernels.products import Products
from megatron_bp.attention.kernels.tiles import TileBatch, to_device
from megatron_bp.attention.kernels.varlen import Places, make_calls
from megatron_bp.attention.merge import merge_into

# A GPU has room for larger batches than a CPU's caches, and pays more for each call: staircases are
# trapezoids up to large blocks, and batches of tiles are few.
LIMITS = Limits(step_rows=1024, batch_pairs=1 << 20)


class DeviceCall(NamedTuple):
    """A call with its places and offsets on the device."""

    rows: slice | Tensor
    keys: slice | Tensor
    segments: Segments


class Spec(NamedTuple):
    """The calls, and the tiles left over."""

    calls: tuple[DeviceCall, ...]
    tiles: tuple[TileBatch, ...]


@dataclass(frozen=True)
class Flash:
    """The kernel, over some FlashAttention."""

    name: str = "flash"
    operations: Operations = ATEN

    def prepare(self, lo: NDArray[np.int32], hi: NDArray[np.int32], device: torch.device) -> Spec:
        """See contract.Kernel, as for the other two."""

        def put(places: Places) -> slice | Tensor:
            return places if isinstance(places, slice) else torch.from_numpy(places).to(device)

        calls, tiles = make_calls(cut(lo, hi, LIMITS), int(hi.max()), self.operations.windows)
        return Spec(
            tuple(
                DeviceCall(
                    put(call.rows),
                    put(call.keys),
                    Segments(
                        torch.from_numpy(call.row_offsets).to(device),
                        torch.from_numpy(call.key_offsets).to(device),
                        call.max_rows,
                        call.max_keys,
                        call.causal,
                        call.lag,
                    ),
                )
                for call in calls
            ),
            tuple(batch for each in tiles for batch in to_device(each, device)),
        )

    def forward(
        self,
        q_nQD: Tensor,
        k_KHD: Tensor,
        v_KHD: Tensor,
        spec: Spec,
        scale: float,
        out_nQD: Tensor,
        lse_nQ: Tensor,
    ) -> None:
        """Merge this part into out_nQD and lse_nQ."""
        q_nQD, k_KHD, v_KHD = (x.detach() for x in (q_nQD, k_KHD, v_KHD))
        for rows, keys, segments in spec.calls:
            part_mQD, lse_Qm = self.operations.forward(
                q_nQD[rows], k_KHD[keys], v_KHD[keys], segments, scale
            )
            out_mQD, lse_mQ = out_nQD[rows], lse_nQ[rows]  # copies, unless rows is a slice
            merge_into(out_mQD, lse_mQ, part_mQD, lse_Qm.mT)
            if not isinstance(rows, slice):
                out_nQD[rows], lse_nQ[rows] = out_mQD, lse_mQ
        for tiles in spec.tiles:
            tiles.forward(Products(), q_nQD, k_KHD, v_KHD, scale, out_nQD, lse_nQ)

    def backward(
        self,
        dout_nQD: Tensor,
        q_nQD: Tensor,
        k_KHD: Tensor,
        v_KHD: Tensor,
        out_nQD: Tensor,
        lse_nQ: Tensor,
        spec: Spec,
        scale: float,
        dq_nQD: Tensor,
        dk_KHD: Tensor,
        dv_KHD: Tensor,
    ) -> None:
        """Add this part's share to dq_nQD, dk_KHD and dv_KHD."""
        for rows, keys, segments in spec.calls:
            dq, dk, dv = self.operations.backward(
                dout_nQD[rows],
                q_nQD[rows],
                k_KHD[keys],
                v_KHD[keys],
                out_nQD[rows],
                lse_nQ[rows].mT.contiguous(),
                segments,
                scale,
            )
            for total, places, share in (
                (dq_nQD, rows, dq),
                (dk_KHD, keys, dk),
                (dv_KHD, keys, dv),
            ):
                _add(total, places, share)
        finals = (dout_nQD, q_nQD, k_KHD, v_KHD, out_nQD, lse_nQ)
        for tiles in spec.tiles:
            tiles.backward(Products(), *finals, scale, dq_nQD, dk_KHD, dv_KHD)


def _add(total: Tensor, places: slice | Tensor, share: Tensor) -> None:
    """total[places] += share, also where a place is there twice."""
    if isinstance(places, slice):
        total[places] += share
    else:
        total.index_add_(0, places, share.to(total.dtype))


def make_flash(name: str) -> Flash:
    """The Flash of this name, see choose.NAMES."""
    if name == "flash4":
        return Flash(name, FOUR)
    if name == "flash":
        return Flash()
    return Flash(name, aten(name.removeprefix("flash_").upper()))
