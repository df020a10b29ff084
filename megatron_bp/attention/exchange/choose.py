"""Which exchange a layout gets: the form asked for, or by what it would move.

Decided from the plan alone, so that all ranks of a clean shard group decide alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_bp.attention.exchange.base import Exchange, NoExchange, Traffic
from megatron_bp.attention.exchange.gather import Chunk, GatherExchange, make_chunks
from megatron_bp.attention.exchange.needed import (
    Delivery,
    NeededExchange,
    make_deliveries,
    rows_to_send,
)
from megatron_bp.attention.exchange.ring import RingExchange, ring_held
from megatron_bp.attention.exchange.te import TeExchange
from megatron_bp.attention.parts import Held
from megatron_bp.sequence.cache import once
from megatron_bp.sequence.needs import lacked
from megatron_bp.sequence.plan import RankRows, SequencePlan

Form = Literal["auto", "all_gather", "needed_rows", "ring", "te"]
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True)
class ExchangeOptions:
    """How K/V of other ranks come.

    Attributes:
        form: one of `Form`; in mode CP "all_gather" or "ring", whatever rows are sent.
        most_rows: rows of other ranks that may arrive at once; None for any number. A ring brings
            one shard at a time.
        needed_fraction: "auto" is "needed_rows" where no rank then sends or gets more than this
            fraction of what it would in an all-gather.
    """

    form: Form = "auto"
    most_rows: int | None = None
    needed_fraction: float = 0.75

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing."""
        if self.most_rows is not None and self.most_rows < 1:
            raise ValueError(f"--clean-kv-rows {self.most_rows}: must be at least 1")
        if not 0 <= self.needed_fraction <= 1:
            raise ValueError(f"--needed-rows-fraction {self.needed_fraction}: must be from 0 to 1")


@dataclass(frozen=True, eq=False)
class Prepared:
    """An exchange without its group: what arrives, and how to make it."""

    held: tuple[Held, ...]
    make: Callable[[dist.ProcessGroup, Traffic], Exchange]


NOTHING = Prepared((), lambda *_: NoExchange())


def prepare_exchange(
    plan: SequencePlan,
    shards: tuple[RankRows, ...],
    slot_rank: int,
    window: int | None,
    options: ExchangeOptions,
    device: torch.device,
) -> Prepared:
    """The exchange of slot rank `slot_rank`.

    Args:
        plan: the sample's plan.
        shards: the rows of each rank of its clean shard group.
        slot_rank: see above.
        window: of the layers that it is for.
        options: what was asked for.
        device: of the indices.
    """
    group = plan.shard_group(slot_rank)
    rank = group.index(slot_rank)
    if len(group) == 1:
        return NOTHING
    most = options.most_rows
    wanted = wanted_rows(plan, slot_rank, window, options)
    form = chosen_form(shards, wanted, options)
    if form == "needed_rows":
        deliveries = make_deliveries(shards, rank, wanted, most, device)
        return _prepared(tuple(d.held for d in deliveries), partial(_needed, deliveries=deliveries))
    if form == "ring":
        held = ring_held(shards, rank)
        sizes = tuple(shard.num_sent for shard in shards)
        return _prepared(held, partial(_ring, held=held, sizes=sizes))
    chunks = make_chunks(shards, rank, most, device)
    make = _te if form == "te" else _gather
    return _prepared(tuple(c.held for c in chunks), partial(make, chunks=chunks))


def _prepared(
    held: tuple[Held, ...], make: Callable[[dist.ProcessGroup, Traffic], Exchange]
) -> Prepared:
    return Prepared(held, make) if held else NOTHING


def _gather(group: dist.ProcessGroup, traffic: Traffic, chunks: tuple[Chunk, ...]) -> Exchange:
    return GatherExchange(group, chunks, traffic)


def _te(group: dist.ProcessGroup, traffic: Traffic, chunks: tuple[Chunk, ...]) -> Exchange:
    return TeExchange(group, chunks, traffic)


def _needed(
    group: dist.ProcessGroup, traffic: Traffic, deliveries: tuple[Delivery, ...]
) -> Exchange:
    return NeededExchange(group, deliveries, traffic)


def _ring(
    group: dist.ProcessGroup, traffic: Traffic, held: tuple[Held, ...], sizes: tuple[int, ...]
) -> Exchange:
    return RingExchange(group, held, sizes, traffic)


def wanted_rows(
    plan: SequencePlan, slot_rank: int, window: int | None, options: ExchangeOptions
) -> tuple[NDArray[np.int32], ...]:
    """The clean positions that each rank of the group sees and lacks; empty if nobody asks.

    Args:
        plan: see `prepare_exchange`, as for the others.
        slot_rank: see there.
        window: see there.
        options: see there.
    """
    if options.form not in ("auto", "needed_rows") or plan.options.splits_units:
        return ()
    return tuple(
        once(plan, ("lacked", peer, window), partial(lacked, plan, peer, window))
        for peer in plan.shard_group(slot_rank)
    )


def chosen_form(
    shards: tuple[RankRows, ...],
    wanted: tuple[NDArray[np.int32], ...],
    options: ExchangeOptions,
    each: NDArray[np.int64] | None = None,
) -> Form:
    """The form asked for; for "auto" what is best.

    Args:
        shards: the rows of each rank of the group.
        wanted: from `wanted_rows`.
        options: what was asked for.
        each: from `rows_to_send`, if it is there already.
    """
    if options.form != "auto":
        return options.form
    if not wanted:
        return "all_gather"
    each = rows_to_send(shards, wanted) if each is None else each
    most = max(each.sum(0).max(), each.sum(1).max())
    gathered = (len(shards) - 1) * max(shard.num_sent for shard in shards)
    return "needed_rows" if most <= options.needed_fraction * gathered else "all_gather"
