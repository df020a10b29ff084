"""The whole model with every kernel and every way that K/V cross ranks, against the oracle."""

import dataclasses
import functools
from typing import Any

import pytest
from cases import Case
from ranks import run_ranks
from whole import PACKED, SHAPES, Shape, Slot, check_step, degrees, oracle_step, step_on_rank

pytestmark = pytest.mark.ranks

ROWS = (PACKED, Case((24,), 4), Case((9, 15), 4), Case((3,), 4))
SHAPES_HERE = {
    "llama": dataclasses.replace(SHAPES["llama"], rows=ROWS),
    "next-token term": SHAPES["next-token term"],
    "every other layer windowed": SHAPES["interleaved half rotary, every other layer windowed"],
}
# What changes, and the slots (BP, CP) that have it.
CLEAN: tuple[Slot, ...] = (2, 4, (4, 2))
OF_CP: tuple[Slot, ...] = ((1, 2), (1, 4))
WAYS: dict[str, tuple[dict[str, Any], tuple[Slot, ...]]] = {
    "tiled kernel": ({"kernel": "tiled"}, (2,)),
    "auto": ({"exchange": {"form": "auto"}}, CLEAN),
    "all_gather in chunks": ({"exchange": {"form": "all_gather", "most_rows": 9}}, (4,)),
    "needed_rows": ({"exchange": {"form": "needed_rows"}}, CLEAN),
    "needed_rows in chunks": ({"exchange": {"form": "needed_rows", "most_rows": 5}}, (4,)),
    "ring": ({"exchange": {"form": "ring"}}, CLEAN),
    "gathered kept": ({"attention": {"keep_gathered": True}}, (2, (4, 2))),
    "p2p": ({"exchange": {"form": "ring"}}, OF_CP),
    "a2a": ({"attention": {"over_heads": True}}, OF_CP),
    "clean_all_gather": ({"align_chunks": True}, OF_CP),
}


@functools.cache
def truth(name: str) -> dict[str, Any]:
    """One rank, held to the oracle."""
    (one,) = run_ranks(1, step_on_rank, SHAPES_HERE[name], 1)
    found = oracle_step(SHAPES_HERE[name], one["weights"])
    check_step(one, found, "one rank against the oracle")
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES_HERE)
def test_every_way_is_the_oracles_step(name: str, way: str) -> None:
    changed, slots = WAYS[way]
    shape = dataclasses.replace(SHAPES_HERE[name], **changed)
    for slot in slots if name == "llama" else slots[-1:]:
        if way == "a2a" and shape.gpt.heads % degrees(slot)[1]:
            continue  # six heads over four ranks are refused
        for rank, got in enumerate(run_ranks(max(degrees(slot)), step_on_rank, shape, slot)):
            check_step(got, truth(name), f"{way}, rank {rank}, slot {slot}")


def counted(rank: int, world: int, shape: Shape, slot: Slot, recompute: bool) -> dict[str, Any]:
    """A step, and how many rows the kernel's forward was given."""
    from unittest import mock

    from megatron_bp.attention.kernels.tiled import Tiled

    rows = []
    forward = Tiled.forward

    def counting(kernel: Any, q: Any, *args: Any) -> None:
        rows.append(len(q))
        forward(kernel, q, *args)

    with mock.patch.object(Tiled, "forward", counting):
        result = step_on_rank(rank, world, shape, slot, recompute)
    return result | {"forward rows": sum(rows)}


@pytest.mark.parametrize("slot", [1, 2, (4, 2), (1, 2)])
@pytest.mark.parametrize("way", ["rows", "heads"])
def test_recomputed_layers_keep_their_attention(slot: Slot, way: str) -> None:
    """The same step; attention's forward runs once, and so do the passes of K/V and gradients."""
    if way == "heads" and slot != (1, 2):
        pytest.skip("all-to-all over heads is of mode CP")
    shape = dataclasses.replace(
        SHAPES["llama"], kernel="tiled", attention={"over_heads": way == "heads"}
    )
    kept = dataclasses.replace(shape, attention=shape.attention | {"keep_results": True})
    world = max(degrees(slot))
    plain = run_ranks(world, counted, shape, slot, False)
    again = run_ranks(world, counted, shape, slot, True)
    keeping = run_ranks(world, counted, kept, slot, True)
    for one, twice, once in zip(plain, again, keeping, strict=True):
        check_step(once, one, "attention kept")
        assert twice["forward rows"] == 2 * one["forward rows"]
        assert once["forward rows"] == one["forward rows"]
        if way == "rows":
            assert [s.name for s in once["sent"]] == [s.name for s in one["sent"]]
