"""--clean-kv-exchange te against all_gather: outputs, gradients and bytes on 2 and 4 gloo ranks.

all_gather is held to the oracle in tests/ranks/test_attention.py, which needs Megatron: here only
what an exchange needs is imported.
"""

import importlib.util
from typing import Any

import pytest
import torch
from cases import CASES, Case, sample_of
from ranks import run_ranks
from torch import Tensor
from traffic import Sent, clean_shard, recording

from megatron_bp.attention.exchange.base import Traffic
from megatron_bp.attention.exchange.choose import ExchangeOptions, Form, prepare_exchange
from megatron_bp.attention.function import Plan
from megatron_bp.attention.kernels.tiled import Tiled
from megatron_bp.attention.parts import Held, make_view
from megatron_bp.sequence.plan import SequenceOptions, make_plan
from megatron_bp.sequence.visibility import visibility

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None,
        reason="needs Transformer Engine: scripts/te_environment.sh",
    ),
]

SCALE = 0.37
Degrees = tuple[int, int]  # BP, CP
MODES: list[Degrees] = [(2, 2), (4, 4), (4, 2)]
NAMES = ["one document", "ragged, packed, padded", "token-causal", "window", "multi-query"]
GRADIENTS = ("dq", "dk", "dv")


def attention(
    rank: int,
    world: int,
    case: Case,
    degrees: Degrees,
    form: Form,
    dtype: torch.dtype,
    most_rows: int | None = None,
) -> dict[str, Any]:
    """Output, gradients and what was sent, of one rank; the inputs are the same for every form."""
    options = SequenceOptions(
        case.block_size,
        *degrees,
        clean_relation=case.clean_relation,
        score_clean="supervised" if case.clean_relation == "token" else "none",
    )
    plan = make_plan(sample_of(case), options)
    shards = tuple(plan.rows_of(peer) for peer in plan.shard_group(rank))
    mine = shards[rank % degrees[1]]
    cpu, traffic = torch.device("cpu"), Traffic()
    prepared = prepare_exchange(
        plan, shards, rank, case.window, ExchangeOptions(form, most_rows), cpu
    )
    exchange = prepared.make(clean_shard(degrees, rank), traffic)
    visible = visibility(plan, mine.clean, mine.corrupted, case.window, mine.filling)
    kernel = Tiled(5, 3)
    view = make_view(visible, Held.of_rank(mine), prepared.held, kernel, cpu)

    generator = torch.Generator().manual_seed(100 + rank)
    heads = (case.heads, case.groups, case.groups, case.heads)
    whole = [
        torch.randn(mine.num_rows, h, case.head_dim, generator=generator, dtype=torch.float64)
        for h in heads
    ]
    q, k, v, dout = (x.to(torch.bfloat16).to(dtype) for x in whole)  # the same in every dtype
    for x in (q, k, v):
        x.requires_grad_()
    sent: list[Sent] = []
    with recording(sent):
        out = Plan(view, exchange, kernel).attend(q, k, v, SCALE)
        out.backward(dout)
    assert traffic.bytes_sent == sum(s.bytes for s in sent)
    return {
        "out": out.detach(),
        "dq": q.grad,
        "dk": k.grad,
        "dv": v.grad,
        "sent": sent,
        "kind": type(exchange).__name__,
        "most": max(shard.num_sent for shard in shards),
    }


def both(
    case: Case, degrees: Degrees, dtype: torch.dtype, most_rows: int | None = None
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of each rank: by te, and by all_gather."""
    by_te, ours = (
        run_ranks(max(degrees), attention, case, degrees, form, dtype, most_rows)
        for form in ("te", "all_gather")
    )
    assert {result["kind"] for result in by_te} <= {"TeExchange", "NoExchange"}
    assert {result["kind"] for result in ours} <= {"GatherExchange", "NoExchange"}
    return list(zip(by_te, ours, strict=True))


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest value."""
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


@pytest.mark.parametrize("degrees", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_float64(name: str, degrees: Degrees) -> None:
    for by_te, ours in both(CASES[name], degrees, torch.float64):
        assert torch.equal(by_te["out"], ours["out"])
        for gradient in GRADIENTS:
            torch.testing.assert_close(by_te[gradient], ours[gradient], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("degrees", [(2, 2), (4, 4)])
def test_chunks(degrees: Degrees) -> None:
    """Several arrivals in a pass, the last of which not all ranks have rows for."""
    case = Case((37, 12), 4, heads=4, groups=2)
    for by_te, ours in both(case, degrees, torch.float64, most_rows=5 * max(degrees)):
        assert len(by_te["sent"]) > 6
        assert torch.equal(by_te["out"], ours["out"])
        for gradient in GRADIENTS:
            torch.testing.assert_close(by_te[gradient], ours[gradient], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("degrees", [(2, 2), (4, 4)])
def test_float32(degrees: Degrees) -> None:
    for by_te, ours in both(CASES["one document"], degrees, torch.float32):
        assert torch.equal(by_te["out"], ours["out"])
        for gradient in GRADIENTS:
            assert error(by_te[gradient], ours[gradient]) < 5e-7, gradient


@pytest.mark.parametrize("degrees", [(2, 2), (4, 4)])
def test_bf16(degrees: Degrees) -> None:
    """Gradients travel in float32: they are no further from float64's than all_gather's are."""
    case = Case((64, 33), 4)
    wanted = run_ranks(max(degrees), attention, case, degrees, "all_gather", torch.float64)
    squares = dict.fromkeys((form, g) for form in ("te", "all_gather") for g in ("dk", "dv"))
    for name in squares:
        squares[name] = 0.0
    for (by_te, ours), want in zip(both(case, degrees, torch.bfloat16), wanted, strict=True):
        assert torch.equal(by_te["out"], ours["out"])
        assert torch.equal(by_te["dq"], ours["dq"])
        for form, got in (("te", by_te), ("all_gather", ours)):
            for gradient in ("dk", "dv"):
                assert got[gradient].dtype == torch.bfloat16
                difference = got[gradient].double() - want[gradient]
                squares[form, gradient] += float(difference.square().sum())
    for gradient in ("dk", "dv"):
        assert squares["te", gradient] <= squares["all_gather", gradient], gradient


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float32, 4), (torch.bfloat16, 4)])
@pytest.mark.parametrize("degrees", [(2, 2), (4, 4)])
def test_bytes(degrees: Degrees, dtype: torch.dtype, wide: int) -> None:
    """K|V of the rank that sends most, twice, in the model's dtype; gradients once, in float32."""
    case, world = CASES["one document"], max(degrees)
    for result in run_ranks(world, attention, case, degrees, "te", dtype):
        words = (world - 1) * result["most"] * 2 * case.groups * case.head_dim
        assert [(s.name, s.ranks, s.bytes) for s in result["sent"]] == [
            ("all_gather_into_tensor", world, words * dtype.itemsize),
            ("all_gather_into_tensor", world, words * dtype.itemsize),
            ("reduce_scatter_tensor", world, words * wide),
        ]
