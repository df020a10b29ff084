"""Inverse frequencies of rotary embeddings, in float64, with the scalings that long context uses.

RoFormer (arXiv 2104.09864); Llama 3 (arXiv 2407.21783, as its published code has it); YaRN (arXiv
2309.00071). Pure math.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Shapes: F frequencies, half of the channels that are turned.


@dataclass(frozen=True)
class Llama3:
    """Long waves are stretched by `factor`, short ones are not, those between in part.

    Attributes:
        factor: see above.
        length: context before the stretch, tokens.
        low, high: waves longer than length / low are long, shorter than length / high short.
    """

    factor: float = 8.0
    length: int = 8192
    low: float = 1.0
    high: float = 4.0

    def scaled(self, plain_F: Tensor, base: float) -> Tensor:
        """float64[F] from the plain ones."""
        turns = self.length * plain_F / (2 * math.pi)  # in the whole context
        short = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return torch.lerp(plain_F / self.factor, plain_F, short)


@dataclass(frozen=True)
class Yarn:
    """NTK by parts: a ramp over the channels, from unstretched to stretched by `factor`.

    Attributes:
        factor: see above.
        length: context before the stretch, tokens.
        fast, slow: waves that turn more often than `fast` times in it stay, fewer than `slow` times
            are stretched.
        rounded: the ramp's ends are whole channels.
    """

    factor: float
    length: int
    fast: float = 32.0
    slow: float = 1.0
    rounded: bool = True

    def scaled(self, plain_F: Tensor, base: float) -> Tensor:
        """float64[F] from the plain ones."""
        dim = 2 * len(plain_F)
        low, high = (
            dim * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.fast, self.slow)
        )
        if self.rounded:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        channel = torch.arange(len(plain_F), dtype=torch.float64, device=plain_F.device)
        stretched = ((channel - low) / (high - low)).clamp(0, 1)
        return torch.lerp(plain_F, plain_F / self.factor, stretched)


Scaling = Llama3 | Yarn


def inverse_frequencies(dim: int, base: float, scaling: Scaling | None = None) -> Tensor:
    """float64[F], radians a position.

    Args:
        dim: channels of a head that are turned, 2 F.
        base: of the plain ones: base ** (-2 i / dim).
        scaling: None for the plain ones.
    """
    # On the CPU, also where a model is built on the meta device.
    channel = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")
    plain_F = base ** -(channel / dim)
    return plain_F if scaling is None else scaling.scaled(plain_F, base)
