"""Every kernel that runs here against a dense float64 softmax, forward and backward.

A kernel joins by a line in KERNELS; those that need a GPU are tested in tests/gpu.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from intervals import ALL_CASES, KINDS, Intervals, plan_parts, random_intervals
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron_bp.attention.kernels import sdpa
from megatron_bp.attention.kernels.contract import Kernel, accumulation_dtype
from megatron_bp.attention.kernels.pieces import Limits
from megatron_bp.attention.kernels.sdpa import Sdpa
from megatron_bp.attention.kernels.tiled import Tiled

SMALL = Limits(8, 16, 64, 4, (64, 16), 8, 24, 500)  # all kinds of pieces among few rows
KERNELS: dict[str, Callable[[], Kernel]] = {
    "tiled": Tiled,
    "tiled, small tiles": lambda: Tiled(rows=16, keys=24),
    "sdpa": Sdpa,
    "sdpa, small pieces": lambda: Sdpa(SMALL),
}
CPU = torch.device("cpu")
SCALE = 0.41
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())


class Problem(NamedTuple):
    """q, dout [n, Q, D]; k, v [K, H, D]; seen bool[n, K]; all q and k and v strided views."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    seen: Tensor


class Result(NamedTuple):
    """What a kernel gives, of all parts together."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def seen_by(lo: np.ndarray, hi: np.ndarray, keys: int) -> Tensor:
    key = np.arange(keys)
    return torch.from_numpy((key >= lo[:, None]) & (key < hi[:, None]))


def problem(
    seen: Tensor,
    heads: int = 4,
    key_heads: int = 2,
    dim: int = 8,
    dtype: torch.dtype = torch.double,
) -> Problem:
    """Random tensors; rows and heads of q, k and v are neither first nor all of their storage."""
    generator = torch.Generator().manual_seed(len(seen) + seen.shape[1])

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.double).to(dtype)

    rows, keys = seen.shape
    kv = random(keys + 2, 2, key_heads, dim)[2:]
    q = random(rows + 3, heads + 1, dim)[3:, 1:]
    return Problem(q, kv[:, 0], kv[:, 1], random(rows, heads, dim), seen)


def dense(p: Problem) -> Result:
    """One softmax over all keys that a row sees; a row that sees none gives 0."""
    q, k, v = (x.detach().double().requires_grad_() for x in (p.q, p.k, p.v))
    group = q.shape[1] // k.shape[1]
    all_k, all_v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nqd,kqd->nqk", q, all_k) * SCALE
    scores = scores.masked_fill(~p.seen[:, None], -torch.inf)
    some = p.seen.any(1)[:, None, None]
    weights = torch.where(some, scores.softmax(-1), 0.0)
    out = torch.einsum("nqk,kqd->nqd", weights, all_v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), p.dout.double())
    return Result(out.detach(), scores.detach().logsumexp(-1), torch.where(some, dq, 0.0), dk, dv)


def plain(p: Problem) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) of PyTorch's attention under a dense mask, in the problem's dtype."""
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    group = p.q.shape[1] // p.k.shape[1]
    q, k, v = leaves[0], *(x.repeat_interleave(group, 1) for x in leaves[1:])
    bias = torch.zeros(p.seen.shape, dtype=p.q.dtype).masked_fill_(~p.seen, -torch.inf)
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(*heads_first, attn_mask=bias, scale=SCALE)
    out = out[0].transpose(0, 1)
    return out.detach(), *torch.autograd.grad(out, leaves, p.dout)


def products(p: Problem) -> tuple[Tensor, ...]:
    """The same of plain matrix products and a softmax: of torch's FlashAttention nothing."""
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    group = p.q.shape[1] // p.k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in leaves[1:])
    scores = leaves[0].transpose(0, 1) @ k.mT * SCALE
    out = (scores.masked_fill(~p.seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)
    return out.detach(), *torch.autograd.grad(out, leaves, p.dout)


class PartOf(NamedTuple):
    """Rows and a slice of keys, and what the rows see of it."""

    rows: slice
    keys: slice
    lo: np.ndarray
    hi: np.ndarray


def run(kernel: Kernel, p: Problem, parts: list[PartOf], before: float = 1.0) -> Result:
    """All parts merged, then all gradients added to `before`, which is taken off again."""
    wide = accumulation_dtype(p.q.dtype)
    out = torch.zeros(p.q.shape, dtype=wide)
    lse = torch.full(p.q.shape[:2], -torch.inf, dtype=wide)
    specs = [kernel.prepare(part.lo, part.hi, CPU) for part in parts]
    for (rows, keys, *_), spec in zip(parts, specs, strict=True):
        kernel.forward(p.q[rows], p.k[keys], p.v[keys], spec, SCALE, out[rows], lse[rows])
    dq = torch.full(p.q.shape, before, dtype=wide)
    dk, dv = torch.full((len(p.k), 2, *p.k.shape[1:]), before, dtype=wide).unbind(1)
    final = out.to(p.q.dtype)
    for (rows, keys, *_), spec in zip(parts, specs, strict=True):
        kernel.backward(
            p.dout[rows],
            p.q[rows],
            p.k[keys],
            p.v[keys],
            final[rows],
            lse[rows],
            spec,
            SCALE,
            dq[rows],
            dk[keys],
            dv[keys],
        )
    return Result(final, lse, dq - before, dk - before, dv - before)


def whole(lo: np.ndarray, hi: np.ndarray) -> list[PartOf]:
    return [PartOf(slice(0, len(lo)), slice(0, int(hi.max())), lo, hi)]


def check(got: Result, want: Result) -> None:
    for name, one, other in zip(Result._fields, got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=lambda m: f"{name}: {m}")  # noqa: B023


def compare(kernel: Kernel, intervals: Intervals, **shape: int) -> None:
    lo, hi = intervals
    p = problem(seen_by(lo, hi, int(hi.max())), **shape)
    check(run(kernel, p, whole(lo, hi)), dense(p))


@every_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_random_intervals(kernel: Callable[[], Kernel], kind: str) -> None:
    for seed in range(3):
        compare(kernel(), random_intervals(kind, seed))


@every_kernel
@pytest.mark.parametrize("name", ALL_CASES)
def test_parts_of_plans(kernel: Callable[[], Kernel], name: str) -> None:
    for degrees in ((1, 1), (2, 2)):
        for intervals in plan_parts(ALL_CASES[name], degrees):
            compare(kernel(), intervals)


@every_kernel
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim"), [(1, 1, 4), (6, 6, 8), (6, 2, 5), (5, 1, 16), (8, 4, 64)]
)
def test_heads(kernel: Callable[[], Kernel], heads: int, key_heads: int, dim: int) -> None:
    compare(kernel(), random_intervals("blocks", 3), heads=heads, key_heads=key_heads, dim=dim)


@every_kernel
@pytest.mark.parametrize(("rows", "keys"), [(300, 3000), (257, 1025)])
@pytest.mark.parametrize("kind", ["triangle", "window", "all"])
def test_many_keys(kernel: Callable[[], Kernel], kind: str, rows: int, keys: int) -> None:
    hi = 1 + np.arange(rows) * keys // rows
    lo = np.maximum(hi - 1500, 0) if kind == "window" else np.zeros_like(hi)
    if kind == "all":
        hi = np.full_like(hi, keys)
    compare(kernel(), (lo.astype(np.int32), hi.astype(np.int32)), dim=4)


@every_kernel
def test_one_row_and_one_key(kernel: Callable[[], Kernel]) -> None:
    compare(kernel(), (np.zeros(1, np.int32), np.ones(1, np.int32)))


@every_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_parts_over_disjoint_keys_are_one_softmax(kernel: Callable[[], Kernel], kind: str) -> None:
    """Keys in two runs, rows in overlapping slices; rows outside of all see nothing."""
    lo, hi = random_intervals(kind, 5)
    rows, keys = len(lo), int(hi.max())
    seen = torch.zeros(rows + 2, keys, dtype=torch.bool)
    parts = []
    for run_keys in (slice(0, keys // 3), slice(keys // 3, keys)):
        start, stop = (np.clip(x, run_keys.start, run_keys.stop) - run_keys.start for x in (lo, hi))
        seeing = np.flatnonzero(stop > start)
        edges = np.flatnonzero(np.diff(seeing, prepend=-2) > 1)
        for some in np.split(seeing, edges[1:]):
            if len(some):
                where = slice(int(some[0]) + 1, int(some[-1]) + 2)
                parts.append(PartOf(where, run_keys, start[some], stop[some]))
                seen[where, run_keys] = seen_by(
                    start[some], stop[some], run_keys.stop - run_keys.start
                )
    p = problem(seen)
    for order in (parts, parts[::-1]):
        check(run(kernel(), p, order), dense(p))


def at_most_twice_as_wrong(kernel: Kernel, intervals: Intervals, **shape: Any) -> None:
    """As PyTorch's attention under a dense mask in the same dtype.

    In bfloat16 and float16 as plain products too, of which that kernel's own errors are no part.
    """
    lo, hi = intervals
    p = problem(seen_by(lo, hi, int(hi.max())), **shape)
    want = dense(p)
    got = run(kernel, p, whole(lo, hi), before=0.0)
    ours = got.out, got.dq, got.dk, got.dv
    truth = want.out, want.dq, want.dk, want.dv
    for of in (plain,) if p.q.dtype == torch.float32 else (plain, products):
        for name, x, y, true in zip(("out", "dq", "dk", "dv"), ours, of(p), truth, strict=True):
            wrong, allowed = (float((z.double() - true).norm()) for z in (x, y))
            assert wrong <= 2 * allowed, f"{name}, {of.__name__}"
    assert got.lse.dtype == torch.float32
    assert (got.lse.double() - want.lse).abs().max() < 1e-4


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["blocks", "window", "copies"])
def test_low_precision_is_at_most_twice_as_wrong_as_plain_pytorch(
    kernel: Callable[[], Kernel], dtype: torch.dtype, kind: str
) -> None:
    at_most_twice_as_wrong(kernel(), random_intervals(kind, 8), dim=32, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("rows", "heads"), [(2048, 8), (1 << 15, 1)])
@pytest.mark.parametrize("kernel", [Tiled, Sdpa])
def test_sums_over_many_rows_and_query_heads_are_not_in_low_precision(
    kernel: Callable[[], Kernel], rows: int, heads: int, dtype: torch.dtype
) -> None:
    """PyTorch's kernel for CPUs adds dK and dV up in it: at 8 query heads 2.2 times as wrong."""
    intervals = np.zeros(rows, np.int32), np.full(rows, 64, np.int32)
    at_most_twice_as_wrong(kernel(), intervals, heads=heads, key_heads=1, dim=32, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limits", [Limits(), SMALL], ids=["usual", "small"])
def test_what_sdpa_divides_in_low_precision_is_the_same(
    limits: Limits, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if float64 were such a dtype."""
    monkeypatch.setattr(sdpa, "HALF", (torch.float64,))
    monkeypatch.setattr(sdpa, "HALF_ROWS", 20)
    for seed in range(2):
        compare(Sdpa(limits), random_intervals(kind, seed), heads=6, key_heads=2)


def test_sdpa_refuses_other_devices() -> None:
    one = np.ones(1, dtype=np.int32)
    with pytest.raises(
        ValueError, match=r"sdpa on device cuda:1: .* use auto, flash, flex or tiled"
    ):
        Sdpa().prepare(one - 1, one, torch.device("cuda:1"))
