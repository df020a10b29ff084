"""Block parallelism with TP, SP, PP and DP: loss and every gradient against the dense oracle."""

import functools
from dataclasses import replace
from typing import Any

import pytest
from cases import Case
from faults import TOPOLOGY_FAULTS
from ranks import run_ranks
from topology import TABLES, Topology, joined, same, topology_on_rank
from whole import LLAMA, PACKED, SHAPES, check_step, oracle_step, step_on_rank

pytestmark = pytest.mark.ranks

FOUR_LAYERS = replace(
    SHAPES["interleaved half rotary, every other layer windowed"],
    gpt=replace(LLAMA, layers=4),
    rows=(PACKED, Case((24,), 4), Case((9, 15), 4), Case((3,), 4)),
    extra={"window_size": (4, 0), "window_attn_skip_freq": 2},
    windows=[5, None, 5, None],
)
SHAPES_HERE = {
    "llama": SHAPES["llama"],
    "300 ids, qwen3": replace(
        SHAPES["qwen3, token-causal, prompts"], vocabulary=300, divisible_by=128
    ),
    "next-token term": SHAPES["next-token term"],
    "mask token left out": SHAPES["mask token left out, next-token term"],
    "nothing supervised": SHAPES["fewer units than ranks, nothing supervised"],
    "gpt": SHAPES["gpt, window, causal units, weight one"],
    "four layers": FOUR_LAYERS,
    "experts": replace(
        SHAPES["llama"],
        rows=(PACKED, Case((24,), 4), Case((9, 15), 4), Case((3,), 4)),
        extra={
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 24,
            "moe_token_dispatcher_type": "alltoall",
            "moe_aux_loss_coeff": 0.01,
            "moe_z_loss_coeff": 0.001,
        },
    ),
    # 50 ids padded to 128 x TP: the last TP rank has padding alone
    "50 ids": replace(SHAPES["llama"], divisible_by=128, rows=(PACKED,) * 4),
}
CASES = [
    (
        Topology(2, tp=2),
        ["llama", "300 ids, qwen3", "next-token term", "mask token left out", "50 ids"],
    ),
    (Topology(2, tp=2, recompute="full"), ["gpt"]),
    (
        Topology(2, tp=2, sequence_parallel=True),
        ["llama", "300 ids, qwen3", "next-token term", "nothing supervised", "gpt"],
    ),
    (Topology(2, pp=2), ["llama", "300 ids, qwen3", "next-token term", "nothing supervised"]),
    (Topology(2, pp=2, chunks=2), ["four layers"]),
    (Topology(4, tp=2, slot=2), ["300 ids, qwen3"]),
    (Topology(4, tp=2, slot=2, sequence_parallel=True, recompute="selective"), ["llama"]),
    (Topology(4, pp=2, slot=2), ["next-token term"]),
    (Topology(4, pp=2, slot=2, chunks=2, recompute="full"), ["four layers"]),
    (Topology(4, slot=2, distributed_optimizer=True), ["llama"]),
    (Topology(4, tp=2, pp=2, sequence_parallel=True), ["next-token term"]),
    (
        Topology(4, tp=2, slot=2, degrees_of_slot=(2, 1), sequence_parallel=True),
        ["next-token term", "nothing supervised"],
    ),
    (Topology(4, pp=2, slot=2, degrees_of_slot=(1, 2)), ["next-token term"]),
]
# Rows that only fill up stand on the last TP rank, and Megatron cuts their mask in the first stage.
LATER_STAGE = Topology(4, tp=2, pp=2, sequence_parallel=True, ep=2)
EXPERT_CASES = [
    Topology(2, tp=2, sequence_parallel=True, ep=2),
    Topology(4, pp=2, slot=2, ep=2, recompute="full"),
    Topology(4, tp=2, slot=2, degrees_of_slot=(2, 1), sequence_parallel=True, ep=4),
    Topology(4, slot=2, ep=2, distributed_optimizer=True),
    LATER_STAGE,
]


@functools.cache
def one_rank(name: str) -> dict[str, Any]:
    """One rank, held to the oracle, its vocabulary tables cut to the true ids."""
    shape = SHAPES_HERE[name]
    (one,) = run_ranks(1, step_on_rank, shape, 1)
    truth = oracle_step(shape, one["weights"])
    check_step(one, truth, "one rank against the oracle")
    for table in TABLES:
        if table in truth["grads"]:
            truth["grads"][table] = truth["grads"][table][: shape.vocabulary]
    return truth


@functools.cache
def bytes_of_slot(name: str, slot: int, degrees: tuple[int, int]) -> int:
    """What a slot alone sends in a step: TP cuts its heads, PP its layers, DP its rows."""
    if slot == 1:
        return 0
    alone = Topology(slot, slot=slot, degrees_of_slot=degrees)
    one, *_ = run_ranks(slot, topology_on_rank, SHAPES_HERE[name], alone)
    assert (one["step"].bytes_sent > 0) == (degrees[1] > 1)
    return int(one["step"].bytes_sent)


def check_metrics(results: list[dict[str, Any]], topology: Topology, name: str) -> None:
    """The last stage has the exact step, in which nothing is counted twice."""
    cases, truth = SHAPES_HERE[name].rows, one_rank(name)
    steps = [r["step"] for r in results if r["step"] is not None]
    assert len(steps) == topology.ranks // topology.pp
    assert results[-1]["step"] is not None  # the last rank writes
    for step in steps:
        assert step.clean_tokens == sum(sum(case.lengths) for case in cases)
        assert list(step.count.values()) == truth["count"]
        assert step.total == pytest.approx(truth["loss"], rel=1e-6)
        assert step.bytes_sent == bytes_of_slot(name, topology.slot, topology.degrees)
        assert len(step.samples) == len(cases)
        assert step.balance >= 1


@pytest.mark.parametrize(
    ("topology", "name"),
    [(topology, name) for topology, names in CASES for name in names],
    ids=lambda value: str(value),
)
def test_a_topology_trains_the_same_model(topology: Topology, name: str) -> None:
    shape = SHAPES_HERE[name]
    results = run_ranks(topology.ranks, topology_on_rank, shape, topology)
    check_step(joined(results, shape, same), one_rank(name), f"{topology}")
    check_metrics(results, topology, name)


@pytest.mark.parametrize("topology", EXPERT_CASES, ids=lambda value: str(value))
def test_experts_stand_beside_every_other_dimension(topology: Topology) -> None:
    """Auxiliary losses too: each row and layer is counted once over TP ranks and stages."""
    shape, truth = SHAPES_HERE["experts"], one_rank("experts")
    results = run_ranks(topology.ranks, topology_on_rank, shape, topology)
    check_step(joined(results, shape, same), truth, f"{topology}")
    check_metrics(results, topology, "experts")
    told = results[0]["auxiliary"]
    assert told["load_balancing_loss"] == pytest.approx(truth["balance"], rel=1e-5)
    assert told["z_loss"] == pytest.approx(truth["z"], rel=1e-5)
    assert told["rows"] == [truth["rows"]] * shape.gpt.layers


def test_nothing_planted_passes_where_faults_are_planted() -> None:
    caught_by(None)


@pytest.mark.parametrize("fault", TOPOLOGY_FAULTS)
def test_fault_is_caught(fault: str) -> None:
    with pytest.raises(AssertionError):
        caught_by(fault)


def caught_by(fault: str | None) -> None:
    topology, name = Topology(2, tp=2, sequence_parallel=True), "llama"
    if fault == "mask token left out of every term":
        topology, name = Topology(2, tp=2), "mask token left out"
    if fault == "tokens of every stage":
        topology = Topology(2, pp=2)
    if fault == "mask of another TP rank's rows":
        topology, name = LATER_STAGE, "experts"
    shape = SHAPES_HERE[name]
    results = run_ranks(topology.ranks, topology_on_rank, shape, topology, fault)
    check_step(joined(results, shape, same), one_rank(name), f"{topology}")
    check_metrics(results, topology, name)
