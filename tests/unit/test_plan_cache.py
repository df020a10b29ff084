"""Equal layouts share one plan, and what is made of it; others do not."""

import gc
import weakref
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from cases import Case, random_row, sample_of

from megatron_bp.batch.shard import local_batch
from megatron_bp.diffusion.corruption import corrupt
from megatron_bp.diffusion.objective import Objective
from megatron_bp.sequence.cache import PlanCache, once
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan

OPTIONS = SequenceOptions(4, 2, 2)


def arrays(value: Any, name: str = "") -> list[tuple[str, np.ndarray]]:
    if isinstance(value, np.ndarray):
        return [(name, value)]
    if not is_dataclass(value):
        return []
    return [a for f in fields(value) for a in arrays(getattr(value, f.name), f"{name}.{f.name}")]


def test_equal_layouts_share_a_plan() -> None:
    cache = PlanCache(OPTIONS)
    one = sample_of(Case((5, 9), 4))
    other_tokens = sample_of(Case((5, 9), 4, first=7), seed=3)
    assert not np.array_equal(one.tokens, other_tokens.tokens)
    plan = cache.plan(one)
    assert cache.plan(other_tokens) is plan
    assert cache.plan(one) is plan


@pytest.mark.parametrize(
    "case",
    [
        Case((9, 5), 4),
        Case((14,), 4),
        Case((5, 9), 4, padding=1),
        Case((5, 9), 4, prompts=(0,)),
        Case((5, 9), 4, responses=(((0, 5),), ((3, 9),))),
    ],
)
def test_another_layout_is_another_plan(case: Case) -> None:
    cache = PlanCache(OPTIONS)
    first = cache.plan(sample_of(Case((5, 9), 4)))
    other = cache.plan(sample_of(case))
    assert other is not first
    made = make_plan(sample_of(case), OPTIONS)
    assert other.block_of.tolist() == made.block_of.tolist()
    assert other.unit_owner.tolist() == made.unit_owner.tolist()


def test_positions_are_part_of_a_layout() -> None:
    """Two pieces of a document that are joined start anew, whatever their ordinals say."""
    row = sample_of(Case((8,), 4))
    cut = replace(row, position=np.array([0, 1, 2, 0, 1, 2, 3, 4], dtype=np.int32))
    cache = PlanCache(OPTIONS)
    assert cache.plan(row) is not cache.plan(cut)


def test_those_not_read_for_longest_are_dropped() -> None:
    made: list[int] = []

    def make(sample: Any, options: SequenceOptions) -> SequencePlan:
        made.append(len(sample.tokens))
        return make_plan(sample, options)

    cache = PlanCache(OPTIONS, entries=2)
    for length in (5, 6, 5, 7, 5, 6):  # 7 drops 6, which was read before the second 5
        cache.plan(sample_of(Case((length,), 4)), make)
    assert made == [5, 6, 7, 6]


def test_arrays_of_a_shared_plan_cannot_be_written() -> None:
    for seed in range(4):
        row, options = random_row(seed)
        plan = PlanCache(replace(options, context_parallel_size=2)).plan(row)
        found = arrays(plan)
        assert {"block_of", "start", "rank"} <= {name.rsplit(".", 1)[-1] for name, _ in found}
        for name, array in found:
            assert not array.flags.writeable, name
        assert row.document.flags.writeable, "the sample is its reader's"


def test_an_error_is_not_kept() -> None:
    """Another sample of the layout is refused as well, by its own key."""
    cache = PlanCache(replace(OPTIONS, response_end="refuse"))
    for first in (0, 5):
        mixed = sample_of(Case((12,), 4, responses=(((2, 5), (8, 12)),), first=first))
        with pytest.raises(ValueError, match=f"with key {100 + first} a response ends"):
            cache.plan(mixed)


def test_what_follows_from_a_plan_is_made_once_and_goes_with_it() -> None:
    plan = make_plan(sample_of(Case((9,), 4)), OPTIONS)
    zero, one = plan.rows_of(0), plan.rows_of(1)
    first = once(plan, "key", lambda: zero)
    assert once(plan, "key", lambda: one) is first
    assert once(plan, "other", lambda: one) is not first
    assert not first.clean.flags.writeable
    gone = weakref.ref(plan)
    del plan
    gc.collect()
    assert gone() is None


def test_batches_of_a_plan_share_shards() -> None:
    row = sample_of(Case((24,), 4))
    plan = make_plan(row, OPTIONS)
    corruption = corrupt(row, plan, Objective(50, 51, 1))
    one, two = (local_batch(row, plan, corruption, 0) for _ in range(2))
    other = local_batch(row, plan, corruption, 1)
    filled = local_batch(row, plan, corruption, 0, multiple=64)
    assert all(a is b for a, b in zip(one.shards, two.shards, strict=True))
    assert one.shards[1] is other.shards[1]
    assert filled.shards[0].num_rows == 64
