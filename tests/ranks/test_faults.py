"""A check that cannot fail is a defect: the whole-model check must catch every planted fault."""

import functools
from typing import Any

import pytest
from faults import FAULTS
from ranks import run_ranks
from whole import SHAPES, check_step, oracle_step, step_on_rank

OTHER_SHAPE = {"one count for all terms": "next-token term"}


@functools.cache
def truth(name: str) -> dict[str, Any]:
    (one,) = run_ranks(1, step_on_rank, SHAPES[name], 1)
    return oracle_step(SHAPES[name], one["weights"])


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["llama", *OTHER_SHAPE.values()])
def test_nothing_planted_passes(name: str) -> None:
    for many in run_ranks(2, step_on_rank, SHAPES[name], 2):
        check_step(many, truth(name), "2 ranks")


@pytest.mark.ranks
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str) -> None:
    name = OTHER_SHAPE.get(fault, "llama")
    caught = []
    for many in run_ranks(2, step_on_rank, SHAPES[name], 2, False, fault):
        try:
            check_step(many, truth(name), fault)
        except AssertionError as error:
            caught.append(str(error))
    assert caught, f"{fault} went unnoticed"
