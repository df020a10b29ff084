"""A check that cannot fail is a defect: the whole-model check must catch every planted fault."""

import pytest
from faults import FAULTS
from ranks import run_ranks
from whole import SHAPES, check_step, oracle_step, step_on_rank

SHAPE = SHAPES["llama"]


@pytest.fixture(scope="module")
def truth() -> dict:
    (one,) = run_ranks(1, step_on_rank, SHAPE, 1)
    return oracle_step(SHAPE, one["weights"])


@pytest.mark.ranks
def test_nothing_planted_passes(truth: dict) -> None:
    for many in run_ranks(2, step_on_rank, SHAPE, 2):
        check_step(many, truth, "2 ranks")


@pytest.mark.ranks
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str, truth: dict) -> None:
    results = run_ranks(2, step_on_rank, SHAPE, 2, False, fault)
    caught = []
    for many in results:
        try:
            check_step(many, truth, fault)
        except AssertionError as error:
            caught.append(str(error))
    assert caught, f"{fault} went unnoticed"
