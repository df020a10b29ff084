"""The loss head: cross-entropy of the rows that carry a loss, and logits of no others.

Logits are made in chunks of rows and never kept: each chunk's gradient is formed at once (as in
Liger Kernel, arXiv 2410.10989), so the peak is one chunk whatever the number of rows. Ids above the
true vocabulary, which Megatron pads to a multiple of 128 x TP, take no part in the softmax,
wherever among the TP ranks they fall; nor does the mask token in rows that leave it out (the zero
masking probability of SUBS; MDLM, arXiv 2406.07524).

With tensor parallelism each rank has the logits of its ids; one small gather a chunk makes the
softmax whole. A rank's gradient of the hidden rows is then its ids' share, added up over the TP
ranks once, at the end: all-reduced, or reduce-scattered where rows are sequence-parallel.
"""

# Shapes: R scored rows (r in a chunk), H hidden size, p this rank's padded ids, v its true ones.

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_bp.batch.shard import LocalTerm
from megatron_bp.model.chunks import CHUNK_LOGITS
from megatron_bp.parallel.collectives import all_gather


@dataclass(frozen=True, eq=False)
class Scored:
    """Which rows are scored, on what, with what weight; a row may be scored by several terms.

    Attributes:
        rows: int64[R], rows of this rank.
        labels: int64[R], true id each predicts.
        weights: float32[R], of its cross-entropy in its term's sum.
        scale: float32[R], of its term in the total.
        term: int64[R], which term scores it.
        without_mask: bool[R], whether the mask token may be left out of its softmax: the diffusion
            term's rows.
    """

    rows: Tensor
    labels: Tensor
    weights: Tensor
    scale: Tensor
    term: Tensor
    without_mask: Tensor

    def to(self, device: torch.device) -> "Scored":
        """The same on a device."""
        columns = (getattr(self, field.name) for field in fields(self))
        return Scored(*(column.to(device, non_blocking=True) for column in columns))


def scored_rows(terms: Sequence[LocalTerm], scales: Sequence[float]) -> Scored:
    """The rows of non-zero weight of all terms, one term after the other.

    Args:
        terms: this rank's terms.
        scales: factor of each in the total, what its count has to do with it included.
    """
    rows = [torch.nonzero(term.weights).flatten() for term in terms]
    sizes = torch.tensor([len(r) for r in rows])
    diffusion = torch.tensor([term.name == "diffusion" for term in terms])
    return Scored(
        rows=torch.cat(rows),
        labels=torch.cat([term.labels[r] for term, r in zip(terms, rows, strict=True)]),
        weights=torch.cat([term.weights[r] for term, r in zip(terms, rows, strict=True)]),
        scale=torch.tensor(scales, dtype=torch.float32).repeat_interleave(sizes),
        term=torch.arange(len(terms)).repeat_interleave(sizes),
        without_mask=diffusion.repeat_interleave(sizes),
    )


class LossHead:
    """GPTModel's `output_processor` for one micro-batch.

    Attributes:
        scored: the scored rows, on the device of the hidden states.
        vocabulary: number of true ids.
        cross_entropy: float[R] after the forward, detached: of each scored row.
    """

    def __init__(
        self,
        scored: Scored,
        vocabulary: int,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        excluded_id: int | None = None,
    ) -> None:
        """Set up for one micro-batch.

        Args:
            scored: the scored rows, counted before sequence parallelism cuts them.
            vocabulary: number of true ids.
            group: the ranks that share the output weight (TP); None for one.
            sequence_parallel: each of them has a slice of the hidden states.
            excluded_id: the mask token's id, which rows `without_mask` leave out; None: none does.
        """
        self.scored = scored
        self.vocabulary = vocabulary
        self.cross_entropy: Tensor | None = None
        self._group = group if group is not None and group.size() > 1 else None
        self._sequence_parallel = sequence_parallel
        self._excluded_id = excluded_id

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: torch.nn.Module,
        output_weight: Tensor | None,
        **unused: Any,
    ) -> Tensor:
        """Sum of scale x weight x cross-entropy over the scored rows.

        Args:
            hidden_states: [S, 1, H], or [S / TP, 1, H] under sequence parallelism.
            output_layer: holds this rank's output weight [p, H] unless it is tied.
            output_weight: the tied embedding, or None.
            unused: what else GPTModel offers.
        """
        weight = output_weight if output_weight is not None else output_layer.weight
        assert isinstance(weight, Tensor)
        scored = self.scored
        excluded = None
        if self._excluded_id is not None:
            excluded = Excluded(self._excluded_id, scored.without_mask)
        total, self.cross_entropy = weighted_cross_entropy(
            pick_rows(hidden_states, scored.rows, self._group, self._sequence_parallel),
            weight,
            scored.labels,
            scored.weights * scored.scale,
            self.vocabulary,
            group=self._group,
            excluded=excluded,
        )
        return total


def pick_rows(
    hidden_states: Tensor,
    rows: Tensor,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
) -> Tensor:
    """Rows [R, H] of hidden states [S, 1, H], or [S / TP, 1, H] under sequence parallelism.

    Alike on all ranks of `group` (TP, None for one rank), over which their gradient is added up on
    its way back.
    """
    if group is None:
        return hidden_states[:, 0].index_select(0, rows)
    if sequence_parallel:
        whole = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=True, group=group
        )
        picked: Tensor = whole[:, 0].index_select(0, rows)
        return picked
    picked = hidden_states[:, 0].index_select(0, rows)
    copied: Tensor = copy_to_tensor_model_parallel_region(picked, group=group)
    return copied


@dataclass(frozen=True, eq=False)
class Excluded:
    """An id whose logit is -inf in some rows, none of which it is the label of.

    Attributes:
        token: the id.
        rows: bool[R], in which rows.
    """

    token: int
    rows: Tensor


def weighted_cross_entropy(
    hidden_RH: Tensor,
    weight_pH: Tensor,
    labels_R: Tensor,
    weights_R: Tensor,
    vocabulary: int,
    chunk_logits: int = CHUNK_LOGITS,
    group: dist.ProcessGroup | None = None,
    excluded: Excluded | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted sum, and what it sums.

    ce_r = -log softmax(hidden_r weight[:vocabulary]^T)[labels_r]; the first is the scalar
    sum_r weights_r ce_r, differentiable, the second ce [R], detached. In float32 (float64 for
    float64 inputs). R may be 0: the sum is 0, still differentiable.

    With `group`, rank k of it holds the rows [k p, (k + 1) p) of the weight. Both results are
    whole and alike on all; the gradient of `hidden_RH` is this rank's share, which the caller adds
    up. With `excluded`, the softmax of its rows leaves its id out.
    """
    with_grad = torch.is_grad_enabled()
    total, cross_entropy_R = _WeightedCrossEntropy.apply(
        hidden_RH,
        weight_pH,
        labels_R,
        weights_R,
        vocabulary,
        chunk_logits,
        group,
        excluded,
        with_grad,
    )
    return total, cross_entropy_R


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_pH: Tensor,
        labels_R: Tensor,
        weights_R: Tensor,
        vocabulary: int,
        chunk_logits: int,
        group: dist.ProcessGroup | None,
        excluded: Excluded | None,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden_RH.dtype == torch.float64 else torch.float32
        first_id = 0 if group is None else group.rank() * len(weight_pH)
        true_ids = min(max(vocabulary - first_id, 0), len(weight_pH))
        weight_vH = weight_pH[:true_ids]
        cross_entropy_R = hidden_RH.new_empty(len(hidden_RH), dtype=wide)
        dhidden_RH = torch.empty_like(hidden_RH) if with_grad else None
        dweight_pH = torch.zeros_like(weight_pH, dtype=wide) if with_grad else None
        step = max(1, chunk_logits // min(vocabulary, len(weight_pH)))  # the same on all ranks
        for first in range(0, len(hidden_RH), step):
            rows = slice(first, first + step)
            hidden_rH, labels_r1 = hidden_RH[rows], labels_R[rows, None] - first_id
            factor_r1 = weights_R[rows, None].to(wide)
            logits_rv = (hidden_rH @ weight_vH.mT).to(wide)
            if excluded is not None and 0 <= excluded.token - first_id < true_ids:
                column_r = logits_rv[:, excluded.token - first_id]
                column_r.masked_fill_(excluded.rows[rows], -torch.inf)
            lse_r1 = torch.logsumexp(logits_rv, -1, keepdim=True)
            label_logit_r1, here_r1 = _logit_of_label(logits_rv, labels_r1)
            if group is not None:
                lse_r1, label_logit_r1 = _whole_softmax(lse_r1, label_logit_r1, group)
            cross_entropy_R[rows] = (lse_r1 - label_logit_r1)[:, 0]
            if dhidden_RH is None or dweight_pH is None:
                continue
            dlogits_rv = logits_rv.sub_(lse_r1).exp_()
            if true_ids > 0:
                labels_r1 = labels_r1.clamp(0, true_ids - 1)
                dlogits_rv.scatter_add_(1, labels_r1, -here_r1.to(wide))
            dlogits_rv = dlogits_rv.mul_(factor_r1).to(hidden_RH.dtype)
            dhidden_RH[rows] = dlogits_rv @ weight_vH
            if dweight_pH.dtype == hidden_RH.dtype:
                dweight_pH[:true_ids].addmm_(dlogits_rv.mT, hidden_rH)
            else:
                dweight_pH[:true_ids] += dlogits_rv.mT @ hidden_rH
        if dhidden_RH is not None and dweight_pH is not None:
            ctx.save_for_backward(dhidden_RH, dweight_pH.to(weight_pH.dtype))
        ctx.mark_non_differentiable(cross_entropy_R)
        total = (weights_R.to(torch.float64) * cross_entropy_R).sum().to(wide)
        return total, cross_entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_RH, dweight_pH = ctx.saved_tensors
        scale = grads[0]
        nothing = (None,) * 7
        return (
            dhidden_RH * scale.to(dhidden_RH.dtype),
            dweight_pH * scale.to(dweight_pH.dtype),
            *nothing,
        )


def _logit_of_label(logits_rv: Tensor, labels_r1: Tensor) -> tuple[Tensor, Tensor]:
    """[r, 1]: the label's logit where this rank has its id, else 0; and whether it has."""
    ids = logits_rv.shape[1]
    here_r1 = (labels_r1 >= 0) & (labels_r1 < ids)
    if ids == 0:
        return logits_rv.new_zeros(labels_r1.shape), here_r1
    logit_r1 = logits_rv.gather(1, labels_r1.clamp(0, ids - 1))
    return torch.where(here_r1, logit_r1, 0.0), here_r1


def _whole_softmax(
    lse_r1: Tensor, label_logit_r1: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Both over the ids of all ranks, in rank order: the same bits on each."""
    pending, _ = all_gather(torch.cat([lse_r1, label_logit_r1], dim=1), group)
    every_kr2 = pending.wait()
    lse_r = torch.logsumexp(every_kr2[:, :, 0], 0)
    return lse_r[:, None], every_kr2[:, :, 1].sum(0)[:, None]
