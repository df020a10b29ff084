"""A check that cannot fail is a defect: the whole-model check must catch every planted fault."""

import functools
from typing import Any

import pytest
from faults import FAULTS
from ranks import RankError, run_ranks
from whole import SHAPES, Slot, check_step, oracle_step, step_on_rank

COPIES = "three copies, next, response grid, ids left alone, corrupted count"
# Where a fault shows, if not in CSBP on the first shape: shape, and BP and CP.
ELSEWHERE: dict[str, tuple[str, Slot]] = {
    "one count for all terms": ("next-token term", 2),
    "loss of a clean row counted by every replica": ("next-token term", (2, 1)),
    "prefix one block short": ("llama", (2, 1)),
    "unit computed twice": ("llama", (2, 1)),
    "gradients of corrupted keys not sent back": ("llama", (1, 2)),
    "a row scores its own token, not the next": ("fast_dllm_v2", 2),
    "views that are not complementary": ("fast_dllm_v2", 2),
    "one copy less": (COPIES, 2),
    "ids to be left alone are corrupted": (COPIES, 2),
    "terms that share a count have their own": ("nemotron", 2),
    "only corrupted tokens scored": ("diffusion_gemma", 2),
    "prompts not scored by the next-token term": ("diffusion_gemma", 2),
    "blocks of a response count from the document": ("diffusion_gemma", 2),
    "a block's window counts from each row": ("window from the block, two copies", 2),
}


@functools.cache
def truth(name: str) -> dict[str, Any]:
    (one,) = run_ranks(1, step_on_rank, SHAPES[name], 1)
    return oracle_step(SHAPES[name], one["weights"])


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "slot"), sorted({("llama", 2), *ELSEWHERE.values()}, key=str))
def test_nothing_planted_passes(name: str, slot: Slot) -> None:
    for many in run_ranks(2, step_on_rank, SHAPES[name], slot):
        check_step(many, truth(name), "2 ranks")


@pytest.mark.ranks
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str) -> None:
    name, slot = ELSEWHERE.get(fault, ("llama", 2))
    want = truth(name)
    caught = []
    try:
        for many in run_ranks(2, step_on_rank, SHAPES[name], slot, False, fault):
            try:
                check_step(many, want, fault)
            except AssertionError as error:
                caught.append(str(error))
    except RankError as error:
        if "that no rank of its clean shard group holds" not in str(error):
            raise
        caught.append(str(error))  # the product itself noticed
    assert caught, f"{fault} went unnoticed"
