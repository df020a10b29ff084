"""What a step did, from hand-made micro-batches on several layouts of ranks."""

import math
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megatron_bp.batch.shard import LocalBatch, LocalTerm
from megatron_bp.model.output import LossHead, scored_rows
from megatron_bp.training.metrics import BINS, Metrics, Step, Sums, as_row, measure


@dataclass(frozen=True)
class Row:
    """One row of the network: p of a corrupted one (None: clean), what scores it, and its CE."""

    p: float | None = None
    diffusion: float = 0.0
    ar: float = 0.0
    ce: float = 0.0
    ar_ce: float = 0.0
    counted: bool = True


# Four samples; a clean row is a token of the sample. Numbers are binary fractions, so sums are
# exact whatever their order.
SAMPLES = (
    (Row(ar=1, ar_ce=0.5), Row(), Row(0.25, 4, ce=1.5), Row(0.25)),
    (Row(ar=1, ar_ce=2), Row(), Row(), Row(1.0, 1, ce=3), Row(0.5, 2, ce=0.25)),
    (Row(), Row(ar=1, ar_ce=4), Row(0.5, 2, ce=8), Row(0.5, counted=False), Row(0.75)),
    (Row(), Row(0.03125, 32, ce=0.125)),
)
BYTES = (7.0, 11.0, 13.0, 17.0)
SUMS = (6.0, 3.5, 16.0, 4.0)  # weight x CE of the diffusion term, a sample
COUNTS = (2, 2, 2, 1)
COSTS = ((10, 70, 30, 20), (40, 20, 60, 10), (50, 90, 0, 0), (80, 10, 0, 0))  # rank, micro-batch
LAYOUTS = pytest.mark.parametrize(("ranks", "slot"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)])


def batch_of(rows: list[Row], ar: bool) -> tuple[LocalBatch, LossHead]:
    """This rank's rows, clean first, and a head that has seen their cross-entropy."""
    rows = [r for r in rows if r.p is None] + [r for r in rows if r.p is not None]
    nothing = torch.zeros(len(rows), dtype=torch.int64)
    weights = torch.tensor([r.diffusion for r in rows])
    count = sum(r.p is not None and r.counted for r in rows)
    terms = [LocalTerm("diffusion", nothing, weights, count, 0.5)]
    if ar:
        weights = torch.tensor([r.ar for r in rows])
        terms.append(LocalTerm("ar", nothing, weights, sum(r.ar > 0 for r in rows), 0.25))
    clean = sum(r.p is None for r in rows)
    batch = LocalBatch(
        input_ids=nothing,
        position_ids=nothing,
        terms=tuple(terms),
        p=torch.tensor([r.p or 0.0 for r in rows]),
        corruptible=sum(r.p is not None for r in rows),
        corrupted=sum(r.diffusion > 0 for r in rows),
        num_clean=clean,
        index=torch.arange(0),
        clean_tokens=clean,
        own_rows=torch.ones(len(rows), dtype=torch.bool),
        shards=(),
    )
    head = LossHead(scored_rows(terms, [7.0] * len(terms)), 10)  # scales must not matter
    ce = [r.ce for r in rows if r.diffusion]
    ce += [r.ar_ce for r in rows if r.ar and ar]
    head.cross_entropy = torch.tensor(ce, dtype=torch.float32)
    return batch, head


def step_on_rank(rank: int, world: int, slot: int, ar: bool) -> tuple[Step, dict[str, Any]]:
    """Rank r of a slot takes every slot-th row; ranks 0..slot-1 are the first slot."""
    metrics, data = Metrics(), world // slot
    assert metrics.finish(dist.group.WORLD, slot) is None
    for micro in range(len(SAMPLES) // data):
        number = micro * data + rank // slot
        metrics.begin()
        batch, head = batch_of(list(SAMPLES[number][rank % slot :: slot]), ar)
        traffic = SimpleNamespace(bytes_sent=0)
        metrics.add(
            measure(batch, head),
            batch,
            cost=COSTS[rank][micro],
            traffic=traffic,  # type: ignore[arg-type]
            bytes_of_text=BYTES[number] if rank % slot == 0 else 0.0,
        )
        traffic.bytes_sent = 1000 + rank  # in the backward, after `add`
    step = metrics.finish(dist.group.WORLD, slot)
    assert step is not None
    assert metrics.finish(dist.group.WORLD, slot) is None
    return step, as_row(step)


def balance(ranks: int, slot: int) -> float:
    """By hand, worst over mean work; ranks of a slot wait for each other in every micro-batch."""
    return {
        (1, 1): 1.0,
        (2, 1): 80 / 70,  # 10 + 70, 40 + 20
        (2, 2): (40 + 70 + 60 + 20) / ((130 + 130) / 2),
        (4, 1): 80 / ((10 + 40 + 50 + 80) / 4),
        (4, 2): (80 + 90) / ((80 + 60 + 140 + 90) / 4),  # 40 + 70 of the other slot
    }[ranks, slot]


@pytest.mark.ranks
@LAYOUTS
@pytest.mark.parametrize("ar", [False, True])
def test_a_step_by_hand(ranks: int, slot: int, ar: bool) -> None:
    for step, _ in run_ranks(ranks, step_on_rank, slot, ar):
        assert step.loss_sum["diffusion"] == sum(SUMS) == 29.5
        assert step.count["diffusion"] == 7
        assert step.loss["diffusion"] == 29.5 / 7
        assert step.total == pytest.approx(0.5 * 29.5 / 7 + ar * 0.25 * 6.5 / 3, rel=1e-15)
        if ar:
            assert (step.loss_sum["ar"], step.count["ar"]) == (6.5, 3)
        assert step.loss.keys() == ({"diffusion", "ar"} if ar else {"diffusion"})
        # p: 0.25 and 0.5 twice, 1 in the last bin, 1/32 in the first; CE without weight
        want: list[float | None] = [None] * BINS
        want[0], want[2], want[5], want[9] = 0.125, 1.5, (0.25 + 8) / 2, 3.0
        assert step.bins == want
        assert step.corruptible == 8
        assert (step.corrupted, step.rows, step.clean_tokens) == (5, 16, 8)
        assert step.scored == 5 + 3 * ar
        micro = len(SAMPLES) * slot // ranks
        assert step.bytes_sent == micro * sum(1000 + r for r in range(ranks))
        assert step.balance == pytest.approx(balance(ranks, slot), rel=1e-15)
        assert step.samples.tolist() == [list(x) for x in zip(SUMS, COUNTS, BYTES, strict=True)]
        assert step.samples.dtype == torch.float64
        assert step.seconds > 0


@pytest.mark.ranks
def test_every_rank_gets_the_same_step() -> None:
    one, *others = (step for step, _ in run_ranks(4, step_on_rank, 2, True))
    for other in others:
        for field in fields(Step):
            if field.name not in ("seconds", "samples"):
                assert getattr(other, field.name) == getattr(one, field.name), field.name
        assert torch.equal(other.samples, one.samples)


@pytest.mark.ranks
def test_the_row_of_a_step() -> None:
    (step, row), *_ = run_ranks(2, step_on_rank, 2, True)
    assert row == {
        "loss": step.total,
        "diffusion_loss": 29.5 / 7,
        "diffusion_loss_sum": 29.5,
        "diffusion_count": 7,
        "ar_loss": 6.5 / 3,
        "ar_loss_sum": 6.5,
        "ar_count": 3,
        "loss_by_corruption": step.bins,
        "masked_fraction": 5 / 8,
        "scored": 8,
        "rows": 16,
        "clean_tokens": 8,
        "bytes_sent": step.bytes_sent,
        "balance": step.balance,
        "memory_bytes": step.memory,
        "seconds": step.seconds,
        "clean_tokens_per_second": 8 / step.seconds,
    }
    assert step.memory > 0


def memory_on_rank(rank: int, world: int) -> Step | None:
    metrics = Metrics()
    metrics.begin()
    batch, head = batch_of([Row()], ar=False)
    traffic = SimpleNamespace(bytes_sent=0)
    metrics.add(measure(batch, head), batch, 1, traffic, 1.0)  # type: ignore[arg-type]
    with mock.patch.object(torch.cuda, "max_memory_allocated", return_value=100 + rank):
        return metrics.finish(dist.group.WORLD, 1)


@pytest.mark.ranks
def test_memory_is_that_of_the_rank_that_holds_most() -> None:
    for step in run_ranks(2, memory_on_rank):
        assert step is not None
        assert step.memory == 101


@pytest.mark.ranks
def test_numbers_of_a_row_are_plain() -> None:
    (_, row), *_ = run_ranks(1, step_on_rank, 1, True)
    assert all(isinstance(v, int | float | list) for v in row.values())


# --- one micro-batch -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "place"), [(1e-6, 0), (0.0999, 0), (0.1001, 1), (0.5, 5), (0.9999, 9), (1.0, 9)]
)
def test_bins_are_a_tenth_wide(p: float, place: int) -> None:
    sums = measure(*batch_of([Row(p, 1, ce=2.0)], ar=False))
    assert sums.bin_rows.tolist() == [float(i == place) for i in range(BINS)]
    assert sums.bin_loss.tolist() == [2.0 * (i == place) for i in range(BINS)]


def test_the_next_token_term_is_in_no_bin() -> None:
    sums = measure(*batch_of([Row(ar=1, ar_ce=5.0), Row(0.5, 2, ce=3.0)], ar=True))
    assert sums.by_term.tolist() == [6.0, 5.0]
    assert sums.bin_rows.sum() == 1
    assert sums.bin_loss.tolist() == [0.0] * 5 + [3.0] + [0.0] * 4


def test_nothing_scored_is_zero() -> None:
    sums = measure(*batch_of([Row(), Row(0.5)], ar=True))
    assert isinstance(sums, Sums)
    assert sums.by_term.tolist() == [0.0, 0.0]
    assert not sums.bin_rows.any()


def empty_on_rank(rank: int, world: int) -> Step | None:
    metrics = Metrics()
    metrics.begin()
    batch, head = batch_of([Row()], ar=True)
    traffic = SimpleNamespace(bytes_sent=0)
    metrics.add(measure(batch, head), batch, 0, traffic, math.nan)  # type: ignore[arg-type]
    return metrics.finish(dist.group.WORLD, 1)


@pytest.mark.ranks
def test_a_step_with_nothing_has_loss_0_balance_1_and_no_bin() -> None:
    step, _ = run_ranks(2, empty_on_rank)
    assert step is not None
    assert (step.total, step.balance) == (0.0, 1.0)
    assert step.loss == {"diffusion": 0.0, "ar": 0.0}
    assert step.bins == [None] * BINS
    assert as_row(step)["masked_fraction"] == 0.0
    assert math.isnan(step.samples[0, 2])


def drop_on_rank(rank: int, world: int) -> Step | None:
    metrics = Metrics()
    for keep in (False, True):
        metrics.begin()
        batch, head = batch_of(list(SAMPLES[0 if keep else 1]), ar=False)
        traffic = SimpleNamespace(bytes_sent=0)
        metrics.add(measure(batch, head), batch, 1, traffic, 1.0)  # type: ignore[arg-type]
        if not keep:
            metrics.drop()
    return metrics.finish(dist.group.WORLD, 1)


@pytest.mark.ranks
def test_what_is_dropped_is_in_no_step() -> None:
    (step,) = run_ranks(1, drop_on_rank)
    assert step is not None
    assert (step.loss_sum["diffusion"], step.rows) == (6.0, 4)
