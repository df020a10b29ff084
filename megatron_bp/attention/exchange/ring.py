"""K/V go round a ring of ranks, one shard at a time, and their gradients go with them.

For K/V that would not fit if all were gathered: two shards are in memory. Rank r gets the shard of
rank r - 1, then of r - 2, and so on. The gradients of a shard start at the rank after its owner and
pick up each rank's share on their way back to it, in the accumulation dtype. Ring attention: arXiv
2310.01889.
"""

# Shapes: R ranks, K rows of a shard, S rows of this rank, H key heads, D head dimension.

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.attention.exchange.base import Return, Traffic, packed
from megatron_bp.attention.parts import Held
from megatron_bp.parallel.collectives import Pending, pass_on
from megatron_bp.sequence.plan import RankRows


def owner(i: int, rank: int, ranks: int) -> int:
    """The rank whose shard arrives at `rank` as number i; -1 is its own."""
    return (rank - 1 - i) % ranks


def ring_held(shards: tuple[RankRows, ...], rank: int) -> tuple[Held, ...]:
    """What arrives at `rank`, one shard after the other; nothing if nobody sends."""
    if max(shard.num_sent for shard in shards) == 0:
        return ()
    ranks = len(shards)
    return tuple(Held.sent_by(shards[owner(i, rank, ranks)]) for i in range(ranks - 1))


class RingExchange:
    """Shards go round."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        held: tuple[Held, ...],
        sizes: tuple[int, ...],
        traffic: Traffic,
    ) -> None:
        """Exchange the shards of a group.

        Args:
            group: the ranks.
            held: see `ring_held`.
            sizes: rows that each rank sends.
            traffic: where bytes are counted.
        """
        self.group, self.held, self.sizes, self.traffic = group, held, sizes, traffic
        self.rank = int(group.rank())

    def size(self, i: int) -> int:
        """Rows of the shard that arrives as number i."""
        return self.sizes[owner(i, self.rank, len(self.sizes))]

    def fetch(self, k_SHD: Tensor, v_SHD: Tensor) -> "RingFetch":
        """A pass of K/V."""
        return RingFetch(self, k_SHD, v_SHD)

    def returns(self, dkv_S2HD: Tensor, dtype: torch.dtype) -> "RingReturn":
        """A pass of gradients; they travel in the accumulation dtype."""
        return RingReturn(self, dkv_S2HD)

    def pass_on(self, rows: Tensor, arriving: int, tag: int) -> Pending:
        """Start sending rows to the next rank, and getting so many of the rank before."""
        pending, sent = pass_on(rows, arriving, self.group, tag)
        self.traffic.bytes_sent += sent
        return pending


class RingFetch:
    """See base.Fetch."""

    def __init__(self, exchange: RingExchange, k_SHD: Tensor, v_SHD: Tensor) -> None:
        self.exchange = exchange
        self.here = packed(k_SHD, v_SHD, slice(0, exchange.size(-1)))
        self.pending: Pending | None = None

    def start(self, i: int) -> None:
        """Pass on the shard that is here."""
        self.pending = self.exchange.pass_on(self.here, self.exchange.size(i), tag=0)

    def wait(self, i: int) -> Tensor:
        """[K, 2, H, D], the shard of rank `owner(i, ...)`."""
        assert self.pending is not None
        self.here = self.pending.wait()
        return self.here


class RingReturn(Return):
    """See base.Return."""

    def __init__(self, exchange: RingExchange, dkv_S2HD: Tensor) -> None:
        super().__init__(dkv_S2HD)
        self.exchange = exchange
        self.last = len(exchange.held) - 1
        self.came: Tensor | None = None

    def start(self, i: int, dkv_K2HD: Tensor) -> Pending:
        """Add this rank's share to what came of the rank before, and pass it on."""
        if self.came is not None:
            dkv_K2HD = dkv_K2HD + self.came
        self.came = None
        arriving = self.exchange.size(-1 if i == self.last else i + 1)
        return self.exchange.pass_on(dkv_K2HD, arriving, tag=1)

    def add(self, i: int, shares: Tensor) -> None:
        """Of the next shard, to be passed on; at last of this rank's rows, complete."""
        if i < self.last:
            self.came = shares
        else:
            self.dkv[: self.exchange.size(-1)] += shares
