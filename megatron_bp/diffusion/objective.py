"""Objective: what is corrupted, how much, and what each scored row weighs.

A frozen description, checked once; no tensors, no ranks. Sources: docs/objectives.md.
"""

from dataclasses import dataclass
from typing import Literal

Noise = Literal["absorbing", "uniform"]
NoisePer = Literal["block", "document"]
Schedule = Literal["linear", "cosine"]
Weighting = Literal["bound", "one", "inverse_p"]


@dataclass(frozen=True)
class Objective:
    """One training objective, as its parts.

    Attributes:
        mask_token_id: id that a corrupted token becomes under absorbing noise.
        vocabulary: ids 0 <= id < vocabulary are true; any above is Megatron's padding.
        seed: seed of all noise.
        noise: a corrupted token becomes the mask, or a uniformly random true id (maybe its own).
        noise_per: what shares a noise level t: a block or a document.
        schedule: probability of corruption: "linear" p = t, "cosine" p = 1 - cos(pi t / 2).
        interval: (a, b): training draws t from (a, b]; evaluation always from (0, 1].
        antithetic: spread the levels of a document's blocks evenly (needs noise_per "block").
        weighting: weight of a corrupted token: "bound" p'(t)/p(t) (the negative evidence lower
            bound; BD3-LM, arXiv 2503.09573), "one", or "inverse_p" 1/p(t).
        diffusion_weight, ar_weight: factors of the two loss terms in the total.
    """

    mask_token_id: int
    vocabulary: int
    seed: int
    noise: Noise = "absorbing"
    noise_per: NoisePer = "block"
    schedule: Schedule = "linear"
    interval: tuple[float, float] = (1e-3, 1.0)
    antithetic: bool = False
    weighting: Weighting = "bound"
    diffusion_weight: float = 1.0
    ar_weight: float = 0.0

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
        if self.antithetic and self.noise_per == "document":
            raise ValueError(
                "--antithetic spreads the levels of a document's blocks, and with --noise-per "
                "document there is only one; leave one of the two out"
            )
        for name, value in (("diffusion", self.diffusion_weight), ("ar", self.ar_weight)):
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"--{name}-loss-weight {value}: must be a number of at least 0")
        if self.diffusion_weight == 0.0 and self.ar_weight == 0.0:
            raise ValueError("--diffusion-loss-weight 0 and --ar-loss-weight 0: nothing is trained")

    @property
    def is_bound(self) -> bool:
        """Whether an evaluation's diffusion loss bounds the negative log-likelihood of the text.

        Evaluation draws t from (0, 1]; what is left to ask is a diffusion term with absorbing noise
        and its own weight.
        """
        absorbing = self.noise == "absorbing" and self.weighting == "bound"
        return absorbing and self.diffusion_weight > 0
