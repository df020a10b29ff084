"""How far apart two models' logits are, what is allowed, and that in words."""

# Shapes: T tokens, V ids that both tables have.

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SAME = 1e-5  # with one table of angles; by default
OWN_ANGLES = 100  # times as much is allowed with transformers' own
MISTAKE = 1e-3  # what a weight in a wrong place changes at least, in tests of every family
AS_IT_IS_UNTIL = 16448  # positions beyond are not compared so
FREQUENCIES = 1e-6  # relative; transformers has them in float32


@dataclass(frozen=True)
class Row:
    """Tokens at consecutive positions, and how far the two models' logits are apart there.

    Distances are norms of the difference of a token's logits, relative to the rows' mean norm; of
    the worst token.

    Attributes:
        start: first position.
        tokens: how many.
        same: with one table of angles.
        as_it_is: with transformers' own angles.
        allowed: of `same`.
    """

    start: int
    tokens: int
    same: float
    as_it_is: float
    allowed: float = SAME

    @property
    def near(self) -> bool:
        """Whether transformers' own angles are good enough to be bounded."""
        return self.start + self.tokens <= AS_IT_IS_UNTIL

    @property
    def needed(self) -> float:
        """The least `allowed` with which they agree; infinite where a number is not finite."""
        own = self.as_it_is / OWN_ANGLES if self.near else 0.0
        return max(self.same, own) if math.isfinite(self.same + own) else math.inf

    @property
    def holds(self) -> bool:
        """Whether they agree."""
        return self.needed <= self.allowed

    def told(self) -> str:
        """In words."""
        return (
            f"positions {self.start} to {self.start + self.tokens - 1}: logits differ by at most "
            f"{self.same:.2e}, relative ({self.allowed:.0e} allowed); with transformers' float32 "
            f"angles {self.as_it_is:.2e}"
            + (f" ({OWN_ANGLES * self.allowed:.0e} allowed)" if self.near else "")
            + ("" if self.holds else ": NOT within what is allowed")
        )


@dataclass(frozen=True)
class Agreement:
    """What was compared.

    Attributes:
        rows: of tokens.
        frequencies: greatest relative difference of a rotary frequency.
    """

    rows: list[Row]
    frequencies: float

    @property
    def holds(self) -> bool:
        """Whether the two are one model."""
        same = self.frequencies <= FREQUENCIES
        return same and bool(self.rows) and all(row.holds for row in self.rows)

    def told(self) -> str:
        """In words."""
        first = (
            f"rotary frequencies differ by at most {self.frequencies:.2e}, relative "
            f"({FREQUENCIES:.0e} allowed)"
        )
        return "\n".join([first, *(row.told() for row in self.rows), self._verdict()])

    def _verdict(self) -> str:
        if self.holds:
            return "The two are the same model."
        needed = max((row.needed for row in self.rows), default=math.inf)
        if self.frequencies <= FREQUENCIES and needed < MISTAKE / 10:
            return (
                f"NOT shown to be the same model: a weight in a wrong place changes logits by "
                f"{MISTAKE:.0e} and more, but what is allowed is exceeded. Rounding alone can do "
                f"that in a deep model, where it grows from layer to layer; to allow it, give "
                f"--tolerance {10 ** math.ceil(math.log10(needed)):.0e}."
            )
        return "They are NOT the same model."


def distance(found_TV: Tensor, true_TV: Tensor) -> float:
    """Worst norm of a row of differences, relative to the mean norm of the true rows."""
    true, found = true_TV.double(), found_TV.double()
    error, norm = (found - true).norm(dim=1), true.norm(dim=1).mean()
    return float((error / norm).max()) if torch.isfinite(error).all() else float("nan")
