"""A dense softmax with the signatures of FlashAttention's operators, in the dtype it is given.

It stands in for what needs a GPU, checks all that the real ones ask of their arguments, and keeps
what it was called with.
"""

from typing import Any

import torch
from torch import Tensor


def visible(
    row_offsets: Tensor, key_offsets: Tensor, causal: bool, right: int | None = None
) -> Tensor:
    """bool[m, c]: segment by segment; a causal mask, or a right window, is aligned at the end."""
    mask = torch.zeros(int(row_offsets[-1]), int(key_offsets[-1]), dtype=torch.bool)
    for s in range(len(row_offsets) - 1):
        rows = slice(int(row_offsets[s]), int(row_offsets[s + 1]))
        keys = slice(int(key_offsets[s]), int(key_offsets[s + 1]))
        n, m = rows.stop - rows.start, keys.stop - keys.start
        row, key = torch.arange(n)[:, None], torch.arange(m)
        limit = 0 if causal else right
        mask[rows, keys] = True if limit is None else key <= row + m - n + limit
    return mask


def check(
    q: Tensor, k: Tensor, v: Tensor, row_offsets: Tensor, key_offsets: Tensor, most: Any
) -> None:
    """What FlashAttention-2 and -4 ask of their arguments."""
    assert q.ndim == k.ndim == v.ndim == 3
    assert q.dtype == k.dtype == v.dtype
    assert k.shape == v.shape
    assert q.shape[1] % k.shape[1] == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    for offsets, total, largest in zip(
        (row_offsets, key_offsets), (len(q), len(k)), most, strict=True
    ):
        assert offsets.dtype == torch.int32
        assert offsets.is_contiguous()
        assert int(offsets[0]) == 0
        assert int(offsets[-1]) == total
        size = offsets.diff()
        assert int(size.min()) > 0, "a segment with no row or key"
        assert int(size.max()) <= largest


def wide(*tensors: Tensor) -> list[Tensor]:
    """In float32, but float64 stays."""
    return [x if x.dtype == torch.float64 else x.float() for x in tensors]


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out [m, Q, D], lse [Q, m])."""
    assert bool(mask.any(1).all()), "a row without keys"
    heads, dtype = k.shape[1], q.dtype
    q, k, v = wide(q, k, v)
    score = torch.einsum("mhgd,chd->hgmc", q.unflatten(1, (heads, -1)), k) * scale
    score = score.masked_fill(~mask, -torch.inf)
    out = torch.einsum("hgmc,chd->mhgd", score.softmax(-1), v).flatten(1, 2)
    return out.to(dtype).contiguous(), score.logsumexp(-1).flatten(0, 1).contiguous()


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention's backward: with the out and lse that it is given."""
    assert dout.dtype == out.dtype == q.dtype
    assert lse.shape == (q.shape[1], len(q))
    assert lse.is_contiguous()
    assert dout.stride(-1) == out.stride(-1) == 1
    heads, dtype = k.shape[1], q.dtype
    dout, q, k, v, out = wide(dout, q, k, v, out)
    assert lse.dtype == q.dtype
    q, dout, out = (x.unflatten(1, (heads, -1)) for x in (q, dout, out))
    score = torch.einsum("mhgd,chd->hgmc", q, k) * scale
    p = torch.exp(score - lse.unflatten(0, (heads, -1))[..., None]).masked_fill(~mask, 0.0)
    dv = torch.einsum("hgmc,mhgd->chd", p, dout)
    delta = (dout * out).sum(-1).permute(1, 2, 0)
    ds = p * (torch.einsum("mhgd,chd->hgmc", dout, v) - delta[..., None]) * scale
    dq = torch.einsum("hgmc,chd->mhgd", ds, k).flatten(1, 2)
    dk = torch.einsum("hgmc,mhgd->chd", ds, q)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class Aten:
    """torch.ops.aten._flash_attention_forward and _backward, positional arguments and all."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float,
    ) -> tuple[Tensor, ...]:
        check(query, key, value, cum_seq_q, cum_seq_k, (max_q, max_k))
        assert dropout_p == 0.0
        assert return_debug_mask is False
        assert max_q > 1, "FlashAttention-2 takes its path for decoding"
        self.calls.append(
            {"rows": cum_seq_q, "keys": cum_seq_k, "causal": is_causal, "q": query, "k": key}
        )
        mask = visible(cum_seq_q, cum_seq_k, is_causal)
        out, lse = forward(query, key, value, mask, scale)
        return out, lse, *(torch.empty(0) for _ in range(3))

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor,
        cum_seq_k: Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        check(query, key, value, cum_seq_q, cum_seq_k, (max_q, max_k))
        assert dropout_p == 0.0
        assert rng_state.dtype == torch.uint64
        assert unused.numel() == 0
        mask = visible(cum_seq_q, cum_seq_k, is_causal)
        return backward(grad_out, query, key, value, out, logsumexp, mask, scale)


class Four:
    """flash_attn.cute.interface, of flash-attn-4 4.0.0b36: what of it is called."""

    def __init__(self) -> None:
        self.windows: list[tuple[bool, int | None, int | None]] = []

    def _mask(self, given: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        most = given["max_seqlen_q"], given["max_seqlen_k"]
        check(q, k, v, given["cu_seqlens_q"], given["cu_seqlens_k"], most)
        window = given["causal"], given["window_size_left"], given["window_size_right"]
        assert window[1] is None
        assert not (window[0] and window[2] is not None), "causal overrides a right window"
        self.windows.append(window)
        return visible(given["cu_seqlens_q"], given["cu_seqlens_k"], window[0], window[2])

    def _flash_attn_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float,
        return_lse: bool,
        **given: Any,
    ) -> tuple[Tensor | None, ...]:
        assert return_lse
        out, lse = forward(q, k, v, self._mask(given, q, k, v), softmax_scale)
        return out, lse, None, None, None

    def _flash_attn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        softmax_scale: float,
        deterministic: bool,
        **given: Any,
    ) -> tuple[Tensor, ...]:
        assert deterministic is False
        mask = self._mask(given, q, k, v)
        return backward(dout, q, k, v, out, lse, mask, softmax_scale)
