"""Queries that grow with their position, so that attention stays sharp over long context.

Llama 4 and Ministral 3: 1 + beta log(1 + floor(position / length)), 1 within the first `length`
tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class QueryScale:
    """The scale's two numbers.

    Attributes:
        beta: see above.
        length: tokens; the context of the model before it was extended.
    """

    beta: float
    length: int

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if not self.beta > 0:
            raise ValueError(f"--query-scale-beta {self.beta}: must be above 0; or leave it out")
        if self.length < 1:
            raise ValueError(f"--query-scale-length {self.length}: must be at least 1")

    def at(self, positions: Tensor) -> Tensor:
        """float64 [S] of positions int64 [S], of clean and corrupted rows alike."""
        whole = torch.div(positions, self.length, rounding_mode="floor")
        return 1 + self.beta * torch.log1p(whole.to(torch.float64))
