"""What attention does in which order: K/V and gradients travel while something is computed."""

import weakref
from typing import Any, cast

import numpy as np
import pytest
import torch
from cases import Case, sample_of
from torch import Tensor

from megatron_bp.attention.exchange import te
from megatron_bp.attention.exchange.base import Traffic
from megatron_bp.attention.exchange.choose import ExchangeOptions, prepare_exchange
from megatron_bp.attention.function import Plan
from megatron_bp.attention.kernels.tiled import Tiled
from megatron_bp.attention.parts import Part, View
from megatron_bp.parallel.collectives import Pending
from megatron_bp.sequence.plan import SequenceOptions, make_plan


class Logging(Tiled):
    """Tells which part it computes, by its number of keys."""

    def __init__(self, log: list[str], names: dict[int, str]) -> None:
        super().__init__()
        object.__setattr__(self, "log", log)
        object.__setattr__(self, "names", names)

    def forward(self, q: Tensor, k: Tensor, *rest: Any) -> None:
        self.log.append(self.names[len(k)])  # type: ignore[attr-defined]
        super().forward(q, k, *rest)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, *rest: Any) -> None:
        self.log.append(self.names[len(k)])  # type: ignore[attr-defined]
        super().backward(dout, q, k, *rest)


class Remote:
    """An exchange with a rank that is not there: its keys are given."""

    held = ()

    def __init__(self, log: list[str], arrivals: list[Tensor]) -> None:
        self.log, self.arrivals = log, arrivals
        self.sent: list[Tensor] = []

    def fetch(self, *_: Tensor) -> "Remote":
        return self

    def returns(self, *_: Any) -> "Remote":
        return self

    def start(self, i: int) -> None:
        self.log.append(f"start {i}")

    def wait(self, i: int) -> Tensor:
        self.log.append(f"wait {i}")
        return self.arrivals[i]

    def send(self, i: int, dkv: Tensor) -> None:
        self.log.append(f"send {i}")
        self.sent.append(dkv.clone())

    def settle(self) -> None:
        self.log.append("settle")


def part(kernel: Tiled, rows: Any, count: int, keys: slice) -> Part:
    size = keys.stop - keys.start
    lo, hi = np.zeros(count, np.int32), np.full(count, size, np.int32)
    return Part(rows, keys, kernel.prepare(lo, hi, torch.device("cpu")), count * size)


FORWARD = "start 0, own, clean, wait 0, start 1, first, wait 1, second"
KEPT = "own, first, send 0, second, send 1, clean, settle"
FETCHED = "start 0, own, wait 0, start 1, first, send 0, wait 1, second, send 1, clean, settle"


@pytest.mark.parametrize(("keep", "backward"), [(True, KEPT), (False, FETCHED)])
def test_what_travels_is_under_way_before_what_does_not_need_it(keep: bool, backward: str) -> None:
    """Rows by slice and by index; and what is sent is all of an arrival's gradient."""
    torch.manual_seed(0)
    log: list[str] = []
    kernel = Logging(log, {2: "own", 3: "clean", 4: "first", 5: "second"})
    arrivals = [torch.randn(n, 2, 1, 8, dtype=torch.double) for n in (4, 5)]
    index = torch.tensor([0, 2, 5])
    view = View(
        corrupted=(part(kernel, slice(1, 6), 5, slice(3, 5)),),
        clean=(part(kernel, slice(0, 6), 6, slice(0, 3)),),
        arrivals=(
            (part(kernel, index, 3, slice(0, 4)),),
            (part(kernel, slice(0, 6), 6, slice(0, 5)),),
        ),
    )
    remote = Remote(log, arrivals)
    plan = Plan(view, cast(Any, remote), kernel, keep_gathered=keep)
    q = torch.randn(6, 2, 8, dtype=torch.double, requires_grad=True)
    k, v = (torch.randn(6, 1, 8, dtype=torch.double, requires_grad=True) for _ in "kv")
    out = plan.attend(q, k, v, 0.3)
    assert ", ".join(log) == FORWARD
    log.clear()
    dout = torch.randn_like(out)
    out.backward(dout)
    assert ", ".join(log) == backward

    theirs = [x.clone().requires_grad_() for x in arrivals]
    every = torch.cat([torch.stack((k, v), 1), *theirs])
    seen = torch.zeros(6, len(every), dtype=torch.bool)
    seen[1:, 3:5] = seen[:, :3] = seen[:, 10:] = True
    seen[index, 6:10] = True
    score = torch.einsum("nqd,kd->nqk", q, every[:, 0, 0]) * 0.3
    weight = score.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    want = torch.einsum("nqk,kd->nqd", weight, every[:, 1, 0])
    torch.testing.assert_close(out, want)
    gradients = torch.autograd.grad(want, [q, k, v, *theirs], dout)
    for got, true in zip([q.grad, k.grad, v.grad, *remote.sent], gradients, strict=True):
        torch.testing.assert_close(got, true)


class Group:
    """Rank 0 of four, of which the others are not there."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 4


HANDS_OVER = {"all_gather": "scatter", "needed_rows": "deliver", "ring": "pass_on", "te": "reduce"}


@pytest.mark.parametrize("form", HANDS_OVER)
def test_gradients_of_one_arrival_are_under_way(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent, and what came, is gone from memory before the next is sent."""
    monkeypatch.setattr(te, "collectives", lambda: None)
    plan = make_plan(sample_of(Case((128,), 4)), SequenceOptions(4, 4, 4))
    shards = tuple(plan.rows_of(rank, 1) for rank in range(4))
    options = ExchangeOptions(form, most_rows=16)
    prepared = prepare_exchange(plan, shards, 0, None, options, torch.device("cpu"))
    exchange: Any = prepared.make(cast(Any, Group()), Traffic())
    sent: list[weakref.ref[Tensor]] = []
    came: list[weakref.ref[Tensor]] = []

    def hand_over(rows: Tensor, *sizes: Any, tag: int = 0) -> Pending:
        alive = [ref for ref in sent + came if ref() is not None]
        assert len(alive) <= (form == "ring" and len(sent) > 0), "the ring adds to what came"
        count = {
            "all_gather": len(rows),
            "needed_rows": sum(sizes[1]) if len(sizes) > 1 else 0,
            "ring": sizes[0] if sizes else 0,
            "te": len(rows) // 4,
        }[form]
        result = torch.ones(count, *rows.shape[1:])
        sent.append(weakref.ref(rows))
        came.append(weakref.ref(result))
        return Pending(result, [], rows)

    setattr(exchange, HANDS_OVER[form], hand_over)
    own = torch.zeros(shards[0].num_rows, 2, 1, 8)
    returns = exchange.returns(own, torch.float32)
    for i, held in enumerate(prepared.held):
        returns.send(i, torch.ones(len(held.clean), 2, 1, 8))
    returns.settle()
    assert len(sent) == len(prepared.held) > 2
    shares = {"all_gather": 3, "ring": 1, "te": 1}.get(form, 0) * shards[0].num_sent
    if form == "needed_rows":
        shares = sum(sum(delivery.send_sizes) for delivery in exchange.deliveries)
    assert own.sum() == shares * 2 * 8, "each once"
