"""Loss and gradients of the whole model: ranks against one rank, and one against the oracle."""

import pytest
import torch
from cases import Case
from ranks import run_ranks
from whole import LLAMA, PACKED, SHAPES, Shape, Slot, check_step, oracle_step, step_on_rank

# ranks; BP and CP, a number alone for both
LAYOUTS: tuple[tuple[int, Slot], ...] = (
    (2, 2),
    (4, 4),
    (4, 2),
    (2, 1),
    (2, (2, 1)),
    (4, (4, 1)),
    (4, (4, 2)),
    (2, (1, 2)),
    (4, (1, 4)),
)


# A shape that is about the model, the noise or the loss has one layout of each mode.
OF_EACH_MODE: tuple[tuple[int, Slot], ...] = ((4, 4), (2, (2, 1)), (4, (4, 2)), (2, (1, 2)))
ON_ALL = ("llama", "next-token term", "fewer units than ranks, nothing supervised")


@pytest.mark.ranks
@pytest.mark.parametrize("name", SHAPES)
def test_whole_model(name: str) -> None:
    shape = SHAPES[name]
    (one,) = run_ranks(1, step_on_rank, shape, 1)
    check_step(one, oracle_step(shape, one["weights"]), "one rank against the oracle")
    for world, slot in LAYOUTS if name in ON_ALL else OF_EACH_MODE:
        for rank, many in enumerate(run_ranks(world, step_on_rank, shape, slot)):
            check_step(many, one, f"rank {rank} of {world}, slot {slot}")


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "slot"), [(2, 2), (2, (2, 1)), (4, (4, 2)), (2, (1, 2))])
def test_full_recompute_changes_nothing_and_never_gathers_four_times(
    world: int, slot: Slot
) -> None:
    shape = SHAPES["llama"]
    plain = run_ranks(world, step_on_rank, shape, slot)
    again = run_ranks(world, step_on_rank, shape, slot, True)
    for one, other in zip(plain, again, strict=True):
        check_step(other, one, "full recompute")
        exchanged = [s for s in other["sent"] if "all_reduce" not in s.name]
        assert (exchanged == []) == (slot == (2, 1))
        for name in ("all_gather_into_tensor", "all_to_all_single"):
            count = [sum(s.name == name for s in run["sent"]) for run in (one, other)]
            assert count[0] == count[1], name


@pytest.mark.ranks
def test_packed_documents_do_not_see_each_other() -> None:
    """Case 2: loss sum and gradients of a pack are those of its documents alone."""
    packed = Shape(LLAMA, (Case((5, 6), 4),))
    (together,) = run_ranks(1, step_on_rank, packed, 1)
    alone = []
    for case in (Case((5,), 4), Case((6,), 4, first=1)):
        shape = Shape(LLAMA, (case,))
        alone += run_ranks(1, step_on_rank, shape, 1)
    assert together["count"] == [sum(a["count"][0] for a in alone)] == [11]
    for name, gradient in together["grads"].items():
        apart = sum(a["grads"][name] * a["count"][0] for a in alone)
        torch.testing.assert_close(gradient * 11, apart, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks
def test_padding_of_the_vocabulary_changes_nothing() -> None:
    """Case 12 on one rank: 300 ids, padded to 384 and to 512, give one loss."""
    results = {}
    for multiple, padded in ((128, 384), (512, 512), (1, 300)):
        shape = Shape(LLAMA, (PACKED,), vocabulary=300, divisible_by=multiple)
        (results[padded],) = run_ranks(1, step_on_rank, shape, 1)
        weights = results[padded]["weights"]
        assert len(weights["output_layer.weight"]) == padded
        assert weights["output_layer.weight"][300:].count_nonzero() == (padded - 300) * LLAMA.hidden
        assert results[padded]["grads"]["output_layer.weight"][300:].count_nonzero() == 0
    assert results[384]["loss"] == results[512]["loss"] == results[300]["loss"]
