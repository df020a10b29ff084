"""Transformer Engine's collectives on packed K|V, against those of all_gather, with gloo.

Skipped without Transformer Engine: scripts/te_environment.sh makes an environment with it.
"""

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from traffic import Sent, recording

from megatron_bp.parallel.collectives import all_gather, all_to_all

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None,
        reason="needs Transformer Engine: scripts/te_environment.sh",
    ),
]

ROWS, HEADS, DIM = 7, 2, 8
WORDS = 2 * HEADS * DIM  # of a row's K|V
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
WORLDS = [2, 4]


def whole(world: int, dtype: torch.dtype) -> Tensor:
    """The K|V [R, R, C, 2, H, D] that rank r (first) holds, or owes to rank s (second)."""
    generator = torch.Generator().manual_seed(11)
    shape = (world, world, ROWS, 2, HEADS, DIM)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def functions() -> tuple[Any, Any]:
    from transformer_engine.pytorch import distributed as te

    return te.gather_along_first_dim, te.reduce_scatter_along_first_dim


def gathering(
    rank: int, world: int, dtype: torch.dtype, asynchronous: bool
) -> tuple[Tensor, Tensor, list[Sent], int]:
    """What arrives by Transformer Engine and by ours, what was sent, and the bytes of ours."""
    gather, _ = functions()
    mine = whole(world, dtype)[rank, 0]
    sent: list[Sent] = []
    with recording(sent):
        got, handle = gather(mine, dist.group.WORLD, async_op=asynchronous)
    assert (handle is not None) == asynchronous
    if handle is not None:
        handle.wait()
    ours, bytes_sent = all_gather(mine, dist.group.WORLD)
    return got, ours.wait().flatten(0, 1), sent, bytes_sent


def reducing(
    rank: int, world: int, dtype: torch.dtype, asynchronous: bool
) -> tuple[Tensor, Tensor, list[Sent], int]:
    """As `gathering`, of the gradients that ranks owe one another."""
    _, reduce_scatter = functions()
    shares = whole(world, dtype)[rank]
    output = torch.empty_like(shares[0])
    sent: list[Sent] = []
    with recording(sent):
        got, handle = reduce_scatter(
            shares.flatten(0, 1), dist.group.WORLD, async_op=asynchronous, output=output
        )
    assert got is output
    assert (handle is not None) == asynchronous
    if handle is not None:
        handle.wait()
    ours, bytes_sent = all_to_all(shares, dist.group.WORLD)
    summed = torch.zeros_like(shares[0], dtype=torch.float64)
    for share in ours.wait():
        summed += share
    return got, summed, sent, bytes_sent


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_gather(world: int, dtype: torch.dtype, asynchronous: bool) -> None:
    want = whole(world, dtype)[:, 0].flatten(0, 1)
    results = run_ranks(world, gathering, dtype, asynchronous)
    for got, ours, sent, bytes_sent in results:
        assert torch.equal(got, want)
        assert torch.equal(ours, want)
        size = (world - 1) * ROWS * WORDS * dtype.itemsize
        assert sent == [Sent("all_gather_into_tensor", world, size, False)]
        assert bytes_sent == size


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter(world: int, dtype: torch.dtype, asynchronous: bool) -> None:
    shares = whole(world, dtype).double()
    results = run_ranks(world, reducing, dtype, asynchronous)
    for rank, (got, ours, sent, bytes_sent) in enumerate(results):
        want = shares[:, rank].sum(0)
        torch.testing.assert_close(ours, want, rtol=0, atol=1e-14)
        assert got.dtype == dtype
        # world - 1 additions, each rounded: half a unit in the last place of the partial sum.
        bound = (world - 1) * torch.finfo(dtype).eps / 2 * shares[:, rank].abs().sum(0)
        assert ((got.double() - want).abs() <= bound + 1e-14).all()
        size = (world - 1) * ROWS * WORDS * dtype.itemsize
        assert sent == [Sent("reduce_scatter_tensor", world, size, False)]
        assert bytes_sent == size


def test_bf16_is_rounded_on_the_way() -> None:
    """Why the te exchange reduces in float32: in bf16 each addition is rounded."""
    results = run_ranks(4, reducing, torch.bfloat16, False)
    shares = whole(4, torch.bfloat16).double()
    errors = []
    for rank, (got, *_) in enumerate(results):
        want = shares[:, rank].sum(0)
        once = (want.to(torch.bfloat16).double() - want).square().mean().sqrt()
        errors.append((got.double() - want).square().mean().sqrt() / once)
    assert min(errors) > 1.2, f"as good as one rounding: {errors}"
