"""The loss head: cross-entropy of the rows that carry a loss, and logits of no others.

Logits are made in chunks of rows and never kept: each chunk's gradient is formed at once (as in
Liger Kernel, arXiv 2410.10989), so the peak is one chunk whatever the number of rows. Ids above the
true vocabulary, which Megatron pads to a multiple of 128 x TP, take no part in the softmax.
"""

# Shapes: R scored rows (r in a chunk), H hidden size, P padded vocabulary, V true vocabulary.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_bp.batch.shard import LocalTerm

CHUNK_LOGITS = 1 << 25  # logits a chunk may hold: 128 MiB in float32


@dataclass(frozen=True, eq=False)
class Scored:
    """Which rows are scored, on what, with what weight; a row may be scored by several terms.

    Attributes:
        rows: int64[R], rows of this rank.
        labels: int64[R], true id each predicts.
        weights: float32[R], of its cross-entropy in its term's sum.
        scale: float32[R], of its term in the total.
        term: int64[R], which term scores it.
    """

    rows: Tensor
    labels: Tensor
    weights: Tensor
    scale: Tensor
    term: Tensor

    def to(self, device: torch.device) -> "Scored":
        """The same on a device."""
        columns = (self.rows, self.labels, self.weights, self.scale, self.term)
        return Scored(*(column.to(device, non_blocking=True) for column in columns))


def scored_rows(terms: Sequence[LocalTerm], scales: Sequence[float]) -> Scored:
    """The rows of non-zero weight of all terms, one term after the other.

    Args:
        terms: this rank's terms.
        scales: factor of each in the total, what its count has to do with it included.
    """
    rows = [torch.nonzero(term.weights).flatten() for term in terms]
    sizes = torch.tensor([len(r) for r in rows])
    return Scored(
        rows=torch.cat(rows),
        labels=torch.cat([term.labels[r] for term, r in zip(terms, rows, strict=True)]),
        weights=torch.cat([term.weights[r] for term, r in zip(terms, rows, strict=True)]),
        scale=torch.tensor(scales, dtype=torch.float32).repeat_interleave(sizes),
        term=torch.arange(len(terms)).repeat_interleave(sizes),
    )


class LossHead:
    """GPTModel's `output_processor` for one micro-batch.

    Attributes:
        scored: the scored rows, on the device of the hidden states.
        vocabulary: number of true ids.
        cross_entropy: float[R] after the forward, detached: of each scored row.
    """

    def __init__(self, scored: Scored, vocabulary: int) -> None:
        self.scored = scored
        self.vocabulary = vocabulary
        self.cross_entropy: Tensor | None = None

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
            hidden_states: [S, 1, H].
            output_layer: holds the output weight [P, H] unless it is tied.
            output_weight: the tied embedding, or None.
            unused: what else GPTModel offers.
        """
        weight = output_weight if output_weight is not None else output_layer.weight
        assert isinstance(weight, Tensor)
        scored = self.scored
        hidden_RH = hidden_states[:, 0].index_select(0, scored.rows)
        total, self.cross_entropy = weighted_cross_entropy(
            hidden_RH, weight, scored.labels, scored.weights * scored.scale, self.vocabulary
        )
        return total


def weighted_cross_entropy(
    hidden_RH: Tensor,
    weight_PH: Tensor,
    labels_R: Tensor,
    weights_R: Tensor,
    vocabulary: int,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, Tensor]:
    """The weighted sum, and what it sums.

    ce_r = -log softmax(hidden_r weight[:vocabulary]^T)[labels_r]; the first is the scalar
    sum_r weights_r ce_r, differentiable, the second ce [R], detached. In float32 (float64 for
    float64 inputs). R may be 0: the sum is 0, still differentiable.
    """
    with_grad = torch.is_grad_enabled()
    total, cross_entropy_R = _WeightedCrossEntropy.apply(
        hidden_RH, weight_PH, labels_R, weights_R, vocabulary, chunk_logits, with_grad
    )
    return total, cross_entropy_R


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_PH: Tensor,
        labels_R: Tensor,
        weights_R: Tensor,
        vocabulary: int,
        chunk_logits: int,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden_RH.dtype == torch.float64 else torch.float32
        weight_VH = weight_PH[:vocabulary]
        cross_entropy_R = hidden_RH.new_empty(len(hidden_RH), dtype=wide)
        dhidden_RH = torch.empty_like(hidden_RH) if with_grad else None
        dweight_PH = torch.zeros_like(weight_PH, dtype=wide) if with_grad else None
        step = max(1, chunk_logits // vocabulary)
        for first in range(0, len(hidden_RH), step):
            rows = slice(first, first + step)
            hidden_rH, labels_r1 = hidden_RH[rows], labels_R[rows, None]
            factor_r1 = weights_R[rows, None].to(wide)
            logits_rV = (hidden_rH @ weight_VH.mT).to(wide)
            lse_r1 = torch.logsumexp(logits_rV, -1, keepdim=True)
            cross_entropy_R[rows] = (lse_r1 - logits_rV.gather(1, labels_r1))[:, 0]
            if dhidden_RH is None or dweight_PH is None:
                continue
            dlogits_rV = logits_rV.sub_(lse_r1).exp_()
            dlogits_rV.scatter_add_(1, labels_r1, torch.full_like(factor_r1, -1.0))
            dlogits_rV = dlogits_rV.mul_(factor_r1).to(hidden_RH.dtype)
            dhidden_RH[rows] = dlogits_rV @ weight_VH
            if dweight_PH.dtype == hidden_RH.dtype:
                dweight_PH[:vocabulary].addmm_(dlogits_rV.mT, hidden_rH)
            else:
                dweight_PH[:vocabulary] += dlogits_rV.mT @ hidden_rH
        if dhidden_RH is not None and dweight_PH is not None:
            ctx.save_for_backward(dhidden_RH, dweight_PH.to(weight_PH.dtype))
        ctx.mark_non_differentiable(cross_entropy_R)
        total = (weights_R.to(torch.float64) * cross_entropy_R).sum().to(wide)
        return total, cross_entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_RH, dweight_PH = ctx.saved_tensors
        scale = grads[0]
        return (
            dhidden_RH * scale.to(dhidden_RH.dtype),
            dweight_PH * scale.to(dweight_PH.dtype),
            None,
            None,
            None,
            None,
            None,
        )
