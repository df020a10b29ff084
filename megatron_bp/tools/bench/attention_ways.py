"""The alternatives of `bench attention`: this project's kernels, and what they are held against.

All work on one layout: L tokens in documents of equal length, every block corrupted once, the rows
that training computes. Each alternative has its own inputs, made once, outside of what is measured.
"""

# Shapes: L tokens, S = clean + corrupted rows, Q query and H key heads, D head dimension.

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_bp.attention.exchange.base import NoExchange
from megatron_bp.attention.function import Plan
from megatron_bp.attention.kernels.choose import NAMES, choose, refusal
from megatron_bp.attention.parts import Held, make_view
from megatron_bp.data.document import Document
from megatron_bp.sequence.packing import pack
from megatron_bp.sequence.plan import RankRows, SequenceOptions, make_plan
from megatron_bp.sequence.visibility import Visibility, visibility
from megatron_bp.tools.bench import plain

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
OTHER_DEVICE = {"cpu": [n for n in NAMES if n.startswith("fl")], "cuda": ["sdpa"]}
LIMIT, DENSE, FLEX = "causal", "dense mask", "FlexAttention"
BASELINES = (LIMIT, DENSE, FLEX)


@dataclass(frozen=True, eq=False)
class Problem:
    """One size of the benchmark.

    Attributes:
        length: tokens.
        documents: of equal length.
        block: tokens a block.
        heads: query heads, key heads, head dimension.
        like: an empty tensor of the dtype and device.
        rows: the rows of the one rank.
        visible: what they see.
    """

    length: int
    documents: int
    block: int
    heads: tuple[int, int, int]
    like: Tensor
    rows: RankRows
    visible: Visibility

    @property
    def causal_pairs(self) -> int:
        """Pairs of the limit: two streams in which each token sees its document up to itself."""
        size = self.length // self.documents
        return self.documents * size * (size + 1)

    def flop(self, pairs: int, backward: bool) -> int:
        """Floating-point operations on so many pairs: 2 matrix products, backward 5 more."""
        query, _, dim = self.heads
        return (14 if backward else 4) * dim * query * pairs

    def tensors(self, rows: int) -> list[Tensor]:
        """q, k, v and a gradient of the output, random, rows first as the model has them."""
        query, key, dim = self.heads
        made = [
            torch.randn((rows, n, dim), dtype=self.like.dtype, device=self.like.device)
            for n in (query, key, key, query)
        ]
        return [x.requires_grad_() for x in made[:3]] + made[3:]

    def heads_first(self, rows: int) -> list[Tensor]:
        """The same as [1, heads, rows, D], in which torch's own attention is fastest."""
        made = [x.detach().transpose(0, 1)[None].contiguous() for x in self.tensors(rows)]
        return [x.requires_grad_() for x in made[:3]] + made[3:]


def make_problem(
    length: int, documents: int, block: int, heads: tuple[int, int, int], like: Tensor
) -> Problem:
    """The problem of that size.

    Raises:
        ValueError: a size that cannot be.
    """
    if min(length, documents, block, *heads) < 1:
        raise ValueError(f"{length} tokens, {documents} documents, blocks of {block}: too small")
    if length % documents:
        raise ValueError(f"--documents {documents}: must divide the length {length}")
    if heads[0] % heads[1]:
        raise ValueError(f"--key-heads {heads[1]}: must divide --heads {heads[0]}")
    size = length // documents
    tokens, supervised = np.zeros(size, dtype=np.int32), np.ones(size, dtype=np.bool_)
    sample = pack([Document(tokens, supervised, key) for key in range(documents)], length)
    plan = make_plan(sample, SequenceOptions(block))
    rows = plan.rows_of(0)
    return Problem(
        length, documents, block, heads, like, rows, visibility(plan, rows.clean, rows.corrupted)
    )


def kernels_of(like: Tensor, head_dim: int, notes: list[str]) -> tuple[str, ...]:
    """All kernels that can work on such tensors; `notes` is told why others cannot."""
    device = like.device.type
    major = torch.cuda.get_device_capability()[0] if device == "cuda" else 0
    names = [n for n in NAMES if n not in ("auto", *OTHER_DEVICE[device])]
    reasons = {name: refusal(name, device, like.dtype, head_dim, major) for name in names}
    notes += [f"{name} left out: {reason}" for name, reason in reasons.items() if reason]
    return tuple(name for name, reason in reasons.items() if reason is None)


def ours(problem: Problem, name: str) -> plain.Call:
    """The attention that training runs, with the kernel of that name."""
    like = problem.like
    kernel, device = choose(name, like.device.type, like.dtype, problem.heads[2]), like.device
    view = make_view(problem.visible, Held.of_rank(problem.rows), (), kernel, device)
    plan = Plan(view, NoExchange(), kernel)
    q, k, v, gradient = problem.tensors(problem.rows.num_rows)
    scale = 1 / math.sqrt(problem.heads[2])

    def call(backward: bool) -> object:
        with torch.set_grad_enabled(backward):
            out = plan.attend(q, k, v, scale)
        return torch.autograd.grad(out, (q, k, v), gradient) if backward else out

    return call


def limit(problem: Problem) -> plain.Call:
    """Torch's causal attention, two calls for each document: nothing but the pairs themselves."""
    size = problem.length // problem.documents
    streams = [problem.heads_first(size) for _ in range(2 * problem.documents)]
    return partial(_limit, streams)


def _limit(streams: list[list[Tensor]], backward: bool) -> object:
    outs = []
    for q, k, v, _ in streams:
        with torch.set_grad_enabled(backward):
            outs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    if not backward:
        return outs
    inputs = [x for stream in streams for x in stream[:3]]
    return torch.autograd.grad(outs, inputs, [stream[3] for stream in streams])


def dense_mask(visible: Visibility, rows: RankRows, length: int, device: Any) -> Tensor:
    """bool[S, S], True = sees; keys stand as the rows do."""
    clean_at = torch.searchsorted(torch.from_numpy(rows.clean), torch.arange(length + 1))
    clean = len(rows.clean)
    bounds = [
        clean_at[visible.clean_lo.long()],
        clean_at[visible.clean_hi.long()],
        visible.own_lo + clean,
        visible.own_hi + clean,
    ]
    lo, hi, own_lo, own_hi = (bound[:, None].to(device) for bound in bounds)
    keys = torch.arange(rows.num_rows, device=device)[None]
    mask = (keys >= lo) & (keys < hi)
    mask |= (keys >= own_lo) & (keys < own_hi)
    return mask


def dense(problem: Problem) -> plain.Call:
    """Torch's attention of all rows over all keys under a mask."""
    rows, device = problem.rows, problem.like.device
    mask = dense_mask(problem.visible, rows, problem.length, device)
    q, k, v, gradient = problem.heads_first(rows.num_rows)

    def call(backward: bool) -> object:
        with torch.set_grad_enabled(backward):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), gradient) if backward else out

    return call


def flex(problem: Problem) -> plain.Call:
    """FlexAttention of all rows over all keys, its mask from what each row sees."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows, device = problem.rows, problem.like.device
    num, clean, visible = rows.num_rows, len(rows.clean), problem.visible
    columns = [visible.clean_lo, visible.clean_hi, visible.own_lo + clean, visible.own_hi + clean]
    lo, hi, own_lo, own_hi = (column.to(device) for column in columns)
    position = torch.from_numpy(rows.clean).to(device)
    place = torch.cat([position, position.new_full((num - clean,), -1)])

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        of_clean = (place[j] >= lo[i]) & (place[j] < hi[i]) & (j < clean)
        return of_clean | ((j >= own_lo[i]) & (j < own_hi[i]))

    mask = create_block_mask(sees, None, None, num, num, device=str(device))
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v, gradient = problem.heads_first(num)

    def call(backward: bool) -> object:
        with torch.set_grad_enabled(backward):
            inputs = (q, k, v) if backward else (q.detach(), k.detach(), v.detach())
            out = compiled(*inputs, block_mask=mask, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), gradient) if backward else out

    return call
