"""What an exchange of K/V is: rows of other ranks arrive, and their gradients go back.

An exchange belongs to one layout and says which rows arrive together; every layer opens a pass of
it. Arrival i + 1 is started before arrival i is computed on, so that it travels meanwhile: K/V of
two or three are in memory. Gradients of all that were sent wait for `collect`.
"""

# Shapes: S rows of this rank, K rows of an arrival, H key heads, D head dimension.

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_bp.attention.parts import Held


@dataclass
class Traffic:
    """What this rank has sent to others in a micro-batch, in all passes of all layers."""

    bytes_sent: int = 0


class Fetch(Protocol):
    """One pass of K/V. For i = 0, 1, ...: start(0), then wait(i), start(i + 1)."""

    def start(self, i: int) -> None:
        """Start arrival i; the one before has been waited for."""
        ...

    def wait(self, i: int) -> Tensor:
        """K|V of arrival i, [K, 2, H, D]."""
        ...


class Return(Protocol):
    """One pass of gradients back to the rows' owners."""

    def send(self, i: int, dkv_K2HD: Tensor) -> None:
        """Start sending this rank's share of the gradients of arrival i, in order of i."""
        ...

    def collect(self, dkv_S2HD: Tensor) -> None:
        """Add what other ranks owe this rank's rows, once all is there."""
        ...


class Exchange(Protocol):
    """The exchange of one layout. Collective: every rank of the group has equally many arrivals."""

    @property
    def held(self) -> tuple[Held, ...]:
        """The rows of each arrival, in the order in which they stand in it."""
        ...

    def fetch(self, k_SHD: Tensor, v_SHD: Tensor) -> Fetch:
        """A pass of K/V."""
        ...

    def returns(self, dtype: torch.dtype) -> Return:
        """A pass of gradients, of rows whose K/V are of `dtype`."""
        ...


class NoExchange:
    """A rank that shares nothing: no arrivals."""

    held: tuple[Held, ...] = ()

    def fetch(self, k_SHD: Tensor, v_SHD: Tensor) -> Fetch:
        """Never asked for."""
        raise AssertionError("nothing arrives")

    def returns(self, dtype: torch.dtype) -> Return:
        """Never asked for."""
        raise AssertionError("nothing arrives")


def packed(k_SHD: Tensor, v_SHD: Tensor, rows: slice | Tensor, size: int | None = None) -> Tensor:
    """K|V of some rows as one buffer [size, 2, H, D], zero where there are fewer rows."""
    k, v = k_SHD[rows], v_SHD[rows]
    buffer = k.new_zeros if size is not None and size > len(k) else k.new_empty
    out = buffer((len(k) if size is None else size, 2, *k.shape[1:]))
    out[: len(k), 0] = k
    out[: len(k), 1] = v
    return out
