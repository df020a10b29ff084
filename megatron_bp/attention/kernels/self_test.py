"""A kernel against a dense softmax in float64, at start-up, on the device that it will run on.

A kernel that is wrong on this machine (a driver, a package, a compiler) trains a wrong model in
silence. The problem is small and has every kind of visibility: packed documents, a ragged last
block, clean and corrupted rows, a window, a rectangle, and rows whose keys lie in two parts.
"""

# Shapes: n rows, K keys, Q query heads, H key heads, G = Q / H, D head dimension, r rows of a part.

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.attention.kernels.contract import Kernel, accumulation_dtype

BLOCK = 16
DOCUMENTS = (144, 144, 21)  # tokens; the last one ends in a ragged block. What a kernel does with
# long rows it does with 128 of them: the corrupted rows of 144 tokens without their first block.
WINDOW = 40
MAX_KEY_HEADS, MAX_GROUP = 2, 4  # of the model's, so that the test is short

# The largest error, as a fraction of the largest magnitude of what is compared. With bfloat16 and
# float16, output and gradients are rounded several times on the way.
BOUNDS = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
TF32_BOUND = 1e-2  # of float32 where matrix products may take TF32, at the user's wish


@dataclass(frozen=True, eq=False)
class Part:
    """Rows `rows` see keys [lo, hi) of the keys [first, last): int64[r], int32[r] each."""

    rows: NDArray[np.int64]
    lo: NDArray[np.int32]
    hi: NDArray[np.int32]
    first: int
    last: int


def parts() -> tuple[int, int, list[Part]]:
    """Rows and keys of the problem, and its parts: over clean keys, then over corrupted ones.

    Rows: clean, corrupted, then some with a window and some that see a rectangle. Keys: as many
    clean ones, then as many corrupted ones.
    """
    length = sum(DOCUMENTS)
    ends = np.cumsum(DOCUMENTS)
    token = np.arange(length)
    document = np.searchsorted(ends, token, side="right")
    start = (ends - DOCUMENTS)[document]
    block = start + (token - start) // BLOCK * BLOCK
    block_end = np.minimum(block + BLOCK, ends[document])
    windowed = np.arange(20, 90)
    rectangle = np.full(37, 20)
    lo = [start, start, np.maximum(windowed - WINDOW + 1, 0), rectangle]
    hi = [block_end, block, windowed + 1, rectangle + 130]
    clean = _part(np.concatenate(lo), np.concatenate(hi), 0, length)
    own = _part(block, block_end, length, length)
    rows = len(np.concatenate(lo))
    return rows, 2 * length, [clean, Part(own.rows + length, own.lo, own.hi, length, 2 * length)]


def _part(lo: NDArray[np.int64], hi: NDArray[np.int64], first: int, length: int) -> Part:
    """The part of the rows that see some key."""
    rows = np.flatnonzero(hi > lo)
    return Part(rows, lo[rows].astype(np.int32), hi[rows].astype(np.int32), first, first + length)


def self_test(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    heads: int,
    key_heads: int,
) -> None:
    """Compute a small attention with `kernel`, forward and backward, and compare.

    It draws from a generator of its own: the random state of the run is left alone.

    Args:
        kernel: the one to test.
        device: where the run will compute, as is the rest.
        dtype: the model's.
        head_dim: of queries, keys and values.
        heads: query heads of one rank.
        key_heads: key heads of one rank.

    Raises:
        RuntimeError: the kernel fails, or is off by more than the bound of the dtype.
    """
    shared = min(key_heads, MAX_KEY_HEADS)
    group = min(heads // key_heads, MAX_GROUP)
    rows, keys, cut = parts()
    chance = torch.Generator().manual_seed(1)

    def draw(count: int, heads: int) -> Tensor:
        return torch.randn((count, heads, head_dim), generator=chance).to(dtype)

    q, dout = draw(rows, shared * group), draw(rows, shared * group)
    k, v = draw(keys, shared), draw(keys, shared)
    scale = head_dim**-0.5
    want = dense(q, k, v, dout, cut, scale)
    try:
        q, k, v, dout = (x.to(device) for x in (q, k, v, dout))
        got = computed(kernel, q, k, v, dout, cut, scale)
        got = {name: value.cpu() for name, value in got.items()}
    except Exception as error:
        raise RuntimeError(
            f"attention kernel {kernel.name} failed its self-test on {device} ({dtype}, head "
            f"dimension {head_dim}): {error}; use --attention-kernel tiled, or another one"
        ) from error
    bound = _bound(dtype, device)
    for name, exact in want.items():
        off = float((got[name].double() - exact).abs().max() / exact.abs().max())
        if not off <= bound:  # NaN is no less
            raise RuntimeError(
                f"attention kernel {kernel.name} is wrong on {device} ({dtype}, head dimension "
                f"{head_dim}): its {name} is off by {off:.2e} of the largest value, where "
                f"{bound:.0e} is allowed; use --attention-kernel tiled, or another one"
            )


def _bound(dtype: torch.dtype, device: torch.device) -> float:
    tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return TF32_BOUND if dtype == torch.float32 and tf32 else BOUNDS[dtype]


def computed(
    kernel: Kernel,
    q_nQD: Tensor,
    k_KHD: Tensor,
    v_KHD: Tensor,
    dout_nQD: Tensor,
    cut: list[Part],
    scale: float,
) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv of the kernel, part by part."""
    wide = accumulation_dtype(q_nQD.dtype)
    out_nQD = torch.zeros_like(q_nQD, dtype=wide)
    lse_nQ = out_nQD.new_full(q_nQD.shape[:2], -torch.inf)
    specs = []
    for part in cut:
        rows, keys = _places(part, q_nQD)
        specs.append(kernel.prepare(part.lo, part.hi, q_nQD.device))
        out, lse = out_nQD[rows], lse_nQ[rows]
        kernel.forward(q_nQD[rows], k_KHD[keys], v_KHD[keys], specs[-1], scale, out, lse)
        out_nQD[rows], lse_nQ[rows] = out, lse
    final = out_nQD.to(q_nQD.dtype)
    dq = torch.zeros_like(out_nQD)
    dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k_KHD, v_KHD))
    for part, spec in zip(cut, specs, strict=True):
        rows, keys = _places(part, q_nQD)
        dq_part = dq[rows]
        kernel.backward(
            dout_nQD[rows],
            q_nQD[rows],
            k_KHD[keys],
            v_KHD[keys],
            final[rows],
            lse_nQ[rows],
            spec,
            scale,
            dq_part,
            dk[keys],
            dv[keys],
        )
        dq[rows] = dq_part
    return {"output": out_nQD, "log-sum-exp": lse_nQ, "dq": dq, "dk": dk, "dv": dv}


def _places(part: Part, like: Tensor) -> tuple[Tensor, slice]:
    return torch.from_numpy(part.rows).to(like.device), slice(part.first, part.last)


def dense(
    q_nQD: Tensor,
    k_KHD: Tensor,
    v_KHD: Tensor,
    dout_nQD: Tensor,
    cut: list[Part],
    scale: float,
) -> dict[str, Tensor]:
    """The same in float64 from one masked softmax over all keys, with autograd's gradients."""
    heads = k_KHD.shape[1]
    seen_nK = torch.zeros((len(q_nQD), len(k_KHD)), dtype=torch.bool)
    for part in cut:
        key = np.arange(part.last - part.first)
        seen = (key >= part.lo[:, None]) & (key < part.hi[:, None])
        seen_nK[torch.from_numpy(part.rows), part.first : part.last] = torch.from_numpy(seen)
    with torch.enable_grad():
        q, k, v = (x.double().clone().requires_grad_() for x in (q_nQD, k_KHD, v_KHD))
        score_nHGK = torch.einsum("nhgd,khd->nhgk", q.unflatten(1, (heads, -1)), k) * scale
        score_nHGK = score_nHGK.masked_fill(~seen_nK[:, None, None], -torch.inf)
        lse_nQ = score_nHGK.logsumexp(-1).flatten(1)
        out_nQD = torch.einsum("nhgk,khd->nhgd", score_nHGK.softmax(-1), v).flatten(1, 2)
        dq, dk, dv = torch.autograd.grad(out_nQD, (q, k, v), dout_nQD.double())
    return {
        "output": out_nQD.detach(),
        "log-sum-exp": lse_nQ.detach(),
        "dq": dq,
        "dk": dk,
        "dv": dv,
    }
