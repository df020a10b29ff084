"""Seconds of a step, against hand-computed numbers."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.attention.exchange.count import Sending
from megatron_bp.planning.counts import RankCounts, SlotCounts, count, full_rows, options_of
from megatron_bp.planning.hardware import Gpu, gpu_named, gpus
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.rates import Rates
from megatron_bp.planning.seconds import Seconds, arrivals, seconds, waited, worst
from megatron_bp.planning.shape import Attention, Layer, Mlp, Shape
from megatron_bp.planning.task import Task
from megatron_bp.planning.traffic import attention_bytes
from megatron_bp.sequence.plan import RankRows, SequenceOptions, make_plan

HEADS = Attention(query_heads=4, key_heads=2, head_dim=8)
LAYER = Layer(HEADS, Mlp(64))
SHAPE = Shape("small", hidden=32, vocabulary=128, tied=True, layers=(LAYER,) * 2)
TASK = Task(SHAPE, SequenceOptions(4), length=100)
# 1,000 FLOP/s of bf16 and 10 of float32, 500 B/s of memory, 50 inside a node and 8 to another.
GPU = Gpu("slow", 1e9, 1000.0, 10.0, 500.0, 50.0, 8.0, 4)
RATES = Rates(products=0.5, attention=0.25, combined_attention=1.0, link=0.75)


def counts_of(*ranks: RankCounts) -> SlotCounts:
    nothing = RankRows(np.zeros(0, np.int32), 0, np.zeros(0, np.int64), 0)
    return SlotCounts(100, ranks, (nothing,) * len(ranks))


def one_rank(rows: int = 10, pairs: int = 100, **more: object) -> RankCounts:
    sent = {None: Sending("all_gather", 30, 20, False)}
    given = {
        "clean": rows,
        "corrupted": rows,
        "scored": rows,
        "pairs": {None: pairs},
        "local_pairs": {None: pairs},
        "sent": sent,
        "arriving": {None: 30},
    }
    return RankCounts(**(given | more))  # type: ignore[arg-type]


ALONE = Layout(recompute="none")


def test_one_gpu_by_hand() -> None:
    """Nothing is sent; three passes over 20 rows and 100 pairs, logits of half of 10 rows."""
    took = seconds(TASK, ALONE, counts_of(one_rank()), GPU, 1, RATES)
    # A row is multiplied by Q, K, V and output 32 x 8 x (2 x 4 + 2 x 2) and by 3 x 32 x 64.
    of_layer = 32 * 8 * 12 + 3 * 32 * 64
    assert took.products == pytest.approx(3 * 2 * 20 * 2 * of_layer / (0.5 * 1000))
    # A pair of a layer: 4 x 8 x 4 forward, 2.5 times that backward.
    assert took.attention == pytest.approx(2 * 3.5 * 128 * 100 / (0.25 * 1000))
    assert took.head == pytest.approx(6 * 5 * 32 * 128 / (0.5 * 1000))
    assert took.exposed == {}
    # Optimizer 12 B read and written, gradient 4 read, weight 2 written.
    parameters = 2 * (of_layer + 2 * 32) + 128 * 32 + 32
    assert took.optimizer == pytest.approx(parameters * (2 * 12 + 4 + 2) / 500)
    parts = took.products + took.attention + took.head + took.optimizer
    assert took.total == pytest.approx(parts)
    assert took.tokens_per_second == pytest.approx(100 / parts)


def test_float32_has_its_own_peak() -> None:
    precise = replace(TASK, precision=replace(TASK.precision, model=4))
    both = [seconds(t, ALONE, counts_of(one_rank()), GPU, 1, RATES) for t in (TASK, precise)]
    assert both[1].products == pytest.approx(100 * both[0].products)


def test_micro_batches_repeat_work_and_not_the_optimizer() -> None:
    four = replace(ALONE, micro_batches=4)
    once, often = (seconds(TASK, x, counts_of(one_rank()), GPU, 1, RATES) for x in (ALONE, four))
    assert often.attention == pytest.approx(4 * once.attention)
    assert often.optimizer == once.optimizer


def test_the_bubble_is_the_other_stages_part_of_one_micro_batch() -> None:
    """Two stages of a layer each, 4 micro-batches: one of them is waited for."""
    layout = replace(ALONE, pp=2, micro_batches=4)
    took = seconds(TASK, layout, counts_of(one_rank()), GPU, 2, RATES)
    work = took.products + took.attention + took.head + took.exposed["pipeline sends"]
    assert took.bubble == pytest.approx(work / 4)
    assert took.stage == 1  # the one with the loss head


def test_the_slowest_rank_is_told() -> None:
    ranks = one_rank(pairs=100), one_rank(pairs=300), one_rank(pairs=200)
    layout = replace(ALONE, bp=3, cp=1)
    took = seconds(TASK, layout, counts_of(*ranks), GPU, 4, RATES)
    assert (took.stage, took.rank) == (0, 1)
    assert took.attention == pytest.approx(2 * 3.5 * 128 * 300 / 250)
    assert [*worst(TASK, layout, counts_of(*ranks))] == [(0, 0), (0, 1)]  # most rows, most pairs


def test_a_group_takes_the_link_that_its_span_asks_for() -> None:
    """TP 2 in a node of 4; gradients over 4 replicas of 2 leave it."""
    layout = replace(ALONE, tp=2, dp=4, sequence_parallel=True)
    inside = seconds(TASK, layout, counts_of(one_rank()), GPU, 8, RATES).exposed
    apart = seconds(TASK, layout, counts_of(one_rank()), GPU, 4, RATES).exposed
    sums = "tensor-parallel sums, 2 layers"
    assert inside[sums] == apart[sums]
    for name in ("gradients", "parameters"):
        assert apart[name] == pytest.approx(inside[name] * 50 / 8)


def test_attentions_traffic_has_the_fitted_rate() -> None:
    """All hidden pairs taken away, a layer waits for 30 rows there and 20 back.

    K|V of a row are 2 x 2 x 8 numbers of 2 B. The fitted rate is 0.75 x 8 = 6 B/s, in a node too.
    """
    mine = one_rank(local_pairs={None: 0})
    layout = Layout(bp=2, cp=2, recompute="none")
    took = seconds(TASK, layout, counts_of(mine, mine), GPU, 2, RATES)
    assert took.exposed["K/V, 2 layers, full attention"] == pytest.approx(
        2 * 64 * (2 * 30 + 20) / 6
    )


# --- what hides K/V ------------------------------------------------------------------------------

CSBP = Layout(bp=4, cp=4, recompute="none")
FULL = replace(CSBP, recompute="full")
# A pair of these heads takes 128 s / 128; K|V of a row 64 B / 64.
LINK, RATE = 64.0, 128.0


@pytest.mark.parametrize(
    ("layout", "local", "corrupted", "want"),
    [
        # Nothing local: two fetches of 30 and 20 back.
        (CSBP, 0, 0, 30 + 30 + 20),
        # 10 local pairs, none of own corrupted rows: the forward hides 10, gradients 25.
        (CSBP, 10, 0, 20 + 30 + 0),
        # 1 corrupted row in a block of 4: the second fetch hides 4 x 2.5, gradients 6 x 2.5.
        (CSBP, 10, 1, 20 + 20 + 5),
        # Recomputed: both fetches go beside all 10; gradients as before.
        (FULL, 10, 1, 20 + 20 + 5),
        (replace(CSBP, keep_gathered=True), 10, 1, 20 + 0 + 5),
        (CSBP, 100, 0, 0 + 30 + 0),
    ],
)
def test_what_is_waited_for(layout: Layout, local: int, corrupted: int, want: float) -> None:
    mine = one_rank(local_pairs={None: local}, pairs=1000, corrupted=corrupted)
    assert waited(TASK, layout, mine, HEADS, LINK, RATE) == pytest.approx(want)


def test_chunks_travel_beside_those_before() -> None:
    """30 rows in 3 chunks of 10: the first beside 4 local pairs, 20 beside 2/3 of 15 others.

    Gradients: 20, the last third beside local pairs x 2.5, 13.33 beside 2/3 of 15 x 2.5.
    """
    layout = replace(FULL, exchange=ExchangeOptions("all_gather", most_rows=12))
    mine = one_rank(local_pairs={None: 4}, pairs=19, corrupted=0)
    assert arrivals(layout, mine, None) == 3
    forward = (10 - 4) + (20 - 10)
    want = 2 * forward + max(0, 20 / 3 - 10) + max(0, 40 / 3 - 25)
    assert waited(TASK, layout, mine, HEADS, LINK, RATE) == pytest.approx(want)


def test_a_ring_comes_shard_by_shard() -> None:
    ring = {None: Sending("ring", 30, 20, True)}
    mine = one_rank(local_pairs={None: 0}, pairs=9, corrupted=0, sent=ring)
    assert arrivals(FULL, mine, None) == 3
    # Gradients in float32: 40. Two thirds of all travel beside 6 pairs.
    want = 2 * (10 + (20 - 6)) + 40 / 3 + (80 / 3 - 15)
    assert waited(TASK, FULL, mine, HEADS, LINK, RATE) == pytest.approx(want)


@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
def test_with_nothing_to_hide_behind_all_bytes_are_waited_for(recompute: str) -> None:
    """The bytes are those of the traffic count."""
    layout = Layout(bp=4, cp=4, recompute=recompute)  # type: ignore[arg-type]
    plan = make_plan(full_rows(400), options_of(TASK.sequence, layout))
    counts = count(plan, layout, [None])
    sent = attention_bytes(TASK, layout, counts, HEADS, 1)
    bare = replace(counts.ranks[1], local_pairs={None: 0})
    assert waited(TASK, layout, bare, HEADS, 2.0, 1.0) == pytest.approx(sent / 2)


@pytest.mark.parametrize("name", ["products", "attention", "link"])
def test_each_rate_moves_the_step(name: str) -> None:
    mine = one_rank(local_pairs={None: 0})
    layout = Layout(bp=2, cp=2)

    def step(rates: Rates) -> Seconds:
        return seconds(TASK, layout, counts_of(mine, mine), GPU, 2, rates)

    faster = replace(RATES, **{name: getattr(RATES, name) * 1.2})
    assert step(faster).total < step(RATES).total * 0.995


# --- data sheets ---------------------------------------------------------------------------------


def test_data_sheets_are_of_a_plausible_size() -> None:
    for name, gpu in gpus().items():
        assert gpu.name == name
        assert gpu.network <= gpu.inside <= gpu.hbm, name
        assert 1 <= gpu.node <= 8, name
        if name != "cpu":
            assert 20 * 2**30 < gpu.memory < 200 * 2**30, name
            assert 1e14 < gpu.bf16 < 3e15, name
            assert gpu.float32 < gpu.bf16, name
    h200 = gpu_named("h200")
    assert (h200.bf16, h200.hbm, h200.inside, h200.network) == (989e12, 4.8e12, 450e9, 50e9)
    assert (h200.peak(2), h200.peak(4)) == (989e12, 67e12)


def test_an_unknown_gpu_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"--gpu h300: not in hardware.yaml.* did you mean h"):
        gpu_named("h300")


@pytest.mark.parametrize(
    ("span", "inside"), [(1, True), (4, True), (8, True), (3, False), (16, False)]
)
def test_a_group_that_does_not_divide_a_node_leaves_it(span: int, inside: bool) -> None:
    assert GPU.link(span, 8) == (50.0 if inside else 8.0)
