"""What an exchange sends, counted from the plan alone: rows of K|V a pass, without any rank.

The same code that training uses decides the form and who lacks what.
"""

from dataclasses import dataclass
from functools import partial

import torch

from megatron_bp.attention.exchange.choose import ExchangeOptions, chosen_form, wanted_rows
from megatron_bp.attention.exchange.needed import rows_to_send
from megatron_bp.attention.exchange.ring import owner
from megatron_bp.attention.kernels.contract import accumulation_dtype
from megatron_bp.sequence.cache import once
from megatron_bp.sequence.plan import RankRows, SequencePlan


@dataclass(frozen=True)
class Sending:
    """What one rank sends to others in one layer.

    Attributes:
        form: of the exchange.
        fetched: rows of K|V in a pass, in the model's dtype.
        returned: rows of gradients.
        wide: gradients travel in the accumulation dtype.
    """

    form: str
    fetched: int
    returned: int
    wide: bool

    def bytes(self, row: int, dtype: torch.dtype, fetches: int, returns: int) -> int:
        """In so many passes, if K|V of a row are `row` numbers."""
        there = accumulation_dtype(dtype) if self.wide else dtype
        narrow = self.fetched * fetches * dtype.itemsize
        return row * (narrow + self.returned * returns * there.itemsize)


def sending(
    plan: SequencePlan,
    shards: tuple[RankRows, ...],
    slot_rank: int,
    window: int | None,
    options: ExchangeOptions,
) -> Sending:
    """What slot rank `slot_rank` sends.

    Args:
        plan: the sample's plan.
        shards: the rows of each rank of its clean shard group.
        slot_rank: see above.
        window: of the layer.
        options: what was asked for.
    """
    rank, ranks = plan.shard_group(slot_rank).index(slot_rank), len(shards)
    if ranks == 1:
        return Sending("none", 0, 0, False)
    wanted = wanted_rows(plan, slot_rank, window, options)
    each = None
    if wanted:  # the same for all ranks of a group
        key = ("rows to send", plan.shard_group(slot_rank).start, window)
        each = once(plan, key, partial(rows_to_send, shards, wanted))
    form = chosen_form(shards, wanted, options, each)
    sizes = [shard.num_sent for shard in shards]
    if form == "needed_rows":
        assert each is not None, "these were asked for"
        return Sending(form, int(each[rank].sum()), int(each[:, rank].sum()), False)
    if form == "ring":
        fetched = sum(sizes[owner(i, rank, ranks)] for i in range(-1, ranks - 2))
        returned = sum(sizes[owner(i, rank, ranks)] for i in range(ranks - 1))
        return Sending(form, fetched, returned, True)
    every = (ranks - 1) * max(sizes)
    return Sending(form, every, every, form == "te")


def over_heads(
    shards: tuple[RankRows, ...], rank: int, query_heads: int, key_heads: int, head_dim: int
) -> int:
    """Numbers that a rank sends in one layer's forward, and again in its backward, in form a2a.

    Args:
        shards: the rows of each rank.
        rank: which of them.
        query_heads: of a tensor-parallel rank.
        key_heads: of a tensor-parallel rank.
        head_dim: of each.
    """
    ranks = len(shards)
    rows, every = shards[rank].num_rows, sum(shard.num_rows for shard in shards)
    queries, keys = query_heads // ranks, max(1, key_heads // ranks)
    there = (ranks - 1) * rows * (queries + 2 * keys)
    back = (every - rows) * queries
    return (there + back) * head_dim
