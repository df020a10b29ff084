"""A layout: what is made once and shared, what is not; and that few rows arrive at once."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from cases import Case, sample_of

from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.attention.exchange.gather import make_chunks
from megatron_bp.attention.exchange.needed import make_deliveries
from megatron_bp.attention.function import Plan
from megatron_bp.attention.kernels.tiled import Tiled
from megatron_bp.attention.layout import AttentionOptions, make_layout
from megatron_bp.attention.parts import Held
from megatron_bp.sequence.needs import lacked
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan

CPU = torch.device("cpu")


class Group:
    """A process group that nobody sends in."""

    def rank(self) -> int:
        return 0


def plan_on(plan: SequencePlan, options: AttentionOptions, **other: Any) -> Plan:
    rank, window = other.get("rank", 0), other.get("window")
    shards = tuple(plan.rows_of(peer, other.get("multiple", 1)) for peer in plan.shard_group(rank))
    mine = shards[plan.shard_group(rank).index(rank)]
    positions = torch.zeros(mine.num_rows, dtype=torch.long)
    layout = make_layout(plan, shards, rank, [window], positions, cast(Any, Group()), options)
    return cast(Plan, layout.plans[window])


def test_parts_are_made_once_for_all_micro_batches_of_a_plan() -> None:
    plan = make_plan(sample_of(Case((40, 24), 4)), SequenceOptions(4, 2, 2))
    options = AttentionOptions(Tiled())
    assert plan_on(plan, options).view is plan_on(plan, options).view
    again = make_plan(sample_of(Case((40, 24), 4)), SequenceOptions(4, 2, 2))
    assert plan_on(again, options).view is not plan_on(plan, options).view


@pytest.mark.parametrize(
    "other", [{"window": 7}, {"multiple": 16}, {"rank": 1}, {"rank": 2}], ids=str
)
def test_other_rows_or_keys_are_other_parts(other: dict[str, int]) -> None:
    plan = make_plan(sample_of(Case((43, 24), 4)), SequenceOptions(4, 4, 2))
    options = AttentionOptions(Tiled())
    first = plan_on(plan, options)
    assert plan_on(plan, options, **other).view is not first.view
    assert plan_on(plan, options).view is first.view


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(Tiled(rows=8)),
        AttentionOptions(Tiled(), ExchangeOptions("all_gather")),
        AttentionOptions(Tiled(), ExchangeOptions("ring")),
        AttentionOptions(Tiled(), ExchangeOptions("needed_rows", 5)),
    ],
    ids=str,
)
def test_other_options_are_other_parts(options: AttentionOptions) -> None:
    """Of one plan in one process: a benchmark and the tests compare them side by side."""
    plan = make_plan(sample_of(Case((40, 24), 4)), SequenceOptions(4, 4, 4))
    first = plan_on(plan, AttentionOptions(Tiled(), ExchangeOptions("needed_rows")))
    other = plan_on(plan, options)
    assert other.view is not first.view
    assert type(other.exchange) is not type(first.exchange) or other.view.pairs == first.view.pairs


def rows_in(held: tuple[Held, ...]) -> tuple[list[int], list[int]]:
    clean = np.concatenate([h.clean for h in held]) if held else np.zeros(0, int)
    corrupted = np.concatenate([h.corrupted for h in held]) if held else np.zeros(0, int)
    return sorted(clean.tolist()), sorted(corrupted.tolist())


@pytest.mark.parametrize("degrees", [(2, 2), (4, 4), (16, 16), (1, 4), (1, 7)])
def test_no_more_rows_arrive_at_once_than_asked_for(degrees: tuple[int, int]) -> None:
    """But one of each rank; and all arrive. Mode CP sends corrupted rows too."""
    plan = make_plan(sample_of(Case((300, 211, 90), 4)), SequenceOptions(4, *degrees))
    ranks = plan.shard_group(0)
    shards = tuple(plan.rows_of(peer, 8) for peer in ranks)
    wanted = tuple(lacked(plan, rank) for rank in ranks) if degrees[0] > 1 else ()
    everything = rows_in(tuple(Held.sent_by(s) for s in shards[1:]))
    for most in (1, 5, 20, 33, 100, 10_000):
        chunks = make_chunks(shards, 0, most, CPU)
        assert max(len(shards) * chunk.rows for chunk in chunks) <= max(most, len(shards))
        assert rows_in(tuple(chunk.held for chunk in chunks)) == everything
        if wanted:
            deliveries = make_deliveries(shards, 0, wanted, most, CPU)
            assert max(len(d.order) for d in deliveries) <= most
            assert rows_in(tuple(d.held for d in deliveries))[0] == wanted[0].tolist()
    assert len(make_chunks(shards, 0, 10_000, CPU)) == 1
