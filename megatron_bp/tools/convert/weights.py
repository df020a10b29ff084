"""A weight of Megatron's from those of Hugging Face that it is made of, and back. Pure math."""

# Shapes: n query heads, g key heads (groups), D channels of a head, H hidden size.

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_bp.tools.convert.refused import ConvertError

Kind = Literal["copy", "qkv", "stack"]


@dataclass(frozen=True)
class Heads:
    """Heads of attention.

    Attributes:
        queries, groups: how many query heads, and key heads.
        channels: of a head.
    """

    queries: int
    groups: int
    channels: int

    def __post_init__(self) -> None:
        """Refuse heads that do not divide."""
        if self.queries % self.groups:
            raise ConvertError(
                f"{self.queries} query heads over {self.groups} key heads: they must divide"
            )


@dataclass(frozen=True)
class Weight:
    """One tensor of Megatron's model.

    Attributes:
        name: in Megatron's state dict (local spec).
        sources: names in the Hugging Face folder.
        kind: how it is made: a copy; q, k, v joined group by group; or one above the other.
    """

    name: str
    sources: tuple[str, ...]
    kind: Kind = "copy"


def joined(kind: Kind, parts: list[Tensor], heads: Heads) -> Tensor:
    """Megatron's tensor: for qkv [g (n/g + 2) D, ...], of each group its queries, key and value."""
    if kind == "copy":
        return parts[0]
    if kind == "stack":
        return torch.cat(parts)
    of_groups = [part.unflatten(0, (heads.groups, -1)) for part in parts]
    return torch.cat(of_groups, dim=1).flatten(0, 1)


def separated(kind: Kind, whole: Tensor, heads: Heads) -> list[Tensor]:
    """The Hugging Face tensors; the inverse of `joined`."""
    if kind == "copy":
        return [whole]
    if kind == "stack":
        return list(whole.chunk(2))
    rows = heads.queries // heads.groups * heads.channels
    of_groups = whole.unflatten(0, (heads.groups, -1))
    parts = of_groups.split([rows, heads.channels, heads.channels], dim=1)
    return [part.flatten(0, 1) for part in parts]
