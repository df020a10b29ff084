"""Every kernel that a GPU can run against a dense softmax in float64, forward and backward.

The budget in low precision: twice the error of plain PyTorch in the same dtype.
"""

import numpy as np
import pytest
import torch
from planned import dense, planned_intervals, random_intervals, seeing
from torch import Tensor

from megatron_bp.attention.kernels.choose import NAMES, choose, refusal
from megatron_bp.attention.kernels.contract import Kernel
from megatron_bp.attention.kernels.self_test import Part, computed, self_test

CUDA = torch.device("cuda")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = [name for name in NAMES if name not in ("auto", "sdpa")]


def kernel_of(name: str, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel; the test is skipped where this machine or this problem is none for it."""
    major = torch.cuda.get_device_capability()[0]
    reason = refusal(name, "cuda", dtype, head_dim, major)
    if reason is not None:
        pytest.skip(reason)
    return choose(name, "cuda", dtype, head_dim)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("name", KERNELS)
def test_the_self_test_passes(name: str, head_dim: int, dtype: torch.dtype) -> None:
    kernel = kernel_of(name, dtype, head_dim)
    self_test(kernel, CUDA, dtype, head_dim, heads=8, key_heads=2)


def attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor, scale: float
) -> dict[str, Tensor]:
    """Plain attention in the dtype of q, with autograd's gradients."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    heads = k.shape[1]
    score = torch.einsum("nhgd,khd->nhgk", q.unflatten(1, (heads, -1)), k) * scale
    score = score.masked_fill(~seen[:, None, None], -torch.inf)
    out = torch.einsum("nhgk,khd->nhgd", score.softmax(-1), v).flatten(1, 2)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return {"output": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def compare(
    kernel: Kernel, lo: np.ndarray, hi: np.ndarray, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    """Hold the kernel to the budget on these rows; sizes are Q, H and D."""
    heads, key_heads, dim = sizes
    keys = int(hi.max())
    chance = torch.Generator(CUDA).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance, device=CUDA).to(dtype)

    q, dout = draw(len(lo), heads, dim), draw(len(lo), heads, dim)
    k, v = draw(keys, 2, key_heads, dim).unbind(1)
    scale = dim**-0.5
    seen = torch.from_numpy(dense(lo, hi, keys)).to(CUDA)
    wide = [x.double() for x in (q, k, v, dout)]
    exact = attention(*wide, seen, scale)
    plain = attention(q, k, v, dout, seen, scale)
    got = computed(kernel, q, k, v, dout, [Part(np.arange(len(lo)), lo, hi, 0, keys)], scale)
    for name, want in exact.items():
        error = (got[name].double() - want).norm() / want.norm()
        budget = 2 * (plain[name].double() - want).norm() / want.norm()
        assert error <= budget, f"{name}: {error:.2e}, where plain PyTorch has {budget / 2:.2e}"


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("block", [4, 32, 100, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_both_streams_of_packed_documents(name: str, block: int, dtype: torch.dtype) -> None:
    kernel = kernel_of(name, dtype, 128)
    for part, (lo, hi) in planned_intervals([1500, 700, 333], block):
        if part.startswith(("bp1 cp1 rank 0", "bp2 cp2 rank 1", "bp1 cp2 rank 1")):
            compare(kernel, lo, hi, dtype, (8, 2, 128))


@pytest.mark.parametrize("name", KERNELS)
def test_a_window_and_more_heads_than_fit_a_group(name: str) -> None:
    kernel = kernel_of(name, BF16, 64)
    for part, (lo, hi) in planned_intervals([2100], 16, window=200):
        if part.startswith("bp1 cp1"):
            compare(kernel, lo, hi, BF16, (40, 8, 64))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", KERNELS)
def test_random_intervals(name: str, seed: int) -> None:
    kernel = kernel_of(name, BF16, 64)
    compare(kernel, *random_intervals(seed, 700, 900), BF16, (4, 2, 64))


@pytest.mark.parametrize("name", ["flex", "tiled"])
def test_head_dimension_512(name: str) -> None:
    kernel = kernel_of(name, BF16, 512)
    start = np.arange(1024) // 256 * 256
    lo, hi = seeing(np.zeros(1024, np.int32), start.astype(np.int32))
    compare(kernel, lo, hi, BF16, (4, 2, 512))


def test_nothing_of_rows_by_keys_is_built() -> None:
    """A plan of 64K tokens takes less memory than one head's scores would."""
    kernel = kernel_of("auto", BF16, 128)
    length = 1 << 16
    start = (np.arange(length) // 32 * 32).astype(np.int32)
    lo, hi = np.zeros(length, np.int32), start + 32
    q, k = (torch.randn(length, 1, 128, device=CUDA, dtype=BF16) for _ in range(2))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    part = Part(np.arange(length), lo, hi, 0, length)
    computed(kernel, q, k, k, q, [part], 0.1)
    assert torch.cuda.max_memory_allocated() - before < 2 * length * length
