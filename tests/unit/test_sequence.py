"""Packing, block grid, plan and visibility against the oracle, on every case and on random rows."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from cases import CASES, Case, sample_of

from megatron_bp.data.document import Document
from megatron_bp.sequence.blocks import block_grid
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.sequence.visibility import Visibility, corrupted_positions, visibility

# (BP, CP): single, CSBP, BP, hybrid, CP
MODES = [(1, 1), (2, 2), (3, 3), (8, 8), (2, 1), (4, 1), (4, 2), (9, 3), (1, 2), (1, 3), (1, 8)]
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
in_modes = pytest.mark.parametrize("degrees", MODES, ids=[f"bp{bp} cp{cp}" for bp, cp in MODES])


def plan_of(case: Case, degrees: tuple[int, int] = (1, 1), **options: Any) -> SequencePlan:
    return make_plan(sample_of(case), options_of(case, degrees, **options))


def options_of(case: Case, degrees: tuple[int, int], **options: Any) -> SequenceOptions:
    relations = {"clean_relation": case.clean_relation, "own_relation": case.own_relation}
    return SequenceOptions(case.block_size, *degrees, **(relations | options))


def rows_of(plan: SequencePlan, rank: int, window: int | None, filling: int = 0) -> Visibility:
    clean, corrupted = plan.clean_positions(rank), plan.corrupted_places(rank)
    return visibility(plan, clean, corrupted, window, filling)


def all_rows(plan: SequencePlan, window: int | None = None) -> Visibility:
    """Every clean position, whether a rank computes it or not, and every corrupted row."""
    clean = np.flatnonzero(plan.block_of >= 0).astype(np.int32)
    return visibility(plan, clean, np.arange(plan.units.offset[-1]), window)


def dense(visible: Visibility, length: int, rows: int) -> torch.Tensor:
    """bool [length + rows, length + rows]: each row of `visible` at its place; others see none."""
    mask = torch.zeros(length + rows, length + rows, dtype=torch.bool)
    for s, index in enumerate(visible.index.tolist()):
        row = index if s < visible.num_clean else length + index
        mask[row, int(visible.clean_lo[s]) : int(visible.clean_hi[s])] = True
        mask[row, length + int(visible.own_lo[s]) : length + int(visible.own_hi[s])] = True
    return mask


def random_row(seed: int) -> tuple[Sample, SequenceOptions, int | None]:
    """Random documents, some tokens supervised only; random block size, relations and window."""
    rng = np.random.default_rng(seed)
    documents = []
    for key, length in enumerate(rng.integers(1, 14, rng.integers(1, 6))):
        prompt = rng.integers(0, length + 1) if rng.random() < 0.5 else 0
        tokens = np.zeros(length, dtype=np.int32)
        documents.append(Document(tokens, np.arange(length) >= prompt, key))
    length = sum(len(d.tokens) for d in documents) + int(rng.integers(0, 4))
    options = SequenceOptions(
        block_size=int(rng.integers(1, 7)),
        clean_relation=("block", "token")[rng.integers(2)],
        own_relation=("bidirectional", "causal")[rng.integers(2)],
    )
    return pack(documents, length), options, (None, 1, 4, 6)[rng.integers(4)]


def wanted(sample: Sample, options: SequenceOptions, window: int | None) -> torch.Tensor:
    return oracle.visible(
        sample.document,
        options.block_size,
        clean_relation=options.clean_relation,
        own_relation=options.own_relation,
        window=window,
        corrupted=oracle.corrupted_rows(sample.document, options.block_size, sample.supervised),
    )


# --- packing and block grid ----------------------------------------------------------------------


@every_case
def test_positions_restart_in_each_document(case: Case) -> None:
    sample = sample_of(case)
    assert sample.position.tolist() == oracle.positions(sample.document)


def test_pack_joins_documents_and_pads_with_document_minus_one() -> None:
    one = Document(np.array([7, 8], np.int32), np.array([True, False]), 40)
    two = Document(np.array([9], np.int32), np.array([True]), 41)
    sample = pack([one, two], 5, split=2, epoch=3)
    assert sample.tokens.tolist() == [7, 8, 9, 0, 0]
    assert sample.document.tolist() == [0, 0, 1, -1, -1]
    assert sample.supervised.tolist() == [True, False, True, False, False]
    assert sample.document_keys.tolist() == [40, 41]
    assert (sample.split, sample.document_epochs.tolist()) == (2, [3, 3])


def test_documents_that_do_not_fit_are_an_error() -> None:
    document = Document(np.zeros(4, np.int32), np.ones(4, np.bool_), 0)
    with pytest.raises(ValueError, match=r"8 tokens, more than the row's 7"):
        pack([document, document], 7)


@every_case
def test_block_grid(case: Case) -> None:
    sample = sample_of(case)
    grid = block_grid(sample.document, sample.position, case.block_size)
    block = oracle.block_of(sample.document, case.block_size)
    assert grid.block_of.tolist() == block
    assert len(grid.start) == len(set(block) - {-1})
    for b in range(len(grid.start)):
        here = [i for i, other in enumerate(block) if other == b]
        assert [grid.start[b], grid.stop[b]] == [here[0], here[-1] + 1]
        document = sample.document[here[0]]
        assert grid.document[b] == document
        assert grid.document_start[b] == sample.document.tolist().index(document)
        assert grid.index[b] == sample.position[here[0]] // case.block_size


@pytest.mark.parametrize("seed", range(20))
def test_block_grid_of_random_rows(seed: int) -> None:
    sample, options, _ = random_row(seed)
    grid = block_grid(sample.document, sample.position, options.block_size)
    assert grid.block_of.tolist() == oracle.block_of(sample.document, options.block_size)


def test_sizes_without_a_plan_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        SequenceOptions(0)
    for bp, cp in ((4, 3), (2, 4), (0, 1), (1, 0), (3, 2)):
        with pytest.raises(ValueError, match=f"BP {bp} with CP {cp}: degrees are at least 1"):
            SequenceOptions(4, block_parallel_size=bp, context_parallel_size=cp)


# --- units ---------------------------------------------------------------------------------------


@every_case
def test_corrupted_rows_are_those_of_blocks_with_a_supervised_token(case: Case) -> None:
    sample, plan = sample_of(case), plan_of(case)
    want = oracle.corrupted_rows(sample.document, case.block_size, sample.supervised)
    assert corrupted_positions(plan).tolist() == want


@pytest.mark.parametrize("seed", range(20))
def test_corrupted_rows_where_a_prompt_ends_inside_a_document(seed: int) -> None:
    sample, options, _ = random_row(seed)
    want = oracle.corrupted_rows(sample.document, options.block_size, sample.supervised)
    assert corrupted_positions(make_plan(sample, options)).tolist() == want


@every_case
def test_a_unit_is_one_block_of_one_document(case: Case) -> None:
    plan = plan_of(case)
    document = sample_of(case).document
    for i in range(len(plan.units)):
        unit, block = plan.units[i], plan.unit_block[i]
        assert np.flatnonzero(plan.block_of == block).tolist() == [*range(unit.start, unit.stop)]
        assert unit.document == document[unit.start]
        assert unit.copy == 0


@in_modes
def test_only_padding_has_no_block_unit_row_or_cost(degrees: tuple[int, int]) -> None:
    plan = plan_of(CASES["only padding"], degrees, row_cost=5)
    assert plan.block_of.tolist() == [-1] * 6
    assert (len(plan.block_start), len(plan.units), plan.num_rows) == (0, 0, 0)
    assert plan.cost.tolist() == [0] * max(degrees)
    for rank in range(max(degrees)):
        assert len(plan.clean_positions(rank)) + len(plan.corrupted_places(rank)) == 0


# --- visibility ----------------------------------------------------------------------------------


@in_modes
@every_case
def test_visibility_of_all_ranks_is_the_dense_mask(case: Case, degrees: tuple[int, int]) -> None:
    """Rows of ranks are those of the oracle; replicas see what the first of them sees."""
    sample, plan = sample_of(case), plan_of(case, degrees)
    want = wanted(sample, plan.options, case.window)
    length, rows = len(sample.tokens), len(want) - len(sample.tokens)
    want[:length][torch.from_numpy(plan.scorer < 0)] = False  # computed by nobody
    got = torch.zeros_like(want)
    for rank in range(max(degrees)):
        mine = dense(rows_of(plan, rank, case.window), length, rows)
        again = (got.any(1) & mine.any(1)).nonzero().flatten()
        assert torch.equal(got[again], mine[again])
        assert (again < length).all(), "a corrupted row is computed on two ranks"
        got |= mine
    assert torch.equal(got, want)


@every_case
def test_visibility_of_every_position_is_the_dense_mask(case: Case) -> None:
    sample, plan = sample_of(case), plan_of(case)
    want = wanted(sample, plan.options, case.window)
    length = len(sample.tokens)
    assert torch.equal(dense(all_rows(plan, case.window), length, len(want) - length), want)


@pytest.mark.parametrize("seed", range(20))
def test_visibility_of_random_rows_is_the_dense_mask(seed: int) -> None:
    sample, options, window = random_row(seed)
    want = wanted(sample, options, window)
    length = len(sample.tokens)
    got = dense(all_rows(make_plan(sample, options), window), length, len(want) - length)
    assert torch.equal(got, want)


@pytest.mark.parametrize("seed", range(20))
def test_an_interval_is_never_reversed(seed: int) -> None:
    """A window that ends before the unit's block leaves an empty interval, not a negative one."""
    sample, options, _ = random_row(seed)
    visible = all_rows(make_plan(sample, options), 2)
    assert (visible.clean_lo <= visible.clean_hi).all()
    assert (visible.own_lo <= visible.own_hi).all()


@every_case
def test_pairs_are_the_visible_entries(case: Case) -> None:
    sample, plan = sample_of(case), plan_of(case)
    want = wanted(sample, plan.options, case.window)
    assert all_rows(plan, case.window).pairs() == int(want.sum())


def test_rows_that_fill_up_see_nothing_and_come_last_in_the_clean_part() -> None:
    plan = plan_of(CASES["one document"], (2, 2))
    plain, filled = rows_of(plan, 1, None), rows_of(plan, 1, None, filling=2)
    at, rows = plain.num_clean, len(plain.index)
    assert (filled.num_clean, len(filled.index)) == (at + 2, rows + 2)
    for name in ("clean_lo", "clean_hi", "own_lo", "own_hi", "index"):
        got = getattr(filled, name)
        assert got.dtype == torch.int32
        assert torch.equal(torch.cat([got[:at], got[at + 2 :]]), getattr(plain, name))
        assert got[at : at + 2].tolist() == ([-1, -1] if name == "index" else [0, 0])


# --- known numbers: objectives.md section 5, cases 1 and 2 ---------------------------------------


@pytest.mark.parametrize(
    ("length", "block_size", "relation", "pairs"),
    [
        (8, 4, "block", 96),
        (8, 2, "block", 80),
        (16, 4, "block", 320),
        (8, 4, "token", 84),
        (8, 2, "token", 76),
        (16, 4, "token", 296),
    ],
)
def test_visible_pairs_of_one_document(
    length: int, block_size: int, relation: str, pairs: int
) -> None:
    plan = plan_of(Case((length,), block_size, clean_relation=relation))
    assert all_rows(plan).pairs() == pairs


def test_visible_pairs_and_positions_of_two_documents() -> None:
    sample, plan = sample_of(Case((5, 6), 4)), plan_of(Case((5, 6), 4))
    mask = dense(all_rows(plan), 11, 11)
    first = torch.from_numpy(np.tile(sample.document == 0, 2))
    assert all_rows(plan).pairs() == 98
    assert int(mask[first].sum()) == 42
    assert int(mask[~first].sum()) == 56
    assert sample.position.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]


# --- cost ----------------------------------------------------------------------------------------


@in_modes
@every_case
def test_cost_of_a_rank_is_its_visible_pairs_without_a_window(
    case: Case, degrees: tuple[int, int]
) -> None:
    plan = plan_of(case, degrees)
    assert plan.cost.tolist() == [rows_of(plan, r, None).pairs() for r in range(max(degrees))]


@pytest.mark.parametrize("seed", range(20))
def test_cost_of_random_rows_is_their_visible_pairs(seed: int) -> None:
    sample, options, _ = random_row(seed)
    for bp, cp in MODES:
        plan = make_plan(sample, replace(options, block_parallel_size=bp, context_parallel_size=cp))
        assert plan.cost.tolist() == [rows_of(plan, r, None).pairs() for r in range(max(bp, cp))]


@every_case
def test_row_cost_is_paid_for_every_row(case: Case) -> None:
    for degrees in ((2, 2), (1, 2)):  # in other modes it decides who computes what, as moves do
        stay = {"max_imbalance": math.inf}
        free, paid = plan_of(case, degrees, **stay), plan_of(case, degrees, row_cost=1000, **stay)
        rows = [len(rows_of(free, rank, None).index) for rank in range(2)]
        assert (paid.cost - free.cost).tolist() == [1000 * n for n in rows]
