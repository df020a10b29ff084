"""Each rank gets the rows that its own rows see, and no others: all-to-all of uneven sizes.

Much less than an all-gather where rows see little of the sequence: sliding windows (halos), packed
documents. What is sent follows from the plan, so all ranks know it without asking.
"""

# Shapes: K rows that arrive, s rows sent, S rows of this rank, H key heads, D head dimension.

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.attention.exchange.base import Return, Traffic, packed
from megatron_bp.attention.parts import Held
from megatron_bp.parallel.collectives import Pending, all_to_all_uneven
from megatron_bp.sequence.plan import RankRows


@dataclass(frozen=True, eq=False)
class Delivery:
    """Clean rows that ranks send each other at once.

    Attributes:
        send: int64[s] on the device: which of this rank's rows, rank after rank that gets them.
        send_sizes: how many each rank gets.
        order: int64[K] on the device: places among what arrives, which comes rank after rank, of
            the rows as they stand in `held`.
        sizes: how many come of each rank.
        held: the rows that arrive, ascending.
    """

    send: Tensor
    send_sizes: tuple[int, ...]
    order: Tensor
    sizes: tuple[int, ...]
    held: Held


def rows_to_send(
    shards: tuple[RankRows, ...], lacked: tuple[NDArray[np.int32], ...]
) -> NDArray[np.int64]:
    """int64[R, R]: how many rows rank i sends rank j.

    Args:
        shards: the rows of each rank.
        lacked: the clean positions that each rank sees and does not hold, ascending.
    """
    # Run by run: a shard is a few runs of positions, and thousands of rows.
    rank = np.repeat(np.arange(len(shards)), [len(shard.clean) for shard in shards])
    clean = np.concatenate([shard.clean for shard in shards])
    cut = np.flatnonzero((np.diff(clean) != 1) | (np.diff(rank) != 0)) + 1
    first, last = np.append(0, cut)[: len(clean)], np.append(cut, len(clean))[: len(clean)] - 1
    each = np.zeros((len(shards), len(shards)), dtype=np.int64)
    for peer, wanted in enumerate(lacked):
        found = np.searchsorted(wanted, clean[last], "right")
        found -= np.searchsorted(wanted, clean[first], "left")
        np.add.at(each[:, peer], rank[first], found)
    return each


def _common(shard: RankRows, wanted: NDArray[np.int32]) -> NDArray[np.int64]:
    """int64: which of the shard's rows are wanted."""
    place = np.searchsorted(wanted, shard.clean)
    found = place < len(wanted)
    found[found] = wanted[place[found]] == shard.clean[found]
    return np.flatnonzero(found)


def make_deliveries(
    shards: tuple[RankRows, ...],
    rank: int,
    lacked: tuple[NDArray[np.int32], ...],
    most: int | None,
    device: torch.device,
) -> tuple[Delivery, ...]:
    """The deliveries in which all get what they lack; none if nobody lacks anything.

    Args:
        shards: see `rows_to_send`, as is lacked.
        rank: this rank.
        lacked: see above.
        most: rows that may arrive at once; None for any number.
        device: of the indices.
    """
    longest = max(len(wanted) for wanted in lacked)
    if longest == 0:
        return ()
    count = 1 if most is None else -(-longest // most)
    return tuple(
        _delivery(shards, rank, tuple(np.array_split(w, count)[i] for w in lacked), device)
        for i in range(count)
    )


def _delivery(
    shards: tuple[RankRows, ...],
    rank: int,
    lacked: tuple[NDArray[np.int32], ...],
    device: torch.device,
) -> Delivery:
    send = [_common(shards[rank], wanted) for wanted in lacked]
    come = [shard.clean[_common(shard, lacked[rank])] for shard in shards]
    positions = np.concatenate(come)
    order = np.argsort(positions)
    assert len(positions) == len(lacked[rank]), "a row is lacked that no rank of the group holds"
    return Delivery(
        send=torch.from_numpy(np.concatenate(send)).to(device),
        send_sizes=tuple(map(len, send)),
        order=torch.from_numpy(order).to(device),
        sizes=tuple(map(len, come)),
        held=Held(positions[order], np.zeros(0, dtype=np.int64)),
    )


class NeededExchange:
    """Ranks get what they lack."""

    def __init__(
        self, group: dist.ProcessGroup, deliveries: tuple[Delivery, ...], traffic: Traffic
    ) -> None:
        """Exchange `deliveries` (see `make_deliveries`) in `group`, counting in `traffic`."""
        self.group, self.deliveries, self.traffic = group, deliveries, traffic

    @property
    def held(self) -> tuple[Held, ...]:
        """See base.Exchange, as for the other two."""
        return tuple(delivery.held for delivery in self.deliveries)

    def fetch(self, k_SHD: Tensor, v_SHD: Tensor) -> "NeededFetch":
        """A pass of K/V."""
        return NeededFetch(self, k_SHD, v_SHD)

    def returns(self, dkv_S2HD: Tensor, dtype: torch.dtype) -> "NeededReturn":
        """A pass of gradients; they travel in `dtype`."""
        return NeededReturn(self, dkv_S2HD, dtype)

    def deliver(self, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> Pending:
        """Start sending rows, rank after rank, so many to each and so many from each."""
        pending, sent = all_to_all_uneven(rows, send, receive, self.group)
        self.traffic.bytes_sent += sent
        return pending


class NeededFetch:
    """See base.Fetch."""

    def __init__(self, exchange: NeededExchange, k_SHD: Tensor, v_SHD: Tensor) -> None:
        self.exchange, self.k, self.v = exchange, k_SHD, v_SHD
        self.pending: dict[int, Pending] = {}

    def start(self, i: int) -> None:
        """Start delivery i."""
        delivery = self.exchange.deliveries[i]
        self.pending[i] = self.exchange.deliver(
            packed(self.k, self.v, delivery.send), delivery.send_sizes, delivery.sizes
        )

    def wait(self, i: int) -> Tensor:
        """[K, 2, H, D], in ascending order."""
        return self.pending.pop(i).wait()[self.exchange.deliveries[i].order]


class NeededReturn(Return):
    """See base.Return."""

    def __init__(self, exchange: NeededExchange, dkv_S2HD: Tensor, dtype: torch.dtype) -> None:
        super().__init__(dkv_S2HD)
        self.exchange, self.dtype = exchange, dtype

    def start(self, i: int, dkv_K2HD: Tensor) -> Pending:
        """Of delivery i, back the way it came."""
        delivery = self.exchange.deliveries[i]
        shares = torch.empty_like(dkv_K2HD, dtype=self.dtype)
        shares[delivery.order] = dkv_K2HD.to(self.dtype)
        return self.exchange.deliver(shares, delivery.sizes, delivery.send_sizes)

    def add(self, i: int, shares: Tensor) -> None:
        """[s, 2, H, D], rank after rank."""
        delivery = self.exchange.deliveries[i]
        sizes = list(delivery.send_sizes)
        for rows, share in zip(delivery.send.split(sizes), shares.split(sizes), strict=True):
            self.dkv[rows] += share  # a rank gets a row once
