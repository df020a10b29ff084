"""Self-conditioning: two passes on every layout against the dense definition, by every gradient."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from cases import Case
from faults import CONDITIONING_FAULTS
from ranks import run_ranks
from topology import TABLES, Topology, joined, same, topology_on_rank
from torch import Tensor
from whole import (
    LLAMA,
    PACKED,
    PRESETS,
    QWEN3,
    Shape,
    check_step,
    coins_of,
    oracle_step,
    step_on_rank,
)

pytestmark = pytest.mark.ranks

ROWS = (PACKED, Case((24,), 4), Case((9, 15), 4), Case((1, 6), 4))
PROMPTS = (
    Case((10, 8, 9), 4, prompts=(0,), clean_relation="token"),
    Case((24,), 4, clean_relation="token"),
    Case((1, 6), 4, clean_relation="token"),
    Case((9,), 4, prompts=(0,), clean_relation="token"),
)


def _conditioned(shape: Shape, **more: Any) -> Shape:
    objective = shape.objective | {"self_conditioning": 0.6, **more}
    return dataclasses.replace(shape, objective=objective)


SHAPES = {
    "llama": Shape(LLAMA, ROWS, objective={"self_conditioning": 0.5}),
    # 300 ids padded to 384; tied, uniform noise, a second term, all documents conditioned
    "tied, uniform, always": Shape(
        QWEN3,
        PROMPTS,
        vocabulary=300,
        divisible_by=128,
        objective={"self_conditioning": 1.0, "noise": "uniform", "ar_weight": 0.7},
    ),
    "mask token left out": Shape(
        LLAMA, ROWS, objective={"self_conditioning": 0.5, "exclude_mask_logit": True}
    ),
    "no coin on": Shape(LLAMA, ROWS, objective={"self_conditioning": 1e-12}),
    "diffusion_gemma": _conditioned(PRESETS["diffusion_gemma"]),
    "next, complementary copies": _conditioned(PRESETS["fast_dllm_v2"], exclude_mask_logit=True),
    # 50 ids padded to 128 x TP: the last TP rank has padding alone
    "50 ids": Shape(LLAMA, (PACKED,) * 4, divisible_by=128, objective={"self_conditioning": 0.5}),
}
CASES = [
    (Topology(2, slot=2), list(SHAPES)),
    (Topology(2, slot=2, degrees_of_slot=(1, 2)), ["llama", "diffusion_gemma"]),
    (Topology(2, slot=2, degrees_of_slot=(2, 1)), ["tied, uniform, always"]),
    (Topology(4, slot=4, degrees_of_slot=(4, 2)), ["llama", "next, complementary copies"]),
    (
        Topology(2, tp=2),
        ["llama", "tied, uniform, always", "next, complementary copies", "50 ids"],
    ),
    (
        Topology(2, tp=2, sequence_parallel=True),
        ["llama", "tied, uniform, always", "diffusion_gemma", "no coin on"],
    ),
    (Topology(4, tp=2, slot=2), ["llama"]),
    (Topology(4, tp=2, slot=2, sequence_parallel=True, recompute="selective"), ["llama"]),
    (Topology(2), ["llama", "no coin on"]),
    (Topology(4, slot=2, distributed_optimizer=True), ["llama"]),
    (Topology(2, slot=2, recompute="full"), ["llama"]),
]
MODULE = [f"self_conditioning.{name}.weight" for name in ("norm", "gate", "up", "down")]


@functools.cache
def truth(name: str) -> dict[str, Any]:
    """One rank, held to the oracle, its vocabulary tables cut to the true ids."""
    shape = SHAPES[name]
    (one,) = run_ranks(1, step_on_rank, shape, 1)
    want = oracle_step(shape, one["weights"])
    check_step(one, want, "one rank against the oracle")
    for table in TABLES:
        if table in want["grads"]:
            want["grads"][table] = want["grads"][table][: shape.vocabulary]
    return want


def test_coins_are_on_and_off_in_one_row() -> None:
    coins = coins_of(SHAPES["llama"], PACKED, 0)
    assert coins is not None
    assert set(coins) == {True, False}, coins


@pytest.mark.parametrize("name", SHAPES)
def test_the_module_learns_where_a_coin_is_on(name: str) -> None:
    for parameter in MODULE:
        assert bool(truth(name)["grads"][parameter].any()) == (name != "no coin on"), parameter


@pytest.mark.parametrize(
    ("topology", "name"),
    [(topology, name) for topology, names in CASES for name in names],
    ids=lambda value: str(value),
)
def test_a_topology_trains_the_same_model(topology: Topology, name: str) -> None:
    shape = SHAPES[name]
    results = run_ranks(topology.ranks, topology_on_rank, shape, topology)
    check_step(joined(results, shape, same), truth(name), f"{topology}")


EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
}


@pytest.mark.parametrize(
    "topology",
    [Topology(2, ep=2), Topology(2, tp=2, sequence_parallel=True, ep=2)],
    ids=lambda value: str(value),
)
def test_the_first_pass_counts_in_no_statistics_of_experts(topology: Topology) -> None:
    """Ranks of EP read other samples, in which a coin may be off everywhere."""
    shape = dataclasses.replace(SHAPES["llama"], extra=EXPERTS, rows=(*ROWS[:3], Case((3,), 4)))
    (one,) = run_ranks(1, step_on_rank, shape, 1)
    want = oracle_step(shape, one["weights"])
    assert want["margin"] > 1e-4, "a choice of experts hangs on rounding"
    check_step(one, want, "one rank against the oracle")
    for table in TABLES:
        want["grads"][table] = want["grads"][table][: shape.vocabulary]
    results = run_ranks(topology.ranks, topology_on_rank, shape, topology)
    check_step(joined(results, shape, same), want, f"{topology}")
    for told in (results[0]["auxiliary"], one["auxiliary"]):
        assert told["load_balancing_loss"] == pytest.approx(want["balance"], rel=1e-5)
        assert told["z_loss"] == pytest.approx(want["z"], rel=1e-5)
        assert told["rows"] == [want["rows"]] * shape.gpt.layers


def test_the_first_pass_sends_a_forward_once_more() -> None:
    """K/V cross three times a layer in a step, and a fourth time in a first pass."""
    sent = {}
    for name, share in (("no coin on", 1e-12), ("all", 1.0)):
        shape = dataclasses.replace(SHAPES["llama"], objective={"self_conditioning": share})
        topology = Topology(2, slot=2)
        sent[name] = run_ranks(2, topology_on_rank, shape, topology)[0]["step"].bytes_sent
    assert sent["no coin on"] > 0
    assert 3 * sent["all"] == 4 * sent["no coin on"]


def soft(rank: int, world: int, excluded: int | None, chunk: tuple[int, int]) -> Tensor:
    from megatron_bp.model.soft_embedding import expected_embedding

    hidden, weight, table = tables()
    group = torch.distributed.group.WORLD if world > 1 else None
    mine = (weight.chunk(world)[rank], table.chunk(world)[rank])
    return expected_embedding(hidden, *mine, 17, excluded, group, chunk)


def tables() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((7, 6), (32, 6), (32, 6))
    hidden, weight, table = (
        torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes
    )
    hidden[3] *= 1e4  # logits of which float64 cannot take the exponential
    return hidden, weight, table


# Of two ranks with 16 ids each the second has one true id, the last one: 16.
@pytest.mark.parametrize("excluded", [None, 0, 8, 16])
@pytest.mark.parametrize("chunk", [(7, 32), (2, 5), (3, 1)])
def test_soft_embedding_is_the_softmax_over_true_ids(
    excluded: int | None, chunk: tuple[int, int]
) -> None:
    hidden, weight, table = tables()
    logits = (hidden @ weight.T)[:, :17]
    if excluded is not None:
        logits[:, excluded] = -torch.inf
    want = torch.softmax(logits, dim=-1) @ table[:17]
    for ranks in (1, 2):
        for got in run_ranks(ranks, soft, excluded, chunk):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fault", CONDITIONING_FAULTS)
def test_fault_is_caught(fault: str) -> None:
    topology, name = Topology(2, slot=2), "llama"
    if fault == "coin by rank":  # with clean rows sharded, ranks would wait for each other
        topology = Topology(2, slot=2, degrees_of_slot=(2, 1))
    if "TP" in fault:
        topology = Topology(2, tp=2)
    if "added up" in fault:
        topology = Topology(2, tp=2, sequence_parallel=True)
    shape = SHAPES[name]
    truth(name)
    results = run_ranks(topology.ranks, topology_on_rank, shape, topology, fault)
    with pytest.raises(AssertionError):
        check_step(joined(results, shape, same), truth(name), f"{topology}")
