"""Mixture of experts: the same loss, gradients and statistics wherever rows and experts are."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Case
from faults import MOE_FAULTS
from ranks import run_ranks
from torch import Tensor
from whole import LLAMA, PACKED, SHAPES, Shape, check_step, oracle_step, step_on_rank

pytestmark = pytest.mark.ranks

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}
BOTH = EXPERTS | {"moe_z_loss_coeff": 0.001}
ROWS = (PACKED, Case((24,), 4), Case((9, 15), 4), Case((3,), 4))
EMPTY = SHAPES["fewer units than ranks, nothing supervised"].rows
MOE = {
    "balance loss": Shape(LLAMA, ROWS, extra=EXPERTS),
    "z loss": Shape(
        LLAMA, ROWS, extra=BOTH | {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.01}
    ),
    "both, of a sequence, one dense layer, a shared expert": Shape(
        LLAMA,
        ROWS,
        extra=BOTH
        | {
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_layer_freq": [0, 1],
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "both, next-token term": dataclasses.replace(SHAPES["next-token term"], extra=BOTH),
    "both, sigmoid, expert bias": Shape(
        dataclasses.replace(LLAMA, score="sigmoid"),
        ROWS,
        extra=BOTH
        | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    ),
    # A document of one token has two rows, and they go to at most two of the four experts.
    "ranks without a unit or a row, experts without a row": Shape(
        dataclasses.replace(LLAMA, topk=1, pre_softmax=True),
        EMPTY,
        extra=BOTH | {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    ),
    "nothing scored in the whole step": Shape(
        LLAMA, (Case((10, 6), 4, prompts=(0, 1)), Case((5,), 4, prompts=(0,))) * 2, extra=BOTH
    ),
}
# Ranks, those that share a sequence, those that share the experts.
LAYOUTS = ((2, 2, 2), (2, 1, 2))
MORE = {
    "balance loss": ((2, 2, 1), (4, 4, 4), (4, 2, 2), (4, 2, 4)),
    "ranks without a unit or a row, experts without a row": ((4, 4, 4),),
}


def check(got: dict[str, Any], want: dict[str, Any], shape: Shape, where: str) -> None:
    """Everything that `check_step` holds, and the auxiliary losses and the rows they are over."""
    check_step(got, want, where)
    kind = shape.extra["moe_router_load_balancing_type"]
    name = "seq_load_balancing_loss" if kind == "seq_aux_loss" else "load_balancing_loss"
    if want["rows"] == 0:
        assert not any(value for of_layers in got["auxiliary"].values() for value in of_layers)
        return
    with_experts = [k for k, rows in enumerate(got["auxiliary"]["rows"]) if rows]
    assert [got["auxiliary"]["rows"][k] for k in with_experts] == [want["rows"]] * len(want["z"])
    for mine, theirs, used in (
        (name, "balance", shape.extra["moe_aux_loss_coeff"] > 0),
        ("z_loss", "z", "moe_z_loss_coeff" in shape.extra),
    ):
        values = [got["auxiliary"][mine][k] for k in with_experts]
        assert values == pytest.approx(want[theirs] if used else [0.0] * len(values), rel=1e-5), (
            f"{where}: {mine}"
        )


@pytest.mark.parametrize("name", MOE)
def test_every_layout_is_the_definition(name: str) -> None:
    shape = MOE[name]
    (one,) = run_ranks(1, step_on_rank, shape, 1)
    truth = oracle_step(shape, one["weights"])
    assert truth["margin"] > 1e-4, "a choice of experts hangs on rounding"
    check(one, truth, shape, "one rank against the oracle")
    for world, slot, ep in (*LAYOUTS, *MORE.get(name, ())):
        for rank, many in enumerate(run_ranks(world, step_on_rank, shape, slot, False, None, ep)):
            where = f"rank {rank} of {world}, slot {slot}, experts over {ep}"
            check(many, truth, shape, where)
            assert many["expert bias"].keys() == one["expert bias"].keys()
            for buffer, value in many["expert bias"].items():
                assert torch.equal(value, one["expert bias"][buffer]), f"{where}: {buffer}"


def test_expert_bias_follows_the_rows_of_the_step() -> None:
    (one,) = run_ranks(1, step_on_rank, MOE["both, sigmoid, expert bias"], 1)
    truth = oracle_step(MOE["both, sigmoid, expert bias"], one["weights"])
    for layer, counts in enumerate(truth["chosen"]):
        want = 1e-3 * torch.sign(counts.double().mean() - counts)
        got = one["expert bias"][f"decoder.layers.{layer}.mlp.router.expert_bias"]
        assert got.count_nonzero()
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-9)


def test_without_a_scored_token_there_is_no_row_and_nothing_is_learned() -> None:
    (one,) = run_ranks(1, step_on_rank, MOE["nothing scored in the whole step"], 1)
    assert one["count"] == [0]
    assert one["loss"] == 0
    assert one["auxiliary"]["rows"] == [0, 0]
    assert all(not gradient.any() for gradient in one["grads"].values())


@pytest.mark.parametrize("recompute", ["full", "moe"])
def test_recompute_counts_once(recompute: str) -> None:
    shape = MOE["both, sigmoid, expert bias"]
    plain = run_ranks(2, step_on_rank, shape, 2, False, None, 2)
    if recompute == "moe":
        more = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
        shape = dataclasses.replace(shape, extra=shape.extra | more)
    again = run_ranks(2, step_on_rank, shape, 2, recompute == "full", None, 2)
    for one, other in zip(plain, again, strict=True):
        check_step(other, one, recompute)
        for name, of_layers in one["auxiliary"].items():
            assert other["auxiliary"][name] == pytest.approx(of_layers), name
        for name, value in one["expert bias"].items():
            assert torch.equal(value, other["expert bias"][name])


def test_allgather_of_one_rank() -> None:
    shape = MOE["balance loss"]
    gathered = dataclasses.replace(
        shape, extra=shape.extra | {"moe_token_dispatcher_type": "allgather"}
    )
    one, other = (run_ranks(2, step_on_rank, s, 2) for s in (shape, gathered))
    check_step(other[0], one[0], "allgather")


def tiny_router(rank: int, world: int) -> tuple[list[Tensor], Tensor]:
    """Gradients of the router's inputs in two micro-batches, and (balance, z, rows) over ranks.

    Two experts, top-1; the router's weight is the identity, so its logits are its inputs.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron_bp.diffusion.loss import row_scale
    from megatron_bp.model.moe import BlockDiffusionRouter, take_sums

    mpu.initialize_model_parallel(context_parallel_size=world)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=2,
        num_attention_heads=1,
        num_moe_experts=2,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1.0,
        moe_z_loss_coeff=1e-9,
        add_bias_linear=False,
        calculate_per_token_loss=True,
        context_parallel_size=world,
    )
    router = BlockDiffusionRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    with torch.no_grad():
        router.weight.copy_(torch.eye(2))
    first, second = [math.log(3), 0.0], [0.0, math.log(3)]  # softmax: (3/4, 1/4), (1/4, 3/4)
    batches = {
        0: [([first, first, second], [True, True, False]), ([first], [True])],
        1: [([second], [True]), ([second], [False])],
    }[rank]
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(row_scale(count=8, rows=4)))
    gradients = []
    for rows, counted in batches:
        x = torch.tensor(rows)[:, None].requires_grad_()  # [S, 1, 2]
        probs, _ = router(x, ~torch.tensor(counted)[:, None])
        (probs.sum() * 0).backward()
        assert x.grad is not None
        gradients.append(x.grad[:, 0])
    sums = take_sums(("load_balancing_loss", "z_loss", "rows"), 1, "cpu")
    torch.distributed.all_reduce(sums)
    return gradients, sums[:, 0]


def test_by_hand() -> None:
    """Counted rows: micro-batch 1 has a, a on rank 0 and b on rank 1; micro-batch 2 has a alone.

    a = (ln 3, 0) goes to expert 0 with probabilities (3/4, 1/4); b is a turned around.

    Micro-batch 1: f = (2/3, 1/3); P = ((3/4 + 3/4 + 1/4)/3, (1/4 + 1/4 + 3/4)/3) = (7/12, 5/12);
        loss = 2 (2/3 x 7/12 + 1/3 x 5/12) = 19/18.
    Micro-batch 2: f = (1, 0); P = (3/4, 1/4); loss = 2 x 3/4 = 3/2.
    Rows x loss: 3 x 19/18 + 1 x 3/2 = 14/3; over 4 rows the mean is 7/6.
    z: every row's log-sum-exp is ln(3 + 1).

    Gradient of rows x loss by the first logit of a row: 2 (f_0 - f_1) p_0 p_1 with p_0 p_1 = 3/16:
    micro-batch 1 gives 2 x 1/3 x 3/16 = 1/8, micro-batch 2 gives 2 x 1 x 3/16 = 3/8; the second
    logit's is its negative. With 8 counted tokens the scale is 8 / 4 = 2.
    """
    (rank_0, sums), (rank_1, _) = run_ranks(2, tiny_router)
    assert sums.tolist() == pytest.approx([14 / 3, 4 * math.log(4) ** 2, 4], rel=1e-6)
    for got, want in (
        (rank_0[0], [[1 / 4, -1 / 4], [1 / 4, -1 / 4], [0, 0]]),
        (rank_0[1], [[3 / 4, -3 / 4]]),
        (rank_1[0], [[1 / 4, -1 / 4]]),
        (rank_1[1], [[0, 0]]),
    ):
        torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), rtol=1e-5, atol=1e-6)


def first_experts(rank: int, world: int, ep: int) -> dict[str, Tensor]:
    """Weights as a fresh model has them, by global name."""
    import whole
    from megatron.core import parallel_state as mpu

    mpu.initialize_model_parallel(context_parallel_size=world, expert_model_parallel_size=ep)
    whole.SLOT, whole.EXPERTS = world, 4
    torch.manual_seed(7)
    nothing = SimpleNamespace(weights_of=lambda *state: None)
    whole.weights_of = nothing.weights_of
    model = whole.build(MOE["balance loss"])
    return whole.by_global_name(model, lambda p: p.detach().clone())


def test_fresh_experts_do_not_depend_on_who_holds_them() -> None:
    (one,) = run_ranks(1, first_experts, 1, fresh=True)
    for many in run_ranks(2, first_experts, 2, fresh=True):
        assert [n for n in one if not torch.equal(one[n], many[n])] == []
    name = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1.weight"
    assert not torch.equal(one[name.format(0)], one[name.format(2)])


@pytest.mark.parametrize("fault", MOE_FAULTS)
def test_fault_is_caught(fault: str) -> None:
    layout: tuple[Any, ...] = (2, 2, False)
    name = "both, sigmoid, expert bias"
    if fault == "filling rows in the statistics":
        name = "ranks without a unit or a row, experts without a row"
    elif fault == "rows of one slot":
        layout = (2, 1, False)
    elif fault == "counted twice":
        layout = (2, 2, True)
    shape, (world, slot, recompute) = MOE[name], layout
    (one,) = run_ranks(1, step_on_rank, shape, 1)
    truth = oracle_step(shape, one["weights"])
    caught = []
    for many in run_ranks(world, step_on_rank, shape, slot, recompute, fault, 2):
        try:
            check(many, truth, shape, fault)
        except AssertionError as error:
            caught.append(str(error))
    assert caught, f"{fault} went unnoticed"
