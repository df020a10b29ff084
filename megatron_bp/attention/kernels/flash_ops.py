"""The two FlashAttentions behind one pair of calls: torch's operators, and FlashAttention-4's.

A call has segments of rows and keys (see `varlen`). Log-sum-exp is [Q, m], natural, in float32.
"""

# Shapes: N segments, m rows and c keys of a call, Q query heads, H key heads, D head dimension.

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention


class Segments(NamedTuple):
    """Where segments begin, int32[N + 1] on the device, and what `varlen.Call` says of them."""

    row_offsets: Tensor
    key_offsets: Tensor
    max_rows: int
    max_keys: int
    causal: bool
    lag: int


class Operations(NamedTuple):
    """forward(q_mQD, k_cHD, v_cHD, segments, scale) gives out_mQD and lse_Qm.

    backward(dout_mQD, q_mQD, k_cHD, v_cHD, out_mQD, lse_Qm, segments, scale) gives dq, dk and dv;
    windows: whether segments may lag.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    windows: bool


def use(implementation: str | None) -> None:
    """Have torch's operators answered by "FA3" or "FA4", or by its own, if they are not already.

    It holds for the whole process, until the next call.

    Raises:
        RuntimeError: torch cannot: the package is missing or does not fit.
    """
    current = getattr(attention, "current_flash_attention_impl", lambda: None)()
    if current == implementation:
        return
    try:
        if implementation is None:
            attention.restore_flash_attention_impl()
        else:
            attention.activate_flash_attention_impl(implementation)
    except Exception as error:
        raise RuntimeError(
            f"torch {torch.__version__} cannot use {implementation} for its FlashAttention "
            f"operators: {error}; use --attention-kernel flash"
        ) from error


# Tests put a dense softmax in their place.
_aten_forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward
_aten_backward: Callable[..., Any] = torch.ops.aten._flash_attention_backward


def _most_rows(segments: Segments) -> int:
    """The bound on a segment's rows. With 1, FA2 would take its own path for decoding."""
    return max(segments.max_rows, 2)


def _forward_aten(
    implementation: str | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    scale: float,
) -> tuple[Tensor, Tensor]:
    use(implementation)
    assert segments.lag == 0  # a negative right window means no limit to FlashAttention-2 and -3
    out, lse, *_ = _aten_forward(
        q,
        k,
        v,
        segments.row_offsets,
        segments.key_offsets,
        _most_rows(segments),
        segments.max_keys,
        0.0,  # dropout
        segments.causal,
        False,  # return_debug_mask
        scale=scale,
    )
    return out, lse


def _backward_aten(
    implementation: str | None,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    use(implementation)
    assert segments.lag == 0
    dq, dk, dv = _aten_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        segments.row_offsets,
        segments.key_offsets,
        _most_rows(segments),
        segments.max_keys,
        0.0,  # dropout
        segments.causal,
        torch.zeros(2, dtype=torch.uint64, device=q.device),  # random state of no dropout
        torch.empty(0, device=q.device),
        scale=scale,
    )
    return dq, dk, dv


def _four() -> Any:
    return import_module("flash_attn.cute.interface")


def _window(segments: Segments) -> dict[str, Any]:
    """FlashAttention-4's arguments for the mask."""
    if segments.lag:
        return {"causal": False, "window_size_left": None, "window_size_right": -segments.lag}
    return {"causal": segments.causal, "window_size_left": None, "window_size_right": None}


def _forward_four(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _four()._flash_attn_fwd(
        q,
        k,
        v,
        cu_seqlens_q=segments.row_offsets,
        cu_seqlens_k=segments.key_offsets,
        max_seqlen_q=segments.max_rows,
        max_seqlen_k=segments.max_keys,
        softmax_scale=scale,
        return_lse=True,
        **_window(segments),
    )
    return out, lse


def _backward_four(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv, *_ = _four()._flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=scale,
        cu_seqlens_q=segments.row_offsets,
        cu_seqlens_k=segments.key_offsets,
        max_seqlen_q=segments.max_rows,
        max_seqlen_k=segments.max_keys,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_window(segments),
    )
    return dq, dk, dv


def aten(implementation: str | None = None) -> Operations:
    """Torch's operators, answered by `implementation`; None: by torch's own FlashAttention-2."""
    forward = partial(_forward_aten, implementation)
    return Operations(forward, partial(_backward_aten, implementation), windows=False)


ATEN = aten()
FOUR = Operations(_forward_four, _backward_four, windows=True)
