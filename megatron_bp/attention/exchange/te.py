"""All-gather of K/V, and reduce-scatter of their gradients, by Transformer Engine's collectives.

For users whose Transformer Engine carries the traffic of all else. The rows and the bits that
arrive are those of all_gather. Gradients are reduced on their way, in the accumulation dtype:
in bf16 Transformer Engine would round after each addition. For bf16 that is twice the bytes of
all_gather's gradients, and the order of the sum is the backend's.
"""

# Shapes: R ranks, C rows of a chunk of the rank that sends most, K rows that arrive, S rows of this
# rank, H key heads, D head dimension.

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.attention.exchange.base import Return, Traffic
from megatron_bp.attention.exchange.gather import Chunk, GatherFetch
from megatron_bp.attention.parts import Held
from megatron_bp.parallel.collectives import Pending

MODULE = "transformer_engine.pytorch.distributed"


class Collectives(NamedTuple):
    """Transformer Engine's functions; each gives its result and a handle to wait for."""

    gather: Callable[..., Any]
    reduce_scatter: Callable[..., Any]


@functools.cache
def collectives() -> Collectives:
    """The two functions; call it at start-up too.

    Raises:
        ValueError: Transformer Engine is not installed, or its installation is not whole.
    """
    try:
        module = importlib.import_module(MODULE)
        return Collectives(module.gather_along_first_dim, module.reduce_scatter_along_first_dim)
    except Exception as error:  # a half installation gives RuntimeError, OSError, AssertionError
        told = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"--clean-kv-exchange te: {MODULE} does not import ({type(error).__name__}: {told}); "
            'install Transformer Engine (pip install "megatron-bp[te]"), or give '
            "--clean-kv-exchange all_gather, which moves the same rows"
        ) from error


class TeExchange:
    """As GatherExchange, by Transformer Engine's collectives."""

    def __init__(
        self, group: dist.ProcessGroup, chunks: tuple[Chunk, ...], traffic: Traffic
    ) -> None:
        """Exchange `chunks` (see `gather.make_chunks`) in `group`, counting in `traffic`.

        Raises:
            ValueError: see `collectives`.
        """
        self.group, self.chunks, self.traffic = group, chunks, traffic
        self.rank = int(group.rank())
        self.by = collectives()

    @property
    def held(self) -> tuple[Held, ...]:
        """See base.Exchange, as for the other two."""
        return tuple(chunk.held for chunk in self.chunks)

    def fetch(self, k_SHD: Tensor, v_SHD: Tensor) -> GatherFetch:
        """A pass of K/V."""
        return GatherFetch(self.chunks, self.rank, self.gather, k_SHD, v_SHD)

    def returns(self, dkv_S2HD: Tensor, dtype: torch.dtype) -> "TeReturn":
        """A pass of gradients; they travel as they come, in the accumulation dtype."""
        return TeReturn(self, dkv_S2HD)

    def gather(self, buffer_C2HD: Tensor) -> Pending:
        """Start gathering [R, C, 2, H, D]."""
        ranks = self.group.size()
        every, work = self.by.gather(buffer_C2HD, self.group, async_op=True)
        self.traffic.bytes_sent += (ranks - 1) * buffer_C2HD.nbytes
        return Pending(every.view(ranks, *buffer_C2HD.shape), [work], buffer_C2HD)

    def reduce(self, shares_N2HD: Tensor) -> Pending:
        """Start adding up the ranks' [R * C, 2, H, D]; this rank gets its C rows of the sum."""
        ranks = self.group.size()
        own = shares_N2HD.new_empty((len(shares_N2HD) // ranks, *shares_N2HD.shape[1:]))
        # Without `output` it would allocate on CUDA.
        result, work = self.by.reduce_scatter(shares_N2HD, self.group, async_op=True, output=own)
        self.traffic.bytes_sent += (ranks - 1) * own.nbytes
        return Pending(result, [work], shares_N2HD)


class TeReturn(Return):
    """See base.Return."""

    def __init__(self, exchange: TeExchange, dkv_S2HD: Tensor) -> None:
        super().__init__(dkv_S2HD)
        self.exchange = exchange

    def start(self, i: int, dkv_K2HD: Tensor) -> Pending:
        """Of chunk i; this rank owes its own rows nothing."""
        chunk = self.exchange.chunks[i]
        shares = dkv_K2HD.new_zeros((len(chunk.sizes) * chunk.rows, *dkv_K2HD.shape[1:]))
        shares[chunk.order] = dkv_K2HD
        return self.exchange.reduce(shares)

    def add(self, i: int, shares: Tensor) -> None:
        """[C, 2, H, D], the sum of the others'."""
        chunk = self.exchange.chunks[i]
        own = chunk.sizes[self.exchange.rank]
        self.dkv[chunk.start : chunk.start + own] += shares[:own]
