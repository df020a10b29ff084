"""What an exchange of K/V is: rows of other ranks arrive, and their gradients go back.

An exchange belongs to one layout and says which rows arrive together; every layer opens a pass of
it. Arrival i + 1 is started before arrival i is computed on, so that it travels meanwhile: K/V of
two or three are in memory. The gradients of arrival i travel while those of arrival i + 1 are
computed, and are added up before the next are sent: those of one are under way.
"""

# Shapes: S rows of this rank, K rows of an arrival, H key heads, D head dimension.

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_bp.attention.parts import Held
from megatron_bp.parallel.collectives import Pending


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


class Return(ABC):
    """One pass of gradients back to the rows' owners. For i = 0, 1, ...: send(i); then settle()."""

    def __init__(self, dkv_S2HD: Tensor) -> None:
        """Add what other ranks owe this rank's rows to `dkv_S2HD`, in the accumulation dtype."""
        self.dkv = dkv_S2HD
        self._under_way: tuple[int, Pending] | None = None

    def send(self, i: int, dkv_K2HD: Tensor) -> None:
        """Start sending this rank's share of the gradients of arrival i."""
        self.settle()
        self._under_way = i, self.start(i, dkv_K2HD)

    def settle(self) -> None:
        """Wait for what is under way, and add it."""
        if self._under_way is not None:
            i, pending = self._under_way
            self._under_way = None
            self.add(i, pending.wait())

    @abstractmethod
    def start(self, i: int, dkv_K2HD: Tensor) -> Pending:
        """Start sending shares of arrival i, and getting what comes in return."""

    @abstractmethod
    def add(self, i: int, shares: Tensor) -> None:
        """Add what came, in rank order: the same sum at every run."""


class Exchange(Protocol):
    """The exchange of one layout. Collective: every rank of the group has equally many arrivals."""

    @property
    def held(self) -> tuple[Held, ...]:
        """The rows of each arrival, in the order in which they stand in it."""
        ...

    def fetch(self, k_SHD: Tensor, v_SHD: Tensor) -> Fetch:
        """A pass of K/V."""
        ...

    def returns(self, dkv_S2HD: Tensor, dtype: torch.dtype) -> Return:
        """A pass of gradients, of rows whose K/V are of `dtype`; see Return."""
        ...


class NoExchange:
    """A rank that shares nothing: no arrivals."""

    held: tuple[Held, ...] = ()

    def fetch(self, k_SHD: Tensor, v_SHD: Tensor) -> Fetch:
        """Never asked for."""
        raise AssertionError("nothing arrives")

    def returns(self, dkv_S2HD: Tensor, dtype: torch.dtype) -> Return:
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
