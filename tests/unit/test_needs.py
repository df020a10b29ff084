"""What the rows of a rank see and lack, against the visibility of every row."""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from cases import CASES, random_row, sample_of

from megatron_bp.data.document import Document
from megatron_bp.sequence.needs import difference, lacked, lacked_spans, seen, union
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.sequence.visibility import visibility

MODES = [(1, 1), (2, 2), (3, 3), (8, 8), (2, 1), (4, 2), (9, 3), (1, 2), (1, 3), (1, 8)]
WINDOWS = (None, 1, 2, 5, 16)


def rows() -> Iterator[tuple[str, Sample, SequenceOptions]]:
    """Random rows, and the shared cases with both relations."""
    for seed in range(24):
        yield f"seed {seed}", *random_row(seed)
    for name, case in CASES.items():
        yield name, sample_of(case), SequenceOptions(case.block_size)
        yield name, sample_of(case), SequenceOptions(case.block_size, clean_relation="token")


def plans() -> Iterator[tuple[str, SequencePlan]]:
    """They in every mode, scoring and anchor of windows."""
    for n, (name, sample, options) in enumerate(rows()):
        for m, (bp, cp) in enumerate(MODES):
            more = {
                "block_parallel_size": bp,
                "context_parallel_size": cp,
                "score_clean": ("none", "supervised", "all")[(n + m) % 3],
                "window_anchor": ("row", "block")[(n + m // 3) % 2],
            }
            yield f"{name}, BP {bp}, CP {cp}", make_plan(sample, replace(options, **more))


def positions(start: np.ndarray, stop: np.ndarray) -> list[int]:
    return [p for a, b in zip(start.tolist(), stop.tolist(), strict=True) for p in range(a, b)]


def test_seen_and_lacked_are_those_of_visibility() -> None:
    some = 0
    for n, (where, plan) in enumerate(plans()):
        for window in (WINDOWS[n % 5], WINDOWS[(n // 10 + n + 2) % 5]):
            for rank in range(plan.options.slot):
                mine = plan.rows_of(rank)
                v = visibility(plan, mine.clean, mine.corrupted, window)
                want = set()
                for lo, hi in zip(v.clean_lo.tolist(), v.clean_hi.tolist(), strict=True):
                    want.update(range(lo, hi))
                start, stop = seen(plan, rank, window)
                assert positions(start, stop) == sorted(want), (where, window, rank)
                assert (start[1:] > stop[:-1]).all(), "disjoint, ascending, none touching"
                assert (start < stop).all()
                missing = sorted(want - set(mine.clean.tolist()))
                found = lacked(plan, rank, window)
                assert found.dtype == np.int32
                assert found.tolist() == missing, (where, window, rank)
                assert positions(*lacked_spans(plan, rank, window)) == missing
                some += bool(missing)
    assert some > 400


def test_who_lacks_rows_finds_them_in_its_group() -> None:
    """Each of them at one rank, and never at itself."""
    for where, plan in plans():
        for rank in range(plan.options.slot):
            group = plan.shard_group(rank)
            held = np.concatenate([plan.clean_positions(r) for r in group])
            assert np.isin(lacked(plan, rank), held).all(), where
            assert not np.isin(lacked(plan, rank), plan.clean_positions(rank)).any(), where


@pytest.mark.parametrize("seed", range(20))
def test_union_and_difference_are_those_of_sets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    start, also = rng.integers(0, 40, 6), rng.integers(0, 40, 5)
    stop, also_stop = start + rng.integers(-1, 9, 6), also + rng.integers(-1, 9, 5)
    one, two = union(start, stop), union(also, also_stop)
    assert positions(*one) == sorted({*positions(start, stop)})
    want = sorted({*positions(start, stop)} - {*positions(also, also_stop)})
    assert positions(*difference(one, two)) == want
    touching = (np.array([0, 3, 9]), np.array([3, 7, 9]))
    assert positions(*difference(touching, two)) == sorted({*range(7)} - {*positions(*two)})


def test_all_ranks_of_a_long_row_take_milliseconds() -> None:
    """64 ranks of 256K tokens take about 30 ms, a list of every row would take seconds."""
    text = Document(np.zeros(1 << 18, np.int32), np.ones(1 << 18, np.bool_), 0)
    plan = make_plan(pack([text], 1 << 18), SequenceOptions(32, 64, 64))
    took = []
    for _ in range(3):
        begin = time.perf_counter()
        for rank in range(64):
            lacked_spans(plan, rank, 1024)
        took.append(time.perf_counter() - begin)
    assert min(took) < 0.2
