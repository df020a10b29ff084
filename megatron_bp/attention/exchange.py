"""The exchange of K/V among the ranks that shard the clean rows, and its exact adjoint.

Three passes a layer and step: K/V gathered for the forward, gathered again for the backward (local
K/V is what autograd keeps), and dK/dV reduced to their owners. K and V travel packed in one
collective. Only clean rows ever enter a buffer that is sent, except in mode CP, where all do.
"""

# Shapes: R ranks, C rows sent of the rank that sends most, c of this rank, H key heads, D head
# dimension.

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.parallel.collectives import Pending, all_gather, all_to_all


class CleanExchange:
    """One micro-batch's exchange; counts the bytes that this rank sends."""

    def __init__(self, group: dist.ProcessGroup, sizes: tuple[int, ...]) -> None:
        """Describe who sends how many rows.

        Args:
            group: the ranks that shard the clean rows.
            sizes: of each, the rows that it sends, which are its first.
        """
        if group.size() != len(sizes):
            raise ValueError(f"{len(sizes)} shard sizes for {group.size()} ranks")
        self.group = group
        self.rank = int(group.rank())
        self.sizes = sizes
        self.bytes_sent = 0

    @property
    def active(self) -> bool:
        """Whether anything crosses ranks at all."""
        return len(self.sizes) > 1 and max(self.sizes) > 0

    def gather(self, k_cHD: Tensor, v_cHD: Tensor) -> Pending:
        """Start gathering the K and V that ranks send as [R, C, 2, H, D].

        Of rank r's C rows the first sizes[r] are real.
        """
        own, most = self.sizes[self.rank], max(self.sizes)
        packed = k_cHD.new_zeros((most, 2, *k_cHD.shape[1:]))
        packed[:own, 0] = k_cHD[:own]
        packed[:own, 1] = v_cHD[:own]
        pending, sent = all_gather(packed, self.group)
        self.bytes_sent += sent
        return pending

    def scatter(self, dkv_RC2HD: Tensor, dtype: torch.dtype) -> Pending:
        """Start sending this rank's share of dK|dV of all rows sent to the rows' owners.

        It travels in `dtype`; `collect` adds up what arrives.
        """
        pending, sent = all_to_all(dkv_RC2HD.to(dtype), self.group)
        self.bytes_sent += sent
        return pending

    def collect(self, pending: Pending, dkv_c2HD: Tensor) -> Tensor:
        """This rank's own dK|dV [c, 2, H, D] plus the shares of the others, in its (wide) dtype."""
        shares = pending.wait()
        own = self.sizes[self.rank]
        for rank in range(len(self.sizes)):  # in rank order: the same sum at every run
            if rank != self.rank:
                dkv_c2HD[:own] += shares[rank, :own]
        return dkv_c2HD
