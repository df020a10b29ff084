"""How loss terms become one loss: sums over the whole step, each divided by its own count.

Megatron divides a step's gradients once, by the sum of the integers that ranks and micro-batches
return. That sum is the count of one term, the reference; any other term is scaled beforehand by
N_ref / N. No mean is ever formed per rank or per micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TermScales:
    """What multiplies each term's sum, and whose count divides the step.

    Attributes:
        reference: indices of the terms whose counts, added up, Megatron divides by.
        scales: of each term: its factor x N_ref / N, or 0 where it counts nothing.
    """

    reference: tuple[int, ...]
    scales: tuple[float, ...]


def divisors(counts: Sequence[int], joint: Sequence[bool]) -> list[int]:
    """What divides each term's sum: its own count, or those of all joint terms together."""
    together = sum(n for n, shares in zip(counts, joint, strict=True) if shares)
    return [together if shares else n for n, shares in zip(counts, joint, strict=True)]


def term_scales(
    counts: Sequence[int], factors: Sequence[float], joint: Sequence[bool]
) -> TermScales:
    """The scales of terms with the given counts over the whole step.

    The total loss is sum_k factor_k * sum_k / N_k, N_k as in `divisors`; a term that counts nothing
    contributes 0. The counts of a single term need not be known: it is its own reference.
    """
    if len(counts) == 1:
        return TermScales((0,), (factors[0],))
    by = divisors(counts, joint)
    first = next((k for k, n in enumerate(by) if n > 0), 0)
    reference = tuple(k for k, shares in enumerate(joint) if shares) if joint[first] else (first,)
    return TermScales(
        reference,
        tuple(
            factor * by[first] / n if n > 0 else 0.0 for factor, n in zip(factors, by, strict=True)
        ),
    )


def row_scale(count: int, rows: int) -> float:
    """What multiplies a sum over a step's rows so that it ends up as the mean over them.

    Args:
        count: the reference count of the whole step, N_ref; Megatron divides by max(1, N_ref).
        rows: unique rows of the whole step; without any there is no sum either.
    """
    return max(1, count) / rows if rows else 0.0


@dataclass(frozen=True, eq=False)
class LossSum:
    """The loss of a micro-batch on this rank.

    Attributes:
        total: scalar with gradient, sum over terms of scale x weight x cross-entropy.
        count: this rank's share of the reference count.
    """

    total: Tensor
    count: int

    def for_megatron(self) -> tuple[Tensor, Tensor]:
        """(sum, integer count), as Megatron's schedules add them up (`calculate_per_token_loss`).

        Megatron divides the step's gradients by max(1, summed count), so a rank, a micro-batch or a
        step with nothing to score gives 0 and never NaN.
        """
        count = torch.tensor(self.count, dtype=torch.int, device=self.total.device)
        return self.total, count


def report(total: Tensor, count: int) -> Tensor:
    """float64[2]: (sum, count), detached, as Megatron's log line adds them up."""
    total = total.detach().to(torch.float64)
    return torch.stack([total, total.new_tensor(count)])
