"""All-gather of K/V in chunks, and all-to-all of their gradients.

Passes of a layer and training step: K/V gathered for the forward, gathered again for the backward
(local K/V is what autograd keeps), and dK/dV sent to their owners, who add the shares in the
accumulation dtype. K and V travel packed. Only clean rows are ever sent, except in mode CP with
all_gather, where all rows are.
"""

# Shapes: R ranks, C rows of a chunk of the rank that sends most, K rows that arrive, S rows of this
# rank, H key heads, D head dimension.

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.attention.exchange.base import Return, Traffic, packed
from megatron_bp.attention.parts import Held
from megatron_bp.parallel.collectives import Pending, all_gather, all_to_all
from megatron_bp.sequence.plan import RankRows


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows that ranks gather at once: of rank r those of [start, stop) that it has.

    Attributes:
        start, stop: see above; the same for all ranks.
        order: int64[K] on the device: places in [R * C] of the others' rows as they stand in
            `held`; a slice where they stand there like that, and nothing has to be copied.
        held: those rows.
        sizes: rows of each rank.
    """

    start: int
    stop: int
    order: Tensor | slice
    held: Held
    sizes: tuple[int, ...]

    @property
    def rows(self) -> int:
        """C, rows of each rank's buffer."""
        return self.stop - self.start


def make_chunks(
    shards: tuple[RankRows, ...], rank: int, most: int | None, device: torch.device
) -> tuple[Chunk, ...]:
    """The chunks in which the group gathers what its ranks send; none if nobody sends.

    Args:
        shards: the rows of each rank.
        rank: this rank.
        most: rows that may arrive at once, of all ranks together; None for any number.
        device: of `Chunk.order`.
    """
    longest = max(shard.num_sent for shard in shards)
    if len(shards) == 1 or longest == 0:
        return ()
    count = 1 if most is None else -(-longest // max(1, most // len(shards)))
    size = -(-longest // count)
    starts = range(0, longest, size)
    return tuple(
        _chunk(shards, rank, start, min(start + size, longest), device) for start in starts
    )


def _chunk(
    shards: tuple[RankRows, ...], rank: int, start: int, stop: int, device: torch.device
) -> Chunk:
    clean: list[NDArray[Any]] = []
    corrupted: list[NDArray[Any]] = []
    clean_at: list[NDArray[Any]] = []
    corrupted_at: list[NDArray[Any]] = []
    for peer, shard in enumerate(shards):
        if peer == rank:
            continue
        sent = Held.sent_by(shard)
        begin = peer * (stop - start) - start  # of the peer's row 0, were it there
        of_clean = slice(start, min(stop, len(sent.clean)))
        clean.append(sent.clean[of_clean])
        clean_at.append(begin + np.arange(of_clean.start, of_clean.start + len(clean[-1])))
        before = len(sent.clean) + sent.gap
        first = max(start - before, 0)
        corrupted.append(sent.corrupted[first : max(stop - before, 0)])
        corrupted_at.append(begin + before + first + np.arange(len(corrupted[-1])))
    positions, places = np.concatenate(clean), np.concatenate(corrupted)
    by_position, by_place = np.argsort(positions), np.argsort(places)
    order = np.concatenate(
        [np.concatenate(clean_at)[by_position], np.concatenate(corrupted_at)[by_place]]
    )
    in_place = len(order) > 0 and bool((np.diff(order) == 1).all())
    return Chunk(
        start,
        stop,
        slice(order[0], order[-1] + 1) if in_place else torch.from_numpy(order).to(device),
        Held(positions[by_position], places[by_place]),
        tuple(min(max(shard.num_sent - start, 0), stop - start) for shard in shards),
    )


class GatherExchange:
    """All ranks of the group get all rows that are sent."""

    def __init__(
        self, group: dist.ProcessGroup, chunks: tuple[Chunk, ...], traffic: Traffic
    ) -> None:
        """Exchange `chunks` (see `make_chunks`) in `group`, counting in `traffic`."""
        self.group, self.chunks, self.traffic = group, chunks, traffic
        self.rank = int(group.rank())

    @property
    def held(self) -> tuple[Held, ...]:
        """See base.Exchange, as for the other two."""
        return tuple(chunk.held for chunk in self.chunks)

    def fetch(self, k_SHD: Tensor, v_SHD: Tensor) -> "GatherFetch":
        """A pass of K/V."""
        return GatherFetch(self.chunks, self.rank, self.gather, k_SHD, v_SHD)

    def returns(self, dkv_S2HD: Tensor, dtype: torch.dtype) -> "GatherReturn":
        """A pass of gradients; they travel in `dtype`."""
        return GatherReturn(self, dkv_S2HD, dtype)

    def gather(self, buffer_C2HD: Tensor) -> Pending:
        """Start gathering [R, C, 2, H, D]."""
        pending, sent = all_gather(buffer_C2HD, self.group)
        self.traffic.bytes_sent += sent
        return pending

    def scatter(self, shares_RC2HD: Tensor) -> Pending:
        """Start sending shares of gradients to their owners."""
        pending, sent = all_to_all(shares_RC2HD, self.group)
        self.traffic.bytes_sent += sent
        return pending


class GatherFetch:
    """See base.Fetch."""

    def __init__(
        self,
        chunks: tuple[Chunk, ...],
        rank: int,
        gather: Callable[[Tensor], Pending],
        k_SHD: Tensor,
        v_SHD: Tensor,
    ) -> None:
        """Fetch `chunks` on rank `rank`.

        Args:
            chunks: see `make_chunks`.
            rank: of the group.
            gather: starts gathering [R, C, 2, H, D] of a rank's [C, 2, H, D].
            k_SHD: keys of this rank's rows.
            v_SHD: values of this rank's rows.
        """
        self.chunks, self.rank, self.gather, self.k, self.v = chunks, rank, gather, k_SHD, v_SHD
        self.pending: dict[int, Pending] = {}

    def start(self, i: int) -> None:
        """Start gathering chunk i."""
        chunk = self.chunks[i]
        own = slice(chunk.start, chunk.start + chunk.sizes[self.rank])
        self.pending[i] = self.gather(packed(self.k, self.v, own, chunk.rows))

    def wait(self, i: int) -> Tensor:
        """[K, 2, H, D], the others' rows in ascending order."""
        return self.pending.pop(i).wait().flatten(0, 1)[self.chunks[i].order]


class GatherReturn(Return):
    """See base.Return."""

    def __init__(self, exchange: GatherExchange, dkv_S2HD: Tensor, dtype: torch.dtype) -> None:
        super().__init__(dkv_S2HD)
        self.exchange, self.dtype = exchange, dtype

    def start(self, i: int, dkv_K2HD: Tensor) -> Pending:
        """Of chunk i."""
        chunk = self.exchange.chunks[i]
        ranks = len(chunk.sizes)
        shares = dkv_K2HD.new_zeros((ranks * chunk.rows, *dkv_K2HD.shape[1:]), dtype=self.dtype)
        shares[chunk.order] = dkv_K2HD.to(self.dtype)
        return self.exchange.scatter(shares.unflatten(0, (ranks, chunk.rows)))

    def add(self, i: int, shares: Tensor) -> None:
        """[R, C, 2, H, D]."""
        chunk = self.exchange.chunks[i]
        own = chunk.sizes[self.exchange.rank]
        for rank, share in enumerate(shares):
            if rank != self.exchange.rank:
                self.dkv[chunk.start : chunk.start + own] += share[:own]
