"""Attention in every mode against the dense oracle, outputs and every gradient, float64."""

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any
from unittest import mock

import oracle
import pytest
import torch
from cases import CASES, Case, sample_of
from ranks import run_ranks
from traffic import Sent, clean_shard, recording

from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.attention.kernels.sdpa import Sdpa
from megatron_bp.attention.kernels.tiled import Tiled
from megatron_bp.attention.layout import AttentionOptions, Layout, make_layout
from megatron_bp.attention.parts import Held
from megatron_bp.sequence.plan import RankRows, SequenceOptions, SequencePlan, make_plan

SCALE = 0.37
Degrees = tuple[int, int]  # BP, CP
MODES: list[Degrees] = [(1, 1), (2, 2), (4, 4), (2, 1), (4, 1), (4, 2), (1, 2), (1, 4)]


def plan_of(case: Case, degrees: Degrees = (1, 1), scored: bool = False) -> SequencePlan:
    options = SequenceOptions(
        case.block_size,
        *degrees,
        clean_relation=case.clean_relation,
        own_relation=case.own_relation,
        score_clean="supervised" if scored or case.clean_relation == "token" else "none",
    )
    return make_plan(sample_of(case), options)


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """q, k, v and the upstream gradient of all T + X rows."""
    plan = plan_of(case)
    rows = len(plan.block_of) + int(plan.units.offset[-1])
    generator = torch.Generator().manual_seed(7)
    shapes = {"q": case.heads, "k": case.groups, "v": case.groups, "dout": case.heads}
    return {
        name: torch.randn(rows, heads, case.head_dim, generator=generator, dtype=torch.float64).to(
            dtype
        )
        for name, heads in shapes.items()
    }


@dataclass(frozen=True)
class How:
    """How a test computes attention: `AttentionOptions`, and tiles of the tiled kernel."""

    form: str = "all_gather"
    most_rows: int | None = None
    over_heads: bool = False
    keep_gathered: bool = False
    tiles: tuple[int, int] = (5, 3)
    kernel: str = "tiled"

    def options(self) -> AttentionOptions:
        exchange = ExchangeOptions(self.form, self.most_rows)
        kernel = Sdpa() if self.kernel == "sdpa" else Tiled(*self.tiles)
        return AttentionOptions(kernel, exchange, self.over_heads, self.keep_gathered)


@dataclass(frozen=True)
class Local:
    """One rank's part of a case.

    Attributes:
        rows: which of the T + X rows it computes, in its order (-1 for a row that fills up).
        plan: how they attend.
        scores: whether it is the one that gives the row's upstream gradient.
        layout: whose `traffic` counts.
    """

    rows: torch.Tensor
    plan: Any
    scores: torch.Tensor
    layout: Layout


def local(
    case: Case,
    degrees: Degrees,
    rank: int,
    how: How = How(),
    multiple: int = 1,
    scored: bool = False,
) -> Local:
    plan = plan_of(case, degrees, scored)
    shards = tuple(plan.rows_of(peer, multiple) for peer in plan.shard_group(rank))
    mine = shards[rank % degrees[1]]
    filling = [-1] * mine.filling
    rows = [*mine.clean, *filling, *(len(plan.block_of) + mine.corrupted)]
    scores = [
        *(plan.scorer[mine.clean] == rank),
        *map(bool, filling),
        *([True] * len(mine.corrupted)),
    ]
    positions = torch.zeros(len(rows), dtype=torch.long)
    group = clean_shard(degrees, rank)
    layout = make_layout(plan, shards, rank, [case.window], positions, group, how.options())
    return Local(
        torch.tensor(rows, dtype=torch.long),
        layout.plans[case.window],
        torch.tensor(scores),
        layout,
    )


def on_rank(
    rank: int,
    world: int,
    case: Case,
    degrees: Degrees,
    how: How,
    dtype: torch.dtype = torch.float64,
    multiple: int = 1,
    forget_filling: bool = False,
) -> dict[str, torch.Tensor]:
    forgotten = mock.patch.object(Held, "sent_by", _without_filling)
    with forgotten if forget_filling else contextlib.nullcontext():
        mine = local(case, degrees, rank, how, multiple)
    rows, scores, whole = mine.rows, mine.scores, inputs(case, dtype)
    q, k, v = (whole[n][rows].clone().requires_grad_() for n in "qkv")
    sent: list[Sent] = []
    with recording(sent):
        out = mine.plan.attend(q, k, v, SCALE)
        dout = whole["dout"][rows]
        dout[(rows >= 0) & ~scores] = 0  # another rank's replica hands it on
        out.backward(dout)
    assert mine.layout.traffic.bytes_sent == sum(s.bytes for s in sent)
    return {"rows": rows, "out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def _without_filling(rows: RankRows) -> Held:
    every = rows.num_sent > len(rows.clean)
    return Held(rows.clean, rows.corrupted if every else rows.corrupted[:0])


def whole_of(results: list[dict[str, torch.Tensor]], rows: int) -> dict[str, torch.Tensor]:
    """The ranks' results in the order of the T + X rows; gradients of replicas are added up."""
    index = torch.cat([r["rows"] for r in results])
    real = index >= 0
    out = {}
    for name in ("out", "dq", "dk", "dv"):
        joined = torch.cat([r[name] for r in results])
        assert (joined[~real] == 0).all(), "a row that fills up must give 0 and get no gradient"
        out[name] = joined.new_zeros((rows, *joined.shape[1:]))
        if name == "out":
            out[name][index[real]] = joined[real]
            error = (out[name][index[real]] - joined[real]).abs()
            assert error.numel() == 0 or error.max() < 1e-9, "replicas differ"
        else:
            out[name].index_add_(0, index[real], joined[real])
    out["computed"] = torch.zeros(rows, dtype=torch.bool)
    out["computed"][index[real]] = True
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
    seen, computed = whole["dout"].clone(), torch.ones(len(out), dtype=torch.bool)
    computed[: len(sample.document)] = torch.from_numpy(plan_of(case).scorer >= 0)
    seen[~computed] = 0
    (out * seen).sum().backward()
    out = out.detach() * computed[:, None, None]
    return {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad, "computed": computed}


HOWS = [
    How(),
    How(most_rows=8, tiles=(256, 1024)),
    How("ring"),
    How("needed_rows"),
    How("needed_rows", most_rows=3, keep_gathered=True),
    How("auto", keep_gathered=True),
]


def fits(how: How, degrees: Degrees) -> bool:
    """Whether there is such an exchange in this mode."""
    bp, cp = degrees
    if cp == 1:
        return how == HOWS[0]
    return bp > 1 or how.form in ("all_gather", "ring")


@pytest.mark.ranks
@pytest.mark.parametrize("degrees", MODES, ids=[f"bp{bp} cp{cp}" for bp, cp in MODES])
@pytest.mark.parametrize("name", CASES)
def test_attention_is_one_dense_softmax(name: str, degrees: Degrees) -> None:
    case = CASES[name]
    want = dense(case)
    # The first way in all cases, and each of the others in every third.
    turn = [*CASES].index(name) + MODES.index(degrees)
    hows = HOWS[:1] + [how for i, how in enumerate(HOWS) if i and (i + turn) % 3 == 0]
    hows = [how for how in hows if fits(how, degrees)]
    bp, cp = degrees
    if bp < cp and case.heads % cp == 0 and (case.groups % cp == 0 or cp % case.groups == 0):
        hows.append(How(over_heads=True))
    for i, plain in enumerate(hows):
        how = dataclasses.replace(plain, kernel=("tiled", "sdpa")[(i + turn) % 2])
        more = (torch.float64, 4 if i % 2 else 1)
        results = run_ranks(max(degrees), on_rank, case, degrees, how, *more)
        got = whole_of(results, len(want["out"]))
        assert torch.equal(got.pop("computed"), want["computed"])
        for tensor, value in got.items():
            error = (value - want[tensor]).abs().max().item() if value.numel() else 0
            assert error < 1e-9, f"{tensor}: {error} with {how}"


@pytest.mark.ranks
@pytest.mark.parametrize("how", [How(), How("ring")])
def test_rows_that_fill_up_on_other_ranks_count_in_where_their_keys_stand(how: How) -> None:
    """A planted fault: without them corrupted keys of other ranks are looked for too early.

    22 rows a rank are filled up to 24, and the unit [8, 12) is cut at 11.
    """
    case = CASES["one document"]
    want = dense(case)
    more = (case, (1, 2), how, torch.float64, 8)
    got = whole_of(run_ranks(2, on_rank, *more), len(want["out"]))
    for name in ("out", "dq", "dk", "dv"):
        assert (got[name] - want[name]).abs().max() < 1e-9, name
    with pytest.raises(AssertionError, match="fills up must give 0 and get no gradient"):
        whole_of(run_ranks(2, on_rank, *more, True), len(want["out"]))


OVER_HEADS = How(over_heads=True)
WAYS = [((2, 2), how) for how in HOWS] + [((1, 2), how) for how in (HOWS[0], HOWS[2], OVER_HEADS)]


@pytest.mark.ranks
@pytest.mark.parametrize("kernel", ["tiled", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_a_plain_softmax_of_the_same_type(
    dtype: torch.dtype, kernel: str
) -> None:
    """The budget: twice the error of plain PyTorch in the same dtype, on the worst of 2 ranks."""
    case = CASES["ragged, packed, padded"]
    want = dense(case)
    sample = sample_of(case)
    mask = oracle.visible(sample.document.tolist(), case.block_size)
    whole = inputs(case, dtype)
    q, k, v = (whole[n].clone().requires_grad_() for n in "qkv")
    real = want.pop("computed")
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
    for degrees, way in WAYS:
        how = dataclasses.replace(way, kernel=kernel)
        got = whole_of(run_ranks(2, on_rank, case, degrees, how, dtype), len(want["out"]))
        for name, exact in want.items():
            error = (got[name].double() - exact).abs().max()
            budget = 2 * (reference[name].double() - exact).abs().max() + torch.finfo(dtype).eps
            assert error <= budget, f"{name}: {error} against {budget} by {degrees}, {how}"


def on_rank_uniform(
    rank: int, world: int, length: int, degrees: Degrees
) -> dict[str, torch.Tensor]:
    """dV of case 6: constant K, upstream ones, blocks of 2."""
    case = Case((length,), 2, heads=1, groups=1, head_dim=1)
    mine = local(case, degrees, rank, scored=True)
    ones = (len(mine.rows), 1, 1)
    q, k, v = (torch.ones(ones, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    mine.plan.attend(q, k, v, SCALE)[mine.scores].sum().backward()
    return {"rows": mine.rows, "dv": v.grad.flatten()}


@pytest.mark.ranks
@pytest.mark.parametrize("degrees", MODES, ids=[f"bp{bp} cp{cp}" for bp, cp in MODES])
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
    degrees: Degrees, length: int, corrupted: list[float], clean: list[float]
) -> None:
    """Case 6 of the known answers: every row hands 1 / (what it sees) to each key it sees."""
    results = run_ranks(max(degrees), on_rank_uniform, length, degrees)
    got = torch.cat([r["dv"] for r in results])
    rows = torch.cat([r["rows"] for r in results])
    got = got.new_zeros(2 * length).index_add_(0, rows[rows >= 0], got[rows >= 0])
    want = torch.tensor(clean + corrupted, dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert got.sum().item() == pytest.approx(2 * length)
