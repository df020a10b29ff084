"""Attention of a batch of small sequences by plain matrix products: any device, any float dtype.

All scores of the batch are built, in the accumulation dtype: batches are bounded by who makes them.
"""

# Shapes: T sequences of t rows and W keys, Q query heads, H key heads, G = Q / H, D head dimension,
# x = G * t.

import torch
from torch import Tensor

from megatron_bp.attention.kernels.contract import accumulation_dtype


class Products:
    """See tiles.Batched."""

    def forward(
        self, q_TQtD: Tensor, k_THWD: Tensor, v_THWD: Tensor, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(out [T, Q, t, D], lse [T, Q, t])."""
        dtype, heads = accumulation_dtype(q_TQtD.dtype), k_THWD.shape[1]
        score_THxW = _grouped(q_TQtD, heads, dtype) @ k_THWD.to(dtype).mT * scale
        _hide(score_THxW, bias)
        lse_THx = score_THxW.logsumexp(-1)
        p_THxW = score_THxW.sub_(lse_THx[..., None]).exp_()
        out_THxD = p_THxW @ v_THWD.to(dtype)
        return out_THxD.view(q_TQtD.shape), lse_THx.view(q_TQtD.shape[:-1])

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv); a row whose lse is inf adds nothing."""
        dtype, heads = accumulation_dtype(q_TQtD.dtype), k_THWD.shape[1]
        q, dout, out = (_grouped(x, heads, dtype) for x in (q_TQtD, dout_TQtD, out_TQtD))
        k, v = k_THWD.to(dtype), v_THWD.to(dtype)
        lse = _grouped(lse_TQt[..., None], heads, dtype)
        score_THxW = q @ k.mT * scale
        _hide(score_THxW, bias)
        p_THxW = score_THxW.sub_(lse).exp_()
        dv_THWD = p_THxW.mT @ dout
        ds_THxW = (dout @ v.mT).sub_((dout * out).sum(-1, True)).mul_(p_THxW)
        dq_THxD = ds_THxW @ k * scale
        dk_THWD = ds_THxW.mT @ q * scale
        return dq_THxD.view(q_TQtD.shape), dk_THWD, dv_THWD


def _grouped(x_TQtD: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[T, Q, t, D] as [T, H, G * t, D]: what one key head serves stands together."""
    sequences, _, _, dim = x_TQtD.shape
    return x_TQtD.reshape(sequences, heads, -1, dim).to(dtype)


def _hide(score_THxW: Tensor, bias: Tensor | None) -> None:
    """Add bias [T or 1, 1, t, W] to the scores, in place."""
    if bias is not None:
        rows = bias.shape[-2]
        score_THxW.unflatten(2, (-1, rows)).add_(bias[:, :, None])
