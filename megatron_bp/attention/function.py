"""Attention of this rank's rows over all they see, as one autograd function.

It owns the parts, their merge and the exchange of K/V, so that communication overlaps with
the parts that need no remote keys. It sees no model, no block and no document.
"""

# Shapes: S rows, Q query heads, H key heads, G = Q / H, D head dimension, R ranks, C rows that the
# rank that sends most sends.

from typing import Any

import torch
from torch import Tensor

from megatron_bp.attention.exchange import CleanExchange
from megatron_bp.attention.kernels.contract import Kernel
from megatron_bp.attention.kernels.tiled import accumulation_dtype
from megatron_bp.attention.merge import merge_into
from megatron_bp.attention.parts import Part, View


def attend(
    q_SQD: Tensor,
    k_SHD: Tensor,
    v_SHD: Tensor,
    view: View,
    exchange: CleanExchange,
    kernel: Kernel,
    scale: float,
) -> Tensor:
    """Softmax attention [S, Q, D] of each row over the keys that its visibility names.

    A row that sees nothing gives 0. Differentiable in q, k and v, including the share that rows on
    other ranks get of the gradient.
    """
    out: Tensor = _Attend.apply(q_SQD, k_SHD, v_SHD, view, exchange, kernel, scale)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SQD: Tensor,
        k_SHD: Tensor,
        v_SHD: Tensor,
        view: View,
        exchange: CleanExchange,
        kernel: Kernel,
        scale: float,
    ) -> Tensor:
        pending = None
        if exchange.active:
            pending = exchange.gather(k_SHD[: view.num_sent], v_SHD[: view.num_sent])
        q_HGSD = _heads_first(q_SQD, k_SHD.shape[1])
        dtype = accumulation_dtype(q_SQD.dtype)
        out_HGSD = torch.zeros_like(q_HGSD, dtype=dtype)
        lse_HGS = q_HGSD.new_full(q_HGSD.shape[:-1], -torch.inf, dtype=dtype)
        for part in (*view.corrupted, *view.clean):
            k, v = _keys(k_SHD, v_SHD, part)
            out, lse = kernel.forward(q_HGSD[:, :, part.rows], k, v, part.spec, scale)
            merge_into(out_HGSD, lse_HGS, part.rows, out, lse)
        gathered = pending.wait() if pending is not None else None
        for part in view.remote:
            assert gathered is not None
            k, v = _keys(gathered[part.run.rank, :, 0], gathered[part.run.rank, :, 1], part)
            out, lse = kernel.forward(q_HGSD[:, :, part.rows], k, v, part.spec, scale)
            merge_into(out_HGSD, lse_HGS, part.rows, out, lse)
        out_SQD = _rows_first(out_HGSD).to(q_SQD.dtype)
        ctx.view, ctx.exchange, ctx.kernel, ctx.scale = view, exchange, kernel, scale
        # A forward inside a backward is a recomputation: its backward follows at once, so what was
        # gathered is kept for it and not gathered a third time.
        keep = gathered if torch._C._current_graph_task_id() != -1 else None
        ctx.save_for_backward(q_SQD, k_SHD, v_SHD, out_SQD, lse_HGS, keep)
        return out_SQD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_SQD, k_SHD, v_SHD, out_SQD, lse_HGS, gathered = ctx.saved_tensors
        view, exchange = ctx.view, ctx.exchange
        pending = None
        if exchange.active and gathered is None:
            pending = exchange.gather(k_SHD[: view.num_sent], v_SHD[: view.num_sent])
        heads = k_SHD.shape[1]
        dtype = accumulation_dtype(q_SQD.dtype)
        wide = _Wide(
            kernel=ctx.kernel,
            scale=ctx.scale,
            q_HGSD=_heads_first(q_SQD, heads),
            dout_HGSD=_heads_first(grads[0], heads),
            out_HGSD=_heads_first(out_SQD, heads),
            lse_HGS=lse_HGS,
        )
        dkv_S2HD = k_SHD.new_zeros((view.num_rows, 2, *k_SHD.shape[1:]), dtype=dtype)
        # Own corrupted keys first, while K/V arrive; then remote keys, whose gradients travel while
        # the own clean keys are done.
        for part in view.corrupted:
            wide.add(part, k_SHD, v_SHD, dkv_S2HD)
        sent = None
        if exchange.active:
            gathered = pending.wait() if pending is not None else gathered
            dkv_RC2HD = torch.zeros_like(gathered, dtype=dtype)
            for part in view.remote:
                rank = part.run.rank
                wide.add(part, gathered[rank, :, 0], gathered[rank, :, 1], dkv_RC2HD[rank])
            sent = exchange.scatter(dkv_RC2HD, k_SHD.dtype)
        for part in view.clean:
            wide.add(part, k_SHD, v_SHD, dkv_S2HD)
        if sent is not None:
            exchange.collect(sent, dkv_S2HD[: view.num_sent])
        dq_SQD = _rows_first(wide.dq_HGSD).to(q_SQD.dtype)
        dk_SHD, dv_SHD = dkv_S2HD.to(k_SHD.dtype).unbind(1)
        return dq_SQD, dk_SHD, dv_SHD, None, None, None, None


class _Wide:
    """The backward of one call: adds each part's share to dq and to the keys' gradients."""

    def __init__(
        self,
        kernel: Kernel,
        scale: float,
        q_HGSD: Tensor,
        dout_HGSD: Tensor,
        out_HGSD: Tensor,
        lse_HGS: Tensor,
    ) -> None:
        self.kernel, self.scale = kernel, scale
        self.q, self.dout, self.out, self.lse = q_HGSD, dout_HGSD, out_HGSD, lse_HGS
        self.dq_HGSD = torch.zeros_like(q_HGSD, dtype=lse_HGS.dtype)

    def add(self, part: Part, k_KHD: Tensor, v_KHD: Tensor, dkv_K2HD: Tensor) -> None:
        """Add the share of `part`, whose keys stand in k_KHD and v_KHD, to dq and dkv_K2HD."""
        rows, run = part.rows, slice(part.run.start, part.run.stop)
        k, v = _keys(k_KHD, v_KHD, part)
        dq, dk, dv = self.kernel.backward(
            self.dout[:, :, rows],
            self.q[:, :, rows],
            k,
            v,
            self.out[:, :, rows],
            self.lse[:, :, rows],
            part.spec,
            self.scale,
        )
        self.dq_HGSD[:, :, rows] += dq
        dkv_K2HD[run, 0] += dk.transpose(0, 1)
        dkv_K2HD[run, 1] += dv.transpose(0, 1)


def _heads_first(x_SQD: Tensor, key_heads: int) -> Tensor:
    """[S, Q, D] as [H, G, S, D]; query head h * G + g reads key head h, as in Megatron."""
    rows, heads, dim = x_SQD.shape
    return x_SQD.view(rows, key_heads, heads // key_heads, dim).permute(1, 2, 0, 3).contiguous()


def _rows_first(x_HGSD: Tensor) -> Tensor:
    """[H, G, S, D] as [S, Q, D]."""
    return x_HGSD.permute(2, 0, 1, 3).flatten(1, 2)


def _keys(k_KHD: Tensor, v_KHD: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """The part's keys and values, [H, K, D] each."""
    run = slice(part.run.start, part.run.stop)
    return k_KHD[run].transpose(0, 1).contiguous(), v_KHD[run].transpose(0, 1).contiguous()
