"""Objective: what is corrupted, how much, and what each scored row weighs.

A frozen description, checked once; no tensors, no ranks.
"""

from dataclasses import dataclass
from typing import Literal

Weighting = Literal["bound", "one"]


@dataclass(frozen=True)
class Objective:
    """Absorbing block diffusion with a noise level per block and the linear schedule p(t) = t.

    Source: BD3-LM (Arriola et al., arXiv 2503.09573), equations 8 and 9.

    Attributes:
        mask_token_id: id that a corrupted token becomes.
        vocabulary: ids 0 <= id < vocabulary are true; any above is Megatron's padding.
        seed: seed of all noise.
        interval: (a, b), noise levels t of training lie in (a, b].
        weighting: weight of a corrupted token: "bound", p'(t)/p(t) = 1/t (negative evidence lower
            bound), or "one".
    """

    mask_token_id: int
    vocabulary: int
    seed: int
    interval: tuple[float, float] = (1e-3, 1.0)
    weighting: Weighting = "bound"

    def __post_init__(self) -> None:
        """Refuse values that make no objective, with the rule and the way out."""
        low, high = self.interval
        if not 0.0 <= low < high <= 1.0:
            raise ValueError(
                f"--noise-interval {low} {high}: must be 0 <= a < b <= 1; the default is 1e-3 1"
            )
        if not 0 <= self.mask_token_id < self.vocabulary:
            raise ValueError(
                f"--mask-token-id {self.mask_token_id}: must be an id of the true vocabulary, "
                f"0 to {self.vocabulary - 1}; add a mask token to the tokenizer or raise "
                f"--vocab-size"
            )

    @property
    def is_bound(self) -> bool:
        """Whether an evaluation's loss is a bound on the negative log-likelihood."""
        return self.weighting == "bound"
