"""Attention of this rank's rows over all they see, as one autograd function.

It owns the parts, their merge and the exchange of K/V, so that communication overlaps with
the parts that need no remote keys. It sees no model, no block and no document.
"""

# Shapes: S rows, Q query heads, H key heads, D head dimension, K keys of a buffer.

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_bp.attention.exchange.base import Exchange
from megatron_bp.attention.kernels.contract import Kernel, accumulation_dtype
from megatron_bp.attention.parts import Part, View


class Result(NamedTuple):
    """What attention made of a layer's rows: the output and the log-sum-exp of the scores."""

    out: Tensor  # [S, Q, D]
    lse: Tensor  # [S, Q]


@dataclass(frozen=True, eq=False)
class Plan:
    """How the rows of one layout attend.

    Attributes:
        view: which rows see which keys.
        exchange: how the keys of other ranks come.
        kernel: computes the parts.
        keep_gathered: keys that came for the forward are kept for the backward, not fetched again.
    """

    view: View
    exchange: Exchange
    kernel: Kernel
    keep_gathered: bool = False

    def attend(
        self,
        q_SQD: Tensor,
        k_SHD: Tensor,
        v_SHD: Tensor,
        scale: float,
        results: dict[int, Result] | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Softmax attention [S, Q, D] of each row over the keys that its visibility names.

        A row that sees nothing gives 0. Differentiable in q, k and v, including the share that rows
        on other ranks get of the gradient.

        Args:
            q_SQD: of this rank's rows, rotary applied, as are the next two.
            k_SHD: see there.
            v_SHD: see there.
            scale: of the scores.
            results: of layers that will be recomputed: filled by a forward without gradients, and
                taken from by the forward inside a backward, which then computes nothing.
            layer: key in `results`.
        """
        given = None
        if results is not None and _in_backward():
            given = results.pop(layer)
        elif results is not None and not torch.is_grad_enabled():
            out_SQD, lse_SQ, _ = _forward(q_SQD, k_SHD, v_SHD, self, scale, False)
            results[layer] = Result(out_SQD, lse_SQ)
            return out_SQD
        out: Tensor = _Attend.apply(q_SQD, k_SHD, v_SHD, self, scale, given)
        return out


def _in_backward() -> bool:
    """Whether autograd is at work: a forward is then a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def _forward(
    q_SQD: Tensor, k_SHD: Tensor, v_SHD: Tensor, plan: Plan, scale: float, keep: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(out, lse, K|V of each arrival if they are to be kept)."""
    dtype = accumulation_dtype(q_SQD.dtype)
    out_SQD = torch.zeros_like(q_SQD, dtype=dtype)
    lse_SQ = q_SQD.new_full(q_SQD.shape[:2], -torch.inf, dtype=dtype)

    def add(part: Part, k_KHD: Tensor, v_KHD: Tensor) -> None:
        # A slice gives views, which the kernel writes to; an index copies, to be put back.
        rows, keys = part.rows, part.keys
        out, lse = out_SQD[rows], lse_SQ[rows]
        plan.kernel.forward(q_SQD[rows], k_KHD[keys], v_KHD[keys], part.spec, scale, out, lse)
        if not isinstance(rows, slice):
            out_SQD[rows], lse_SQ[rows] = out, lse

    fetched = _fetched(plan, k_SHD, v_SHD)
    next(fetched)  # the first arrival is on its way
    for part in (*plan.view.corrupted, *plan.view.clean):
        add(part, k_SHD, v_SHD)
    kept: list[Tensor] = []
    for parts, kv_K2HD in zip(plan.view.arrivals, fetched, strict=True):
        for part in parts:
            add(part, kv_K2HD[:, 0], kv_K2HD[:, 1])
        if keep:
            kept.append(kv_K2HD)
    return out_SQD.to(q_SQD.dtype), lse_SQ, kept


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SQD: Tensor,
        k_SHD: Tensor,
        v_SHD: Tensor,
        plan: Plan,
        scale: float,
        given: Result | None,
    ) -> Tensor:
        kept: list[Tensor] = []
        if given is not None:
            out_SQD, lse_SQ = given
        else:
            # The backward of a recomputation follows at once, so what was fetched is kept for it
            # and not fetched a third time.
            keep = plan.keep_gathered or _in_backward()
            out_SQD, lse_SQ, kept = _forward(q_SQD, k_SHD, v_SHD, plan, scale, keep)
        ctx.plan, ctx.scale = plan, scale
        ctx.save_for_backward(q_SQD, k_SHD, v_SHD, out_SQD, lse_SQ, *kept)
        return out_SQD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_SQD, k_SHD, v_SHD, out_SQD, lse_SQ, *kept = ctx.saved_tensors
        plan: Plan = ctx.plan
        (dout_SQD,) = grads
        dq_SQD = torch.zeros_like(q_SQD, dtype=lse_SQ.dtype)
        dkv_S2HD = k_SHD.new_zeros((len(k_SHD), 2, *k_SHD.shape[1:]), dtype=lse_SQ.dtype)

        def add(part: Part, k_KHD: Tensor, v_KHD: Tensor, dkv_K2HD: Tensor) -> None:
            rows, keys = part.rows, part.keys
            dq = dq_SQD[rows]
            plan.kernel.backward(
                dout_SQD[rows],
                q_SQD[rows],
                k_KHD[keys],
                v_KHD[keys],
                out_SQD[rows],
                lse_SQ[rows],
                part.spec,
                ctx.scale,
                dq,
                dkv_K2HD[keys, 0],
                dkv_K2HD[keys, 1],
            )
            if not isinstance(rows, slice):
                dq_SQD[rows] = dq

        # Own corrupted keys first, while K/V arrive; then remote keys, whose gradients travel while
        # the next ones and the own clean keys are done.
        fetched = _fetched(plan, k_SHD, v_SHD) if not kept else None
        if fetched is not None:
            next(fetched)
        for part in plan.view.corrupted:
            add(part, k_SHD, v_SHD, dkv_S2HD)
        remote = len(plan.view.arrivals) > 0
        returns = plan.exchange.returns(dkv_S2HD, k_SHD.dtype) if remote else None
        for i, parts in enumerate(plan.view.arrivals):
            assert returns is not None
            kv_K2HD = kept[i] if fetched is None else next(fetched)
            dkv_K2HD = torch.zeros_like(kv_K2HD, dtype=lse_SQ.dtype)
            for part in parts:
                add(part, kv_K2HD[:, 0], kv_K2HD[:, 1], dkv_K2HD)
            returns.send(i, dkv_K2HD)
        for part in plan.view.clean:
            add(part, k_SHD, v_SHD, dkv_S2HD)
        if returns is not None:
            returns.settle()
        dk_SHD, dv_SHD = dkv_S2HD.to(k_SHD.dtype).unbind(1)
        return dq_SQD.to(q_SQD.dtype), dk_SHD, dv_SHD, None, None, None


def _fetched(plan: Plan, k_SHD: Tensor, v_SHD: Tensor) -> Iterator[Tensor]:
    """First an empty tensor, when the first arrival has started; then K|V of each arrival.

    The next one is started before this one is handed out.
    """
    arrivals = len(plan.view.arrivals)
    if not arrivals:
        yield k_SHD[:0]
        return
    fetch = plan.exchange.fetch(k_SHD, v_SHD)
    fetch.start(0)
    yield k_SHD[:0]
    for i in range(arrivals):
        kv_K2HD = fetch.wait(i)
        if i + 1 < arrivals:
            fetch.start(i + 1)
        yield kv_K2HD
