"""PyTorch's FlashAttention for CPUs, on pieces: the kernel for runs without a GPU.

PyTorch aligns the causal mask at the *first* row and key on CPUs, so a trapezoid is a rectangle and
a square triangle. Calls without rows or keys would end the process; pieces have both.

In bfloat16 and float16 its backward adds up dK and dV in that dtype, block of rows after block of
rows (32, 64 or 256) and query head after query head: at 8 query heads a key head their error was
3 times that of plain matrix products, and it grows with the rows. So there a call has one query
head for each key head and not too many rows, and what calls give is added up in float32.
"""

# Shapes: n rows, K keys, Q query heads, H key heads, D head dimension, T tiles of t rows x W keys.

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.attention.kernels.contract import accumulation_dtype
from megatron_bp.attention.kernels.cut import cut
from megatron_bp.attention.kernels.pieces import Limits, Pieces
from megatron_bp.attention.kernels.tiles import TileBatch, to_device
from megatron_bp.attention.merge import merge_into

HALF = (torch.float16, torch.bfloat16)
HALF_ROWS = 2048  # of a call of the backward in one of these; see above


class Call(NamedTuple):
    """Rows that all see these keys, or, `causal`, the i-th row the first i + 1 of as many keys."""

    rows: slice
    keys: slice
    causal: bool


@dataclass(frozen=True, eq=False)
class Calls:
    """A part's calls of PyTorch's kernel."""

    large: tuple[Call, ...]
    tiles: tuple[TileBatch, ...]


def calls_of(pieces: Pieces, device: torch.device) -> Calls:
    """The calls that compute the pieces."""
    large = []
    for piece in pieces.rectangles:
        keys = slice(piece.key_lo, piece.key_hi)
        large.append(Call(slice(piece.row_lo, piece.row_hi), keys, causal=False))
    for stair in pieces.trapezoids:
        rows = slice(stair.row_lo, stair.row_hi)
        corner = stair.key_hi - (stair.row_hi - stair.row_lo)
        if corner > stair.key_lo:
            large.append(Call(rows, slice(stair.key_lo, corner), causal=False))
        large.append(Call(rows, slice(corner, stair.key_hi), causal=True))
    tiles = [batch for some in pieces.tiles for batch in to_device(some, device)]
    return Calls(tuple(large), tuple(tiles))


def divided(calls: tuple[Call, ...], most: int) -> Iterator[Call]:
    """The same pairs in calls of at most so many rows."""
    for rows, keys, causal in calls:
        for start in range(rows.start, rows.stop, most):
            some = slice(start, min(start + most, rows.stop))
            if not causal:
                yield Call(some, keys, causal=False)
                continue
            first, stop = (keys.start + at - rows.start for at in (some.start, some.stop))
            if first > keys.start:
                yield Call(some, slice(keys.start, first), causal=False)
            yield Call(some, slice(first, stop), causal=True)


class FlashOnCpu:
    """PyTorch's kernel as it is; heads before rows, as it wants them. See tiles.Batched."""

    def forward(
        self,
        q_TQtD: Tensor,
        k_THWD: Tensor,
        v_THWD: Tensor,
        bias: Tensor | None,
        scale: float,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(out [T, Q, t, D], lse [T, Q, t])."""
        out: tuple[Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
                q_TQtD, k_THWD, v_THWD, 0.0, causal, attn_mask=bias, scale=scale
            )
        )
        return out

    def backward(
        self,
        dout_TQtD: Tensor,
        q_TQtD: Tensor,
        k_THWD: Tensor,
        v_THWD: Tensor,
        out_TQtD: Tensor,
        lse_TQt: Tensor,
        bias: Tensor | None,
        scale: float,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv); dk and dv may be of a wider dtype."""
        group = q_TQtD.shape[1] // k_THWD.shape[1]
        if group > 1 and q_TQtD.dtype in HALF:
            dq_TQtD = torch.empty_like(q_TQtD)
            dtype = accumulation_dtype(q_TQtD.dtype)
            dk_THWD, dv_THWD = (torch.zeros_like(x, dtype=dtype) for x in (k_THWD, v_THWD))
            for member in range(group):
                heads = slice(member, None, group)  # the member's of each key head
                dout, q, out, lse = (x[:, heads] for x in (dout_TQtD, q_TQtD, out_TQtD, lse_TQt))
                dq_TQtD[:, heads], dk, dv = self.backward(
                    dout, q, k_THWD, v_THWD, out, lse, bias, scale, causal
                )
                dk_THWD += dk
                dv_THWD += dv
            return dq_TQtD, dk_THWD, dv_THWD
        grads: tuple[Tensor, Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
                dout_TQtD,
                q_TQtD,
                k_THWD,
                v_THWD,
                out_TQtD,
                lse_TQt,
                0.0,
                causal,
                attn_mask=bias,
                scale=scale,
            )
        )
        return grads


@dataclass(frozen=True)
class Sdpa:
    """The kernel; see contract.Kernel."""

    limits: Limits = field(default_factory=Limits)
    name: str = "sdpa"

    def prepare(self, lo: NDArray[np.int32], hi: NDArray[np.int32], device: torch.device) -> Calls:
        """See contract.Kernel, as for the other two.

        Raises:
            ValueError: the device is no CPU.
        """
        if device.type != "cpu":
            raise ValueError(
                f"--attention-kernel sdpa on device {device}: it is PyTorch's kernel for CPUs "
                f"alone; use auto, flash, flex or tiled"
            )
        return calls_of(cut(lo, hi, self.limits), device)

    def forward(
        self,
        q_nQD: Tensor,
        k_KHD: Tensor,
        v_KHD: Tensor,
        spec: Calls,
        scale: float,
        out_nQD: Tensor,
        lse_nQ: Tensor,
    ) -> None:
        """Merge this part into out_nQD and lse_nQ."""
        flash = FlashOnCpu()
        for rows, keys, causal in spec.large:
            q, k, v = (_heads_first(x) for x in (q_nQD[rows], k_KHD[keys], v_KHD[keys]))
            out, lse = flash.forward(q, k, v, None, scale, causal)
            merge_into(out_nQD[rows], lse_nQ[rows], out[0].transpose(0, 1), lse[0].T)
        for batch in spec.tiles:
            batch.forward(flash, q_nQD, k_KHD, v_KHD, scale, out_nQD, lse_nQ)

    def backward(
        self,
        dout_nQD: Tensor,
        q_nQD: Tensor,
        k_KHD: Tensor,
        v_KHD: Tensor,
        out_nQD: Tensor,
        lse_nQ: Tensor,
        spec: Calls,
        scale: float,
        dq_nQD: Tensor,
        dk_KHD: Tensor,
        dv_KHD: Tensor,
    ) -> None:
        """Add this part's share to dq_nQD, dk_KHD and dv_KHD."""
        flash = FlashOnCpu()
        of_rows: Any = (dout_nQD, q_nQD, out_nQD)
        most = HALF_ROWS if q_nQD.dtype in HALF else len(q_nQD)
        for rows, keys, causal in divided(spec.large, most):
            dout, q, out = (_heads_first(x[rows]) for x in of_rows)
            k, v = _heads_first(k_KHD[keys]), _heads_first(v_KHD[keys])
            lse = lse_nQ[rows].T[None]
            dq, dk, dv = flash.backward(dout, q, k, v, out, lse, None, scale, causal)
            dq_nQD[rows] += dq[0].transpose(0, 1)
            dk_KHD[keys] += dk[0].transpose(0, 1)
            dv_KHD[keys] += dv[0].transpose(0, 1)
        for batch in spec.tiles:
            batch.backward(
                flash,
                dout_nQD,
                q_nQD,
                k_KHD,
                v_KHD,
                out_nQD,
                lse_nQ,
                scale,
                dq_nQD,
                dk_KHD,
                dv_KHD,
            )


def _heads_first(x_nQD: Tensor) -> Tensor:
    """[n, Q, D] as a view [1, Q, n, D]."""
    return x_nQD.transpose(0, 1)[None]
