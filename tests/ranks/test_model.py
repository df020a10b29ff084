"""Loss and gradients of the whole model: ranks against one rank, and one against the oracle."""

import pytest
from ranks import run_ranks
from whole import SHAPES, check_step, oracle_step, step_on_rank

LAYOUTS = ((2, 2), (4, 4), (4, 2), (2, 1))  # ranks, ranks that share a sequence


@pytest.mark.ranks
@pytest.mark.parametrize("name", SHAPES)
def test_whole_model(name: str) -> None:
    shape = SHAPES[name]
    (one,) = run_ranks(1, step_on_rank, shape, 1)
    check_step(one, oracle_step(shape, one["weights"]), "one rank against the oracle")
    for world, slot in LAYOUTS:
        for rank, many in enumerate(run_ranks(world, step_on_rank, shape, slot)):
            check_step(many, one, f"rank {rank} of {world}, slot {slot}")


@pytest.mark.ranks
def test_full_recompute_changes_nothing_and_never_gathers_four_times() -> None:
    shape = SHAPES["llama"]
    plain = run_ranks(2, step_on_rank, shape, 2)
    again = run_ranks(2, step_on_rank, shape, 2, True)
    for one, other in zip(plain, again, strict=True):
        check_step(other, one, "full recompute")
        assert [s for s in other["sent"] if "all_reduce" not in s.name] != []
        for name in ("all_gather_into_tensor", "all_to_all_single"):
            count = [sum(s.name == name for s in run["sent"]) for run in (one, other)]
            assert count[0] == count[1], name
