"""What attention does in which order: K/V and gradients travel while something is computed."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_bp.attention.function import Plan
from megatron_bp.attention.kernels.tiled import Tiled
from megatron_bp.attention.parts import Part, View


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

    def returns(self, _: torch.dtype) -> "Remote":
        return self

    def start(self, i: int) -> None:
        self.log.append(f"start {i}")

    def wait(self, i: int) -> Tensor:
        self.log.append(f"wait {i}")
        return self.arrivals[i]

    def send(self, i: int, dkv: Tensor) -> None:
        self.log.append(f"send {i}")
        self.sent.append(dkv.clone())

    def collect(self, _: Tensor) -> None:
        self.log.append("collect")


def part(kernel: Tiled, rows: Any, count: int, keys: slice) -> Part:
    size = keys.stop - keys.start
    lo, hi = np.zeros(count, np.int32), np.full(count, size, np.int32)
    return Part(rows, keys, kernel.prepare(lo, hi, torch.device("cpu")), count * size)


FORWARD = "start 0, own, clean, wait 0, start 1, first, wait 1, second"
KEPT = "own, first, send 0, second, send 1, clean, collect"
FETCHED = "start 0, own, wait 0, start 1, first, send 0, wait 1, second, send 1, clean, collect"


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
