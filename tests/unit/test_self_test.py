"""The self-test passes right kernels in every dtype, and names what is wrong with others."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_bp.attention.kernels.choose import choose
from megatron_bp.attention.kernels.self_test import parts, self_test
from megatron_bp.attention.kernels.tiled import Tiled

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


class OneKeyMore(Tiled):
    """A mask that is off by one at its end, where there is a key more."""

    def prepare(self, lo: Any, hi: Any, device: torch.device) -> Any:
        return super().prepare(lo, np.minimum(hi + 1, hi.max()).astype(np.int32), device)


class OneKeyEarlier(Tiled):
    """A mask that is off by one at its start."""

    def prepare(self, lo: Any, hi: Any, device: torch.device) -> Any:
        return super().prepare(np.maximum(lo - 1, 0).astype(np.int32), hi, device)


class LogTwo(Tiled):
    """Log-sum-exp in log2, as FlexAttention's operator has it."""

    def forward(self, *args: Any) -> None:
        super().forward(*args)
        args[-1].div_(np.log(2.0))


class OwnLse(Tiled):
    """A backward that normalises by its own part's log-sum-exp."""

    def backward(self, *args: Any) -> None:
        dout, q, k, v, out, lse, spec, scale, dq, dk, dv = args
        own = torch.full_like(lse, -torch.inf)
        Tiled.forward(self, q, k, v, spec, scale, torch.zeros_like(dq), own)
        super().backward(dout, q, k, v, out, own, spec, scale, dq, dk, dv)


class Overwrites(Tiled):
    """A backward that sets dq where it should add to it."""

    def backward(self, *args: Any) -> None:
        args[8].zero_()
        super().backward(*args)


class HeadsInterleaved(Tiled):
    """Query head h reads key head h % H instead of h // G."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
        order = torch.arange(q.shape[1]).view(-1, k.shape[1]).T.flatten()
        super().forward(q[:, order], k, v, *rest)


class NotANumber(Tiled):
    """dv is NaN somewhere."""

    def backward(self, *args: Any) -> None:
        super().backward(*args)
        args[-1][0, 0, 0] = torch.nan


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 2, 16), (3, 3, 64), (40, 8, 128)])
@pytest.mark.parametrize("name", ["tiled", "sdpa"])
def test_a_right_kernel_passes(
    name: str, dtype: torch.dtype, heads: int, key_heads: int, dim: int
) -> None:
    before = torch.random.get_rng_state()
    self_test(choose(name, "cpu", dtype, dim), CPU, dtype, dim, heads, key_heads)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "quantity"),
    [
        (OneKeyMore(), "output"),
        (OneKeyEarlier(), "output"),
        (LogTwo(), "output"),
        (OwnLse(), "dq"),
        (Overwrites(), "dq"),
        (HeadsInterleaved(), "output"),
        (NotANumber(), "dv"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Tiled) else x,
)
def test_a_wrong_kernel_is_named(kernel: Tiled, quantity: str, dtype: torch.dtype) -> None:
    match = rf"kernel tiled is wrong.*its {quantity} is off by .*--attention-kernel tiled"
    with pytest.raises(RuntimeError, match=match):
        self_test(kernel, CPU, dtype, 32, 4, 2)


def test_a_kernel_that_raises_is_named() -> None:
    class Broken(Tiled):
        def forward(self, *args: Any) -> None:
            raise NotImplementedError("no kernel image")

    with pytest.raises(RuntimeError, match=r"tiled failed its self-test on cpu.*no kernel image"):
        self_test(Broken(), CPU, torch.float32, 32, 4, 2)


def test_the_problem_has_rows_of_every_kind() -> None:
    rows, keys, (clean, own) = parts()
    assert keys == 618
    both = np.intersect1d(clean.rows, own.rows)
    assert len(both) > 100
    assert len(np.setdiff1d(own.rows, clean.rows)) == 48  # first blocks: no clean prefix
    assert np.array_equal(np.union1d(clean.rows, own.rows), np.arange(rows))
    width = clean.hi - clean.lo
    assert (width == 40).any()
    assert np.median(own.hi - own.lo) == 16
    assert (own.hi - own.lo).min() == 5
