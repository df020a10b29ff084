"""Attention over 1, 2 and 4 ranks against the dense oracle, outputs and every gradient, float64."""

import oracle
import pytest
import torch
import torch.distributed as dist
from cases import CASES, Case, sample_of
from ranks import run_ranks

from megatron_bp.attention.exchange import CleanExchange
from megatron_bp.attention.function import attend
from megatron_bp.attention.kernels import tiled
from megatron_bp.attention.parts import make_view, shard_sizes
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.sequence.visibility import corrupted_rows, visibility

SCALE = 0.37


def plan_of(case: Case, ranks: int) -> SequencePlan:
    options = SequenceOptions(
        case.block_size,
        ranks,
        ranks,
        clean_relation=case.clean_relation,
        own_relation=case.own_relation,
    )
    return make_plan(sample_of(case), options)


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """q, k, v and the upstream gradient of all T + X rows."""
    plan = plan_of(case, 1)
    rows = len(plan.block_of) + int(plan.units.offset[-1])
    generator = torch.Generator().manual_seed(7)
    shapes = {"q": case.heads, "k": case.groups, "v": case.groups, "dout": case.heads}
    return {
        name: torch.randn(rows, heads, case.head_dim, generator=generator, dtype=torch.float64).to(
            dtype
        )
        for name, heads in shapes.items()
    }


def local_rows(case: Case, plan: SequencePlan, rank: int) -> torch.Tensor:
    """Which of the T + X rows the rank computes, in its order (-1 for a row that fills up)."""
    clean = plan.clean_positions(rank)
    corrupted = corrupted_rows(plan, plan.owned_units(rank))
    filling = [-1] if len(clean) + len(corrupted) == 0 else []
    return torch.tensor([*clean, *filling, *(len(plan.block_of) + corrupted)], dtype=torch.long)


def on_rank(
    rank: int, world: int, case: Case, dtype: torch.dtype, tile_rows: int, tile_keys: int
) -> dict[str, torch.Tensor]:
    plan = plan_of(case, world)
    rows = local_rows(case, plan, rank)
    filling = int((rows < 0).sum())
    clean, corrupted = plan.clean_positions(rank), corrupted_rows(plan, plan.owned_units(rank))
    visible = visibility(plan, clean, corrupted, case.window, filling)
    tiled.TILE_KEYS = tile_keys
    view = make_view(visible, plan.chunks, rank, tile_rows, torch.device("cpu"))
    exchange = CleanExchange(dist.group.WORLD, shard_sizes(plan.chunks, world))
    whole = inputs(case, dtype)
    q, k, v = (whole[n][rows].clone().requires_grad_() for n in "qkv")
    out = attend(q, k, v, view, exchange, tiled, SCALE)
    out.backward(whole["dout"][rows])
    return {"rows": rows, "out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def whole_of(results: list[dict[str, torch.Tensor]], rows: int) -> dict[str, torch.Tensor]:
    """The ranks' results in the order of the T + X rows; every row must be computed once."""
    index = torch.cat([r["rows"] for r in results])
    real = index >= 0
    joined = {n: torch.cat([r[n] for r in results]) for n in ("out", "dq", "dk", "dv")}
    for value in joined.values():
        assert (value[~real] == 0).all(), "a row that fills up must give 0 and get no gradient"
    order = index[real].argsort()
    padding = rows - len(order)
    assert len(index[real].unique()) == len(order)
    out = {}
    for name, value in joined.items():
        out[name] = value.new_zeros((rows, *value.shape[1:]))
        out[name][index[real][order]] = value[real][order]
    out["missing"] = torch.tensor(padding)
    return out


def dense(case: Case) -> dict[str, torch.Tensor]:
    sample = sample_of(case)
    corrupted = oracle.corrupted_rows(
        sample.document.tolist(), case.block_size, sample.supervised.tolist()
    )
    mask = oracle.visible(
        sample.document.tolist(),
        case.block_size,
        clean_relation=case.clean_relation,
        own_relation=case.own_relation,
        window=case.window,
        corrupted=corrupted,
    )
    whole = inputs(case)
    q, k, v = (whole[n].clone().requires_grad_() for n in "qkv")
    out = oracle.attention(q, k, v, mask, SCALE)
    seen = whole["dout"].clone()
    seen[: len(sample.document)][torch.from_numpy(sample.document < 0)] = 0
    (out * seen).sum().backward()
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_attention_is_one_dense_softmax(name: str, world: int) -> None:
    case = CASES[name]
    want = dense(case)
    for tile_rows, tile_keys in ((5, 3), (256, 1024)):
        results = run_ranks(world, on_rank, case, torch.float64, tile_rows, tile_keys)
        got = whole_of(results, len(want["out"]))
        assert got["missing"] == case.padding
        for tensor in want:
            error = (got[tensor] - want[tensor]).abs().max().item() if got[tensor].numel() else 0
            assert error < 1e-9, f"{tensor}: {error} with tiles of {tile_rows} x {tile_keys}"


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_a_plain_softmax_of_the_same_type(dtype: torch.dtype) -> None:
    """The budget: twice the error of plain PyTorch in the same dtype, on the worst of 2 ranks."""
    case = CASES["ragged, packed, padded"]
    want = dense(case)
    sample = sample_of(case)
    mask = oracle.visible(sample.document.tolist(), case.block_size)
    whole = inputs(case, dtype)
    q, k, v = (whole[n].clone().requires_grad_() for n in "qkv")
    real = torch.from_numpy(sample.document >= 0)
    real = torch.cat([real, torch.ones(len(q) - len(real), dtype=torch.bool)])
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(t[real].transpose(0, 1)[None] for t in (q, k, v)),
        attn_mask=mask[real][:, real],
        scale=SCALE,
        enable_gqa=True,
    )
    plain[0].transpose(0, 1).backward(whole["dout"][real])
    plain_out = torch.zeros_like(whole["q"])
    plain_out[real] = plain[0].transpose(0, 1).detach()
    reference = {"out": plain_out, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    got = whole_of(run_ranks(2, on_rank, case, dtype, 5, 3), len(want["out"]))
    for name, exact in want.items():
        error = (got[name].double() - exact).abs().max()
        budget = 2 * (reference[name].double() - exact).abs().max() + torch.finfo(dtype).eps
        assert error <= budget, f"{name}: {error} against {budget}"


def on_rank_uniform(rank: int, world: int, length: int) -> dict[str, torch.Tensor]:
    """dV of case 6: constant K, upstream ones, blocks of 2."""
    case = Case((length,), 2, heads=1, groups=1, head_dim=1)
    plan = plan_of(case, world)
    rows = local_rows(case, plan, rank)
    clean, corrupted = plan.clean_positions(rank), corrupted_rows(plan, plan.owned_units(rank))
    visible = visibility(plan, clean, corrupted, None, int((rows < 0).sum()))
    view = make_view(visible, plan.chunks, rank, 256, torch.device("cpu"))
    exchange = CleanExchange(dist.group.WORLD, shard_sizes(plan.chunks, world))
    q, k, v = (torch.ones(len(rows), 1, 1, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    attend(q, k, v, view, exchange, tiled, SCALE).sum().backward()
    return {"rows": rows, "dv": v.grad.flatten()}


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("length", "corrupted", "clean"),
    [
        (
            8,
            [1, 1, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 4, 1 / 4],
            [19 / 6, 19 / 6, 5 / 3, 5 / 3, 5 / 6, 5 / 6, 1 / 4, 1 / 4],
        ),
        (
            7,
            [1, 1, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 7],
            [62 / 21, 62 / 21, 61 / 42, 61 / 42, 13 / 21, 13 / 21, 1 / 7],
        ),
    ],
)
def test_value_gradients_known_by_hand(
    world: int, length: int, corrupted: list[float], clean: list[float]
) -> None:
    """Case 6 of the known answers: every row hands 1 / (what it sees) to each key it sees."""
    results = run_ranks(world, on_rank_uniform, length)
    got = torch.cat([r["dv"] for r in results])
    rows = torch.cat([r["rows"] for r in results])
    got, rows = got[rows >= 0], rows[rows >= 0]
    want = torch.tensor(clean + corrupted, dtype=torch.float64)
    torch.testing.assert_close(got[rows.argsort()], want, rtol=0, atol=1e-12)
    assert got.sum().item() == pytest.approx(2 * length)
