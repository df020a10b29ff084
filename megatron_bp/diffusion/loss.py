"""The loss that is told: a sum and the count that divides it.

No mean is ever formed per rank or per micro-batch: sums and counts are added over the whole step
and divided once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LossSum:
    """One loss term on this rank.

    Attributes:
        total: float32 scalar with gradient, sum of weight x cross-entropy over this rank's rows.
        count: this rank's share of the count that divides the whole step's sum.
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

    def for_report(self) -> Tensor:
        """float64[2]: (sum, count), detached."""
        total = self.total.detach().to(torch.float64)
        return torch.stack([total, total.new_tensor(self.count)])
