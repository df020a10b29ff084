"""Who computes which rows in each mode, from the definitions; and the rows of one rank."""

import functools
import math
import time
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
import torch
from cases import CASES, Case, random_row, sample_of

from megatron_bp.batch.shard import LocalBatch, local_batch
from megatron_bp.diffusion.corruption import Corruption, corrupt
from megatron_bp.diffusion.objective import Objective
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.partition import UnitCosts
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.sequence.visibility import visibility

MODES = [(1, 1), (2, 2), (3, 3), (8, 8), (2, 1), (4, 1), (4, 2), (9, 3), (1, 2), (1, 3), (1, 8)]
SEEDS = range(12)
SCORING = ("none", "supervised", "all")


@functools.cache
def plans() -> list[tuple[Sample, SequencePlan, str]]:
    """Every case and some random rows, in every mode, with and without scored clean rows."""
    rows = [random_row(seed) for seed in SEEDS]
    for case in CASES.values():
        options = SequenceOptions(
            case.block_size, clean_relation=case.clean_relation, own_relation=case.own_relation
        )
        rows.append((sample_of(case), options))
    out = []
    for n, (sample, options) in enumerate(rows):
        for bp, cp in MODES:
            for scored in SCORING:
                more = {"block_parallel_size": bp, "context_parallel_size": cp}
                plan = make_plan(sample, replace(options, **more, score_clean=scored))
                out.append((sample, plan, f"row {n}, BP {bp}, CP {cp}, scored {scored}"))
    return out


def target_blocks(sample: Sample, plan: SequencePlan) -> list[int]:
    """Blocks with a row that can be scored, each as often as there are copies."""
    scores = np.flatnonzero(sample.supervised)
    if plan.options.alignment == "next":
        scores = scores[sample.position[scores] > 0] - 1
    return sorted(sorted(set(plan.block_of[scores].tolist())) * plan.options.copies)


def needed(sample: Sample, plan: SequencePlan, units: list[int]) -> set[int]:
    """Clean positions that the units' rows see, or on which clean rows are scored.

    The rest of a document belongs to whoever computes its last unit.
    """
    out: set[int] = set()
    last = {int(d): u for u, d in enumerate(plan.units.document)}
    for unit in units:
        block, document = int(plan.unit_block[unit]), int(plan.units.document[unit])
        stop = int(plan.block_start[block])
        if plan.options.score_clean != "none" and last[document] == unit:
            stop = int(plan.block_stop[block])
            if plan.options.score_clean == "all":
                stop = len(sample.tokens)
        out |= {p for p in range(stop) if sample.document[p] == document}
    return out


def test_every_needed_row_is_computed_and_no_other() -> None:
    """In each clean shard group once; and each corrupted row by one rank."""
    for sample, plan, where in plans():
        slot, group_size = plan.options.slot, plan.options.context_parallel_size
        places = [p for r in range(slot) for p in plan.corrupted_places(r).tolist()]
        assert sorted(places) == [*range(plan.units.offset[-1])], where
        assert plan.unit_block.tolist() == target_blocks(sample, plan), where
        for first in range(0, slot, group_size):
            ranks = range(first, first + group_size)
            clean = [p for r in ranks for p in plan.clean_positions(r).tolist()]
            assert len(clean) == len(set(clean)), where
            mine = [p for r in ranks for p in plan.corrupted_places(r)]
            unit = np.searchsorted(plan.units.offset, mine, side="right") - 1
            assert set(clean) == needed(sample, plan, sorted(set(unit.tolist()))), where


def test_rows_of_a_rank_ascend() -> None:
    """What a rank holds of an interval must be an interval of its memory."""
    for _, plan, where in plans():
        for rank in range(plan.options.slot):
            assert (np.diff(plan.clean_positions(rank)) > 0).all(), where
            assert (np.diff(plan.corrupted_places(rank)) > 0).all(), where


def test_a_unit_is_whole_on_one_rank_except_in_mode_cp() -> None:
    for _, plan, where in plans():
        sizes = np.diff(plan.units.offset)
        owned: dict[int, int] = {}
        for rank in range(plan.options.slot):
            places = plan.corrupted_places(rank)
            unit = np.searchsorted(plan.units.offset, places, side="right") - 1
            for u, rows in zip(*np.unique(unit, return_counts=True), strict=True):
                if plan.options.splits_units:
                    assert plan.unit_owner[u] == -1, where
                else:
                    assert (rows, plan.unit_owner[u]) == (sizes[u], rank), where
                    owned[int(u)] = rank
        assert plan.options.splits_units or len(owned) == len(plan.units), where


def test_rows_see_only_what_their_group_or_rank_holds() -> None:
    for _, plan, where in plans():
        for rank in range(plan.options.slot):
            mine, group = plan.rows_of(rank), plan.shard_group(rank)
            clean = np.concatenate([plan.clean_positions(r) for r in group])
            own = plan.corrupted_places(rank)
            if plan.options.splits_units:
                own = np.concatenate([plan.corrupted_places(r) for r in group])
            seen = visibility(plan, mine.clean, mine.corrupted)
            for held, lo, hi in (
                (clean, seen.clean_lo.numpy(), seen.clean_hi.numpy()),
                (own, seen.own_lo.numpy(), seen.own_hi.numpy()),
            ):
                held = np.sort(held)
                found = np.searchsorted(held, hi) - np.searchsorted(held, lo)
                assert (found == hi - lo).all(), where


def test_the_scorer_is_the_lowest_rank_that_computes_a_position() -> None:
    for sample, plan, where in plans():
        want = np.full(len(sample.tokens), -1)
        for rank in reversed(range(plan.options.slot)):
            want[plan.clean_positions(rank)] = rank
        assert plan.scorer.tolist() == want.tolist(), where


def test_each_mode_has_the_same_rows() -> None:
    rows: dict[str, set[int]] = {}
    for _, plan, where in plans():
        name = f"{where.split(',')[0]} {plan.options.score_clean}"
        rows.setdefault(name, set()).add(plan.num_rows)
    assert all(len(found) == 1 for found in rows.values())


# --- units over groups ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_the_split_over_groups_is_optimal(seed: int) -> None:
    """Against every way to cut the units into contiguous shares, costs counted row by row."""
    sample, options = random_row(seed)
    options = replace(options, score_clean=SCORING[seed % 3])
    plan = make_plan(sample, options)
    units, groups = len(plan.units), 2 + seed % 3
    if units > 14:
        groups = 2

    def cost(first: int, stop: int) -> int:
        clean = np.array(sorted(needed(sample, plan, [*range(first, stop)])), dtype=np.int32)
        offset = plan.units.offset
        seen = visibility(plan, clean, np.arange(offset[first], offset[stop]))
        return seen.pairs() + options.row_cost * len(seen.index)

    costs = {(a, b): cost(a, b) for a in range(units + 1) for b in range(a, units + 1)}
    best = min(
        max(costs[bounds] for bounds in pairwise((0, *cuts, units)))
        for cuts in combinations_with_replacement(range(units + 1), groups - 1)
    )
    for cp in (1, 2):
        degrees = {"block_parallel_size": groups * cp, "context_parallel_size": cp}
        got = make_plan(sample, replace(options, **degrees)).cost.reshape(groups, cp).sum(1)
        assert got.max() == best


def test_shares_are_contiguous() -> None:
    for _, plan, where in plans():
        if not plan.options.splits_units:
            group = plan.unit_owner // plan.options.context_parallel_size
            assert (np.diff(group) >= 0).all(), where


def test_many_units_are_split_in_milliseconds() -> None:
    """They take about five; a loop over units in each round of halving would take seconds."""
    units = 32768
    document = np.repeat(np.arange(64, dtype=np.int32), units // 64)
    prefix = np.tile(np.arange(units // 64, dtype=np.int64) * 1000, 64)
    costs = UnitCosts.of(np.full(units, 32000, dtype=np.int64), prefix, document)
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        bounds = costs.split(64)
        took.append(time.perf_counter() - begin)
    assert bounds[-1] == units
    assert min(took) < 0.1


# --- inside a group, by hand ---------------------------------------------------------------------


def runs(plan: SequencePlan) -> tuple[list[list[int]], list[list[int]]]:
    """[rank, start, stop] of the clean and of the corrupted runs."""
    both = []
    for found in (plan.clean_runs, plan.corrupted_runs):
        columns = (found.rank, found.start, found.stop)
        both.append([list(run) for run in zip(*(c.tolist() for c in columns), strict=True)])
    return both[0], both[1]


def plan_of(case: Case, bp: int, cp: int, scored: bool = False) -> SequencePlan:
    """Every unit at home."""
    options = SequenceOptions(
        case.block_size, bp, cp, score_clean=SCORING[scored], max_imbalance=math.inf
    )
    return make_plan(sample_of(case), options)


def test_csbp_by_hand() -> None:
    """16 blocks of 8 rows, the last of 4: cuts next to 30.5, 61 and 92.5 rows."""
    clean, corrupted = runs(plan_of(Case((64,), 4), 2, 2))
    assert clean == [[0, 0, 16], [0, 48, 60], [1, 16, 48]]
    assert corrupted == [[0, 0, 16], [0, 48, 64], [1, 16, 48]]


def test_scored_clean_rows_reach_the_end_of_the_last_target_block() -> None:
    clean, _ = runs(plan_of(Case((64,), 4), 2, 2, scored=True))
    assert clean == [[0, 0, 16], [0, 48, 64], [1, 16, 48]]


def test_documents_of_one_block_are_dealt_out_though_none_needs_a_clean_row() -> None:
    plan = plan_of(Case((4, 4, 3, 4, 4, 4, 4, 1), 4), 2, 2)
    clean, corrupted = runs(plan)
    assert clean == []
    rows = [sum(b - a for r, a, b in corrupted if r == rank) for rank in range(2)]
    assert rows == [17, 11]


def test_bp_by_hand() -> None:
    """Four blocks of 4 in one document; unit i costs 16 + 16 i, its prefix 8 i (i + 1).

    Units 0 to 2 cost 96 + 48; unit 3 alone costs 64 + 96, less than any other second share.
    """
    plan = plan_of(Case((16,), 4), 2, 1)
    clean, corrupted = runs(plan)
    assert clean == [[0, 0, 8], [1, 0, 12]]
    assert corrupted == [[0, 0, 12], [1, 12, 16]]
    assert plan.cost.tolist() == [96 + 48, 64 + 96]
    assert plan.scorer.tolist() == [0] * 8 + [1] * 4 + [-1] * 4


def test_hybrid_by_hand() -> None:
    """The shares of test_bp_by_hand, each in zigzag over two ranks."""
    clean, corrupted = runs(plan_of(Case((16,), 4), 4, 2))
    # group 0: blocks of 8, 8 and 4 rows, cut next to 5, 10 and 15: at 8, 8 and 16
    assert [run for run in clean if run[0] < 2] == [[0, 0, 4], [1, 4, 8]]
    assert [run for run in corrupted if run[0] < 2] == [[0, 0, 4], [0, 8, 12], [1, 4, 8]]
    # group 1: three clean blocks and one corrupted of 4 rows
    assert [run for run in clean if run[0] >= 2] == [[2, 0, 4], [3, 4, 12]]
    assert [run for run in corrupted if run[0] >= 2] == [[2, 12, 16]]


def test_cp_by_hand() -> None:
    """24 corrupted and 20 needed clean rows in four chunks of 11, dealt head-tail."""
    clean, corrupted = runs(plan_of(Case((24,), 4), 1, 2))
    assert corrupted == [[0, 0, 11], [1, 11, 24]]
    assert clean == [[0, 9, 20], [1, 0, 9]]


def test_cp_cuts_needed_rows_over_documents() -> None:
    """Documents of 5 and 7 need [0, 4) and [5, 9); 12 + 8 rows in chunks of 5."""
    clean, corrupted = runs(plan_of(Case((5, 7), 4), 1, 2))
    assert corrupted == [[0, 0, 5], [1, 5, 12]]
    assert clean == [[0, 3, 4], [0, 5, 9], [1, 0, 3]]


# --- the rows of one rank ------------------------------------------------------------------------

AR = Objective(50, 51, 1, ar_weight=0.5)


def batches(
    sample: Sample, plan: SequencePlan, multiple: int
) -> tuple[Corruption, list[LocalBatch]]:
    options = plan.options
    objective = replace(AR, alignment=options.alignment)
    if options.score_clean == "none":
        objective = replace(objective, ar_weight=0.0)
    else:
        objective = replace(objective, ar_scored=options.score_clean)
    corruption = corrupt(sample, plan, objective)
    ranks = range(plan.options.slot)
    return corruption, [local_batch(sample, plan, corruption, r, multiple=multiple) for r in ranks]


@pytest.mark.parametrize("multiple", [1, 4])
def test_ranks_share_out_rows_tokens_counts_and_weights(multiple: int) -> None:
    for sample, plan, where in plans():
        corruption, parts = batches(sample, plan, multiple)
        assert sum(int(b.own_rows.sum()) for b in parts) == plan.num_rows, where
        assert sum(b.clean_tokens for b in parts) == (sample.document >= 0).sum(), where
        for k, term in enumerate(corruption.terms):
            assert sum(b.terms[k].count for b in parts) == term.count, where
            weights = sorted(w for b in parts for w in b.terms[k].weights.tolist() if w)
            assert weights == sorted(w for w in term.weights.tolist() if w), where
        for rank, batch in enumerate(parts):
            index = batch.index
            rows = len(index)
            assert rows >= 1, where
            assert rows % multiple == 0, where
            assert len(batch.own_rows) == len(batch.input_ids) == rows, where
            assert batch.own_rows.dtype == torch.bool
            clean = index[: batch.num_clean]
            filling = clean < 0
            assert (filling.sum() < multiple) or rows == multiple, where
            assert filling.tolist() == sorted(filling.tolist()), "filling rows come last"
            scorer = torch.from_numpy(plan.scorer)[clean.long()]
            assert torch.equal(batch.own_rows[: batch.num_clean], ~filling & (scorer == rank))
            assert batch.own_rows[batch.num_clean :].all(), where
            mine = batch.shards[rank % plan.options.context_parallel_size]
            assert (mine.num_clean, mine.num_rows) == (batch.num_clean, rows), where
            assert mine.num_sent == (rows if plan.options.splits_units else len(mine.clean))


def test_each_scored_clean_row_is_scored_once_on_its_label() -> None:
    for sample, plan, where in plans():
        if plan.options.score_clean == "none":
            continue
        corruption, parts = batches(sample, plan, 1)
        want, got = corruption.terms[1], {}
        for batch in parts:
            term = batch.terms[1]
            for row in term.weights.nonzero().flatten().tolist():
                position = int(batch.index[row])
                assert position not in got, where
                got[position] = int(term.labels[row])
        scored = np.flatnonzero(want.weights).tolist()
        assert got == {p: int(want.labels[p]) for p in scored}, where


def test_clean_rows_that_nobody_computes_are_not_scored() -> None:
    sample = sample_of(Case((10,), 4))
    plan = make_plan(sample, SequenceOptions(4))
    with pytest.raises(ValueError, match="plan with SequenceOptions"):
        local_batch(sample, plan, corrupt(sample, plan, AR), 0)
