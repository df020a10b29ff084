"""All-to-all over heads: each rank attends with all rows of the sequence and its share of heads.

The a2a form of mode CP (DeepSpeed Ulysses, arXiv 2309.14509). Rows are dealt by place; Q, K and V
of them go to the ranks that have their heads, and the output comes back. Where there are fewer key
heads than ranks, ranks that share one each get a copy.
"""

# Shapes: R ranks, S rows of this rank, A rows of all ranks, N of them that anybody sees or computes
# (those that only fill up left out), Q query heads, H key heads, D head dimension.

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.attention.exchange.base import Traffic
from megatron_bp.attention.function import Plan, Result
from megatron_bp.attention.parts import Held
from megatron_bp.parallel.collectives import all_to_all_uneven
from megatron_bp.sequence.plan import RankRows


def refuse_heads(query_heads: int, key_heads: int, ranks: int) -> None:
    """Raise a ValueError if heads cannot be dealt to so many ranks."""
    shared = key_heads % ranks and ranks % key_heads
    if query_heads % ranks or shared:
        raise ValueError(
            f"--cp-comm-type a2a over {ranks} ranks with {query_heads} query and {key_heads} key "
            f"heads a tensor-parallel rank: query heads must be a multiple of the ranks, and key "
            f"heads a multiple or a divisor; choose another --context-parallel-size or "
            f"--cp-comm-type"
        )


def all_rows(shards: tuple[RankRows, ...]) -> tuple[Held, np.ndarray[Any, Any]]:
    """All rows of a sequence in ascending order, and their places where ranks' rows follow."""
    clean = np.concatenate([shard.clean for shard in shards])
    corrupted = np.concatenate([shard.corrupted for shard in shards])
    begin = np.append(0, np.cumsum([shard.num_rows for shard in shards]))
    clean_at = [b + np.arange(len(s.clean)) for b, s in zip(begin, shards, strict=False)]
    corrupted_at = [
        b + s.num_clean + np.arange(len(s.corrupted)) for b, s in zip(begin, shards, strict=False)
    ]
    by_position, by_place = np.argsort(clean), np.argsort(corrupted)
    order = [np.concatenate(clean_at)[by_position], np.concatenate(corrupted_at)[by_place]]
    return Held(clean[by_position], corrupted[by_place]), np.concatenate(order)


@dataclass(frozen=True, eq=False)
class HeadsPlan:
    """How the rows of one layout attend when heads are dealt to ranks.

    Attributes:
        inner: attention of all rows of the sequence, in ascending order, without an exchange.
        order: int64[N] on the device: places of those rows where ranks' rows follow each other.
        sizes: rows of each rank.
        group: the ranks.
        traffic: where bytes are counted.
    """

    inner: Plan
    order: Tensor
    sizes: tuple[int, ...]
    group: dist.ProcessGroup
    traffic: Traffic

    def attend(
        self,
        q_SQD: Tensor,
        k_SHD: Tensor,
        v_SHD: Tensor,
        scale: float,
        results: dict[int, Result] | None = None,
        layer: int = 0,
    ) -> Tensor:
        """See function.Plan.attend."""
        ranks, rows = len(self.sizes), len(q_SQD)
        q, k, v = (_dealt(x, ranks) for x in (q_SQD, k_SHD, v_SHD))
        heads = (q.shape[2], k.shape[2])
        packed = torch.cat((q, k, v), 2)
        arrived = _swap(packed.flatten(0, 1), [rows] * ranks, self.sizes, self)
        q_NQD, k_NHD, v_NHD = arrived[self.order].split((heads[0], heads[1], heads[1]), 1)
        out_NQD = self.inner.attend(q_NQD, k_NHD, v_NHD, scale, results, layer)
        out_AQD = out_NQD.new_zeros((len(arrived), *out_NQD.shape[1:]))
        out_AQD = out_AQD.index_copy(0, self.order, out_NQD)
        back = _swap(out_AQD, self.sizes, [rows] * ranks, self)
        return back.view(ranks, rows, *back.shape[1:]).transpose(0, 1).flatten(1, 2)


def _dealt(x_SHD: Tensor, ranks: int) -> Tensor:
    """[R, S, heads of a rank, D]; heads that several ranks need are repeated."""
    rows, heads, dim = x_SHD.shape
    copies = max(1, ranks // heads)
    wide = x_SHD[:, :, None].expand(rows, heads, copies, dim).reshape(rows, ranks, -1, dim)
    return wide.transpose(0, 1)


def _swap(rows: Tensor, send: Any, receive: Any, plan: HeadsPlan) -> Tensor:
    out: Tensor = _Swap.apply(rows, tuple(send), tuple(receive), plan)
    return out


class _Swap(torch.autograd.Function):
    """All-to-all of rows; its gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...], plan: HeadsPlan
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.plan = send, receive, plan
        return _swapped(rows, send, receive, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _swapped(grads[0], ctx.receive, ctx.send, ctx.plan), None, None, None


def _swapped(
    rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...], plan: HeadsPlan
) -> Tensor:
    pending, sent = all_to_all_uneven(rows, send, receive, plan.group)
    plan.traffic.bytes_sent += sent
    return pending.wait()
