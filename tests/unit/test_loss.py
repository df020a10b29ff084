"""LossSum in Megatron's arithmetic: sums and counts are added, and divided once."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_bp.diffusion.loss import LossSum, report


def loss_sum(ce: Sequence[float], count: int | None = None) -> LossSum:
    """Cross-entropies of weight 1; the count is theirs unless told."""
    return LossSum(torch.tensor(ce).sum(), len(ce) if count is None else count)


def megatron(losses: Sequence[LossSum]) -> Tensor:
    """What Megatron makes of ranks and micro-batches (`calculate_per_token_loss`)."""
    totals, counts = zip(*(loss.for_megatron() for loss in losses), strict=True)
    return torch.stack(totals).sum() / torch.stack(counts).sum().clamp(min=1)


def reported(losses: Sequence[LossSum]) -> float:
    parts = [report(loss.total, loss.count) for loss in losses]
    total, count = torch.stack(parts).sum(dim=0).tolist()
    return total / max(1, count)


@pytest.mark.parametrize(
    ("parts", "loss"),
    [
        ([[1.0, 2.0, 3.0], []], 2.0),  # case 3: nothing supervised on one of two ranks
        ([[], []], 0.0),  # on neither: not NaN
        ([[1.0, 2.0, 3.0], [6.0]], 3.0),  # case 5: a mean of means would be 4
        ([[1.0] * 100] * 8, 1.0),
    ],
)
def test_parts_of_a_step_make_one_mean(parts: list[list[float]], loss: float) -> None:
    losses = [loss_sum(ce) for ce in parts]
    assert megatron(losses).item() == loss
    assert reported(losses) == loss


def test_the_gradient_of_parts_is_that_of_one_mean() -> None:
    leaf = torch.tensor([1.0, 2.0, 3.0, 6.0], requires_grad=True)
    megatron([LossSum(leaf[:3].sum(), 3), LossSum(leaf[3:].sum(), 1)]).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.25] * 4


def test_nothing_supervised_has_a_gradient_of_zero() -> None:
    leaf = torch.ones(3, requires_grad=True)
    megatron([LossSum((0.0 * leaf).sum(), 0)]).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0] * 3


def test_the_count_is_of_supervised_tokens_not_of_masked_ones() -> None:
    """Case 4: two of eight supervised tokens masked at p = 1/4, weight 4."""
    assert megatron([loss_sum([4.0, 4.0], count=8)]).item() == 1.0


def test_megatron_gets_the_sum_with_its_graph_and_an_integer_count() -> None:
    total = torch.tensor(5.0, requires_grad=True)
    same, count = LossSum(total, 7).for_megatron()
    assert same is total
    assert (count.dtype, count.shape, count.item()) == (torch.int, (), 7)


def test_the_report_is_float64_detached_and_exact() -> None:
    total = torch.tensor(5.0, requires_grad=True)
    told = report(total, 2**24 + 1)  # float32 would lose the 1
    assert not told.requires_grad
    assert told.dtype == torch.float64
    assert told.tolist() == [5.0, 2**24 + 1]
