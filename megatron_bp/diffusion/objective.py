"""Objective: what is corrupted, how much, and what each scored row weighs.

A frozen description, checked once; no tensors, no ranks. Sources: docs/objectives.md.
"""

from dataclasses import dataclass
from typing import Literal

Noise = Literal["absorbing", "uniform"]
NoisePer = Literal["block", "document"]
Schedule = Literal["linear", "cosine"]
Weighting = Literal["bound", "one", "inverse_p"]
Alignment = Literal["same", "next"]
Scored = Literal["corrupted", "all"]
Count = Literal["supervised", "corrupted", "joint"]
ArScored = Literal["supervised", "all"]


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
        complementary: copies 2k and 2k + 1 share a draw, and the second corrupts exactly what the
            first left (Fast-dLLM v2, arXiv 2509.26328).
        never_corrupt: ids that are neither corrupted nor scored by the diffusion term.
        alignment: a corrupted row predicts its own token, or the one after it ("next").
        scored: the diffusion term scores corrupted tokens, or all supervised ones.
        count: what divides the diffusion sum: "supervised" tokens that can be scored (once for a
            complementary pair, else in each copy); "corrupted" ones of them; or "joint", these and
            the pairs of the next-token term together, which divide both terms.
        exclude_mask_logit: the diffusion term's softmax leaves the mask token out (the zero masking
            probability of SUBS; MDLM, arXiv 2406.07524).
        diffusion_weight, ar_weight: factors of the two loss terms in the total.
        ar_scored: the next-token term scores supervised tokens, or all ("all": prompts' too).
        self_conditioning: probability that a document is conditioned on a first pass.
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
    complementary: bool = False
    never_corrupt: tuple[int, ...] = ()
    alignment: Alignment = "same"
    scored: Scored = "corrupted"
    count: Count = "supervised"
    exclude_mask_logit: bool = False
    diffusion_weight: float = 1.0
    ar_weight: float = 0.0
    ar_scored: ArScored = "supervised"
    self_conditioning: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that make no objective, with the rule and the way out."""
        low, high = self.interval
        if not 0.0 <= low < high <= 1.0:
            raise ValueError(
                f"--noise-interval {low} {high}: must be 0 <= a < b <= 1; the default is 1e-3 1"
            )
        if high < 1e-6 and self.weighting != "one":
            raise ValueError(
                f"--noise-interval {low} {high}: with --loss-weighting {self.weighting} the weight "
                f"of a token is about 1/t, and beyond float32 for such t; raise the upper end"
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
        if self.complementary and self.weighting != "one":
            raise ValueError(
                f"--complementary-copies with --loss-weighting {self.weighting}: the second view "
                f"corrupts what the first left, so its weight is no function of t; use "
                f"--loss-weighting one"
            )
        if self.exclude_mask_logit and self.noise != "absorbing":
            raise ValueError(
                f"--exclude-mask-logit with --noise {self.noise}: no token is masked, and the mask "
                f"id may be a label like any other; leave it out"
            )
        if not 0.0 <= self.self_conditioning <= 1.0:
            raise ValueError(
                f"--self-conditioning {self.self_conditioning}: is a probability, from 0 to 1"
            )
        for token in self.never_corrupt:
            if not 0 <= token < self.vocabulary:
                raise ValueError(
                    f"--never-corrupt-ids {token}: must be ids of the true vocabulary, 0 to "
                    f"{self.vocabulary - 1}"
                )

    @property
    def is_bound(self) -> bool:
        """Whether an evaluation's diffusion loss bounds the negative log-likelihood of the text.

        Evaluation draws t from (0, 1]; what is left to ask is a diffusion term with absorbing noise
        and its own weight, in which every supervised token counts and is scored when corrupted: a
        document's first is not under "next".
        """
        return (
            self.noise == "absorbing"
            and self.weighting == "bound"
            and self.scored == "corrupted"
            and self.count == "supervised"
            and self.alignment == "same"
            and not self.never_corrupt
            and self.diffusion_weight > 0
        )
