"""The tiled kernel alone against a dense softmax, on keys that need several tiles a row tile."""

import numpy as np
import pytest
import torch

from megatron_bp.attention.kernels import tiled
from megatron_bp.attention.kernels.contract import Intervals, row_tiles

HEADS, GROUPS, DIM = 2, 2, 4


def intervals(kind: str, rows: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """[lo, hi) of each row, as int32; no row is without a key."""
    rng = np.random.default_rng(0)
    if kind == "triangle":
        lo, hi = np.zeros(rows), 1 + np.arange(rows) * keys // rows
    elif kind == "window":
        hi = 1 + np.arange(rows) * keys // rows
        lo = np.maximum(hi - 1500, 0)
    elif kind == "all":
        lo, hi = np.zeros(rows), np.full(rows, keys)
    else:
        lo = rng.integers(0, keys, rows)
        hi = lo + 1 + rng.integers(0, keys - lo)
    return lo.astype(np.int32), hi.astype(np.int32)


@pytest.mark.parametrize("kind", ["triangle", "window", "all", "random"])
@pytest.mark.parametrize(("rows", "keys"), [(300, 3000), (257, 1025)])
def test_the_kernel_is_a_dense_softmax_on_many_tiles(kind: str, rows: int, keys: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(HEADS, GROUPS, rows, DIM, dtype=torch.float64)
    k, v = torch.randn(2, HEADS, keys, DIM, dtype=torch.float64)
    dout = torch.randn_like(q)
    lo, hi = intervals(kind, rows, keys)
    spec = Intervals(torch.from_numpy(lo), torch.from_numpy(hi), row_tiles(lo, hi, tiled.TILE_ROWS))
    out, lse = tiled.forward(q, k, v, spec, 0.5)
    grads = tiled.backward(dout, q, k, v, out, lse, spec, 0.5)

    place = torch.arange(keys)
    seen = (place >= spec.lo[:, None]) & (place < spec.hi[:, None])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("hgnd,hkd->hgnk", leaves[0], leaves[1]) * 0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    dense = torch.einsum("hgnk,hkd->hgnd", scores.softmax(-1), leaves[2])
    dense.backward(dout)
    torch.testing.assert_close(out, dense.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, scores.detach().logsumexp(-1), rtol=1e-10, atol=1e-12)
    for got, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad, rtol=1e-9, atol=1e-11)
