"""Layout: what a micro-batch's attention needs, as it travels through Megatron to every layer."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_bp.attention.exchange.base import Traffic
from megatron_bp.attention.exchange.choose import (
    NOTHING,
    ExchangeOptions,
    Prepared,
    prepare_exchange,
)
from megatron_bp.attention.function import Plan, Result
from megatron_bp.attention.heads import HeadsPlan, all_rows
from megatron_bp.attention.kernels.contract import Kernel
from megatron_bp.attention.parts import Held, View, make_view
from megatron_bp.attention.query_scale import QueryScale
from megatron_bp.sequence.cache import once
from megatron_bp.sequence.plan import RankRows, SequencePlan
from megatron_bp.sequence.visibility import visibility


@dataclass(frozen=True)
class AttentionOptions:
    """How attention is computed.

    Attributes:
        kernel: computes the parts.
        exchange: how the K/V of other ranks come.
        over_heads: mode CP by all-to-all over heads.
        keep_gathered: K/V that came for a forward are kept for its backward.
        keep_results: a layer that is recomputed keeps what attention made of it.
        query_scale: queries grow with their position; None: they do not.
    """

    kernel: Kernel
    exchange: ExchangeOptions = field(default_factory=ExchangeOptions)
    over_heads: bool = False
    keep_gathered: bool = False
    keep_results: bool = False
    query_scale: QueryScale | None = None


@dataclass(kw_only=True)
class Layout(PackedSeqParams):
    """Megatron hands PackedSeqParams untouched to every layer and stage, also under recompute.

    Attributes:
        positions: int64[S], rotary position of each row of this rank.
        plans: one for each distinct window of the layers (None = no window).
        traffic: what attention sends.
        results: by layer number, of layers that will be recomputed; None if they are not kept.
        query_scale: float32[S], factor of each row's queries; None for none.
    """

    positions: Tensor
    plans: dict[int | None, Plan | HeadsPlan]
    traffic: Traffic = field(default_factory=Traffic)
    results: dict[int, Result] | None = None
    query_scale: Tensor | None = None
    qkv_format: str = "sbhd"


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What does not change between micro-batches of one plan."""

    exchange: Prepared
    view: View
    order: Tensor | None = None


def make_layout(
    plan: SequencePlan,
    shards: tuple[RankRows, ...],
    slot_rank: int,
    windows: Iterable[int | None],
    positions: Tensor,
    group: dist.ProcessGroup,
    options: AttentionOptions,
) -> Layout:
    """The layout of a micro-batch on one rank.

    What follows from the plan alone is made once and kept as long as the plan lives.

    Args:
        plan: the sample's plan.
        shards: the rows of each rank of the clean shard group.
        slot_rank: of this rank.
        windows: the distinct windows of the layers.
        positions: int64[S], on the device where attention works.
        group: the clean shard group.
        options: how attention is computed.
    """
    traffic = Traffic()
    plans: dict[int | None, Plan | HeadsPlan] = {}
    for window in windows:
        fill = tuple(shard.filling for shard in shards)
        key = ("attention", slot_rank, window, fill, positions.device, options)
        prepare = _over_heads if options.over_heads else _over_rows
        device = positions.device
        make = partial(prepare, plan, shards, slot_rank, window, options, device)
        found = once(plan, key, make)
        exchange = found.exchange.make(group, traffic)
        own = Plan(found.view, exchange, options.kernel, options.keep_gathered)
        if found.order is None:
            plans[window] = own
        else:
            sizes = tuple(shard.num_rows for shard in shards)
            plans[window] = HeadsPlan(own, found.order, sizes, group, traffic)
    return Layout(
        positions=positions,
        plans=plans,
        traffic=traffic,
        results={} if options.keep_results else None,
        query_scale=(
            None
            if options.query_scale is None
            else options.query_scale.at(positions).to(torch.float32)
        ),
    )


def _over_rows(
    plan: SequencePlan,
    shards: tuple[RankRows, ...],
    slot_rank: int,
    window: int | None,
    options: AttentionOptions,
    device: torch.device,
) -> _Prepared:
    mine = shards[plan.shard_group(slot_rank).index(slot_rank)]
    exchange = prepare_exchange(plan, shards, slot_rank, window, options.exchange, device)
    visible = visibility(plan, mine.clean, mine.corrupted, window, mine.filling)
    held = Held.of_rank(mine)
    return _Prepared(exchange, make_view(visible, held, exchange.held, options.kernel, device))


def _over_heads(
    plan: SequencePlan,
    shards: tuple[RankRows, ...],
    slot_rank: int,
    window: int | None,
    options: AttentionOptions,
    device: torch.device,
) -> _Prepared:
    every, order = all_rows(shards)
    visible = visibility(plan, every.clean, every.corrupted, window)
    view = make_view(visible, every, (), options.kernel, device)
    return _Prepared(NOTHING, view, torch.from_numpy(order).to(device))
