"""What a reader would write instead: each baseline in a few plain lines, made with torch alone.

Benchmarks show their baselines within a few percent of these, so that nobody has to trust them.
Nothing of this project is imported here.
"""

# Shapes: L tokens, n documents of L / n tokens each, B block size, Q query and H key heads, D head
# dimension.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Call = Callable[[bool], object]
"""Runs it once; with True the backward too."""


def qkv(batch: int, rows: int, heads: tuple[int, int, int], like: Tensor) -> list[Tensor]:
    """q, k, v and a gradient of the output, random, [batch, heads, rows, D] of `like`'s dtype."""
    query, key, dim = heads
    shapes = [(batch, n, rows, dim) for n in (query, key, key, query)]
    random = [torch.randn(s, dtype=like.dtype, device=like.device) for s in shapes]
    return [x.requires_grad_() for x in random[:3]] + random[3:]


def causal(length: int, documents: int, heads: tuple[int, int, int], like: Tensor) -> Call:
    """Two streams of L tokens under torch's own causal attention, documents as a batch."""
    q, k, v, gradient = qkv(2 * documents, length // documents, heads, like)

    def call(backward: bool) -> object:
        with torch.set_grad_enabled(backward):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), gradient) if backward else out

    return call


def rule(length: int, documents: int, block: int) -> Callable[..., Any]:
    """Whether row i of [clean, corrupted] (2 L) sees key j, as FlexAttention asks."""
    size = length // documents

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        row, key = i % length, j % length
        of_row, of_key = row % size // block, key % size // block
        clean_row, clean_key = i < length, j < length
        earlier = clean_key & ((of_key < of_row) | (clean_row & (of_key == of_row)))
        own = ~clean_row & ~clean_key & (of_key == of_row)
        return (row // size == key // size) & (earlier | own)

    return sees


def dense(
    length: int, documents: int, block: int, heads: tuple[int, int, int], like: Tensor
) -> Call:
    """Torch's attention over all 2 L rows and keys under a mask."""
    at = torch.arange(2 * length, device=like.device)
    mask = rule(length, documents, block)(0, 0, at[:, None], at[None])
    q, k, v, gradient = qkv(1, 2 * length, heads, like)

    def call(backward: bool) -> object:
        with torch.set_grad_enabled(backward):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), gradient) if backward else out

    return call


def flex(
    length: int, documents: int, block: int, heads: tuple[int, int, int], like: Tensor
) -> Call:
    """FlexAttention over all 2 L rows and keys, compiled."""
    rows = 2 * length
    mask = create_block_mask(
        rule(length, documents, block), None, None, rows, rows, device=str(like.device)
    )
    q, k, v, gradient = qkv(1, rows, heads, like)
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(backward: bool) -> object:
        with torch.set_grad_enabled(backward):
            inputs = (q, k, v) if backward else (q.detach(), k.detach(), v.detach())
            out = compiled(*inputs, block_mask=mask, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), gradient) if backward else out

    return call


def all_gather(k: Tensor, v: Tensor) -> Callable[[], object]:
    """Each rank gathers the K|V of every rank, [rows, H, D] each."""

    def call() -> Tensor:
        packed = torch.stack((k, v), 1)
        every = packed.new_empty((dist.get_world_size() * len(k), *packed.shape[1:]))
        dist.all_gather_into_tensor(every, packed)
        return every

    return call


def ring(k: Tensor, v: Tensor) -> Callable[[], object]:
    """Each rank's K|V, [rows, H, D] each, goes round the ring until all have seen it."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def call() -> None:
        here = torch.stack((k, v), 1)
        for _ in range(world - 1):
            arriving = torch.empty_like(here)
            sent = dist.isend(here, (rank + 1) % world)
            got = dist.irecv(arriving, (rank - 1) % world)
            for work in (sent, got):
                assert work is not None
                work.wait()
            here = arriving

    return call
