"""FlashAttention's kernel up to its operators, for which a dense softmax stands in on a CPU."""

import dense_flash
import numpy as np
import pytest
import torch
from planned import dense, planned_intervals, random_intervals, seeing

from megatron_bp.attention.kernels import flash, flash_ops, varlen
from megatron_bp.attention.kernels.cut import cut
from megatron_bp.attention.kernels.flash import Flash, make_flash
from megatron_bp.attention.kernels.pieces import Limits, Pieces, Trapezoid
from megatron_bp.attention.kernels.self_test import Part, computed, self_test
from megatron_bp.attention.kernels.self_test import dense as dense_attention
from megatron_bp.attention.kernels.varlen import Call, make_calls

CPU = torch.device("cpu")
HEADS, KEY_HEADS, DIM = 4, 2, 8
SMALL = Limits(
    trapezoid_rows=8, step_rows=24, rectangle_pairs=256, rectangle_keys=8, tile_rows=8, tile_keys=32
)


@pytest.fixture
def aten(monkeypatch: pytest.MonkeyPatch) -> dense_flash.Aten:
    stand_in = dense_flash.Aten()
    monkeypatch.setattr(flash_ops, "_aten_forward", stand_in.forward)
    monkeypatch.setattr(flash_ops, "_aten_backward", stand_in.backward)
    return stand_in


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> dense_flash.Four:
    stand_in = dense_flash.Four()
    monkeypatch.setattr(flash_ops, "_four", lambda: stand_in)
    return stand_in


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits by which small problems have pieces of every kind, and calls of several segments."""
    monkeypatch.setattr(flash, "LIMITS", SMALL)
    monkeypatch.setattr(varlen, "SOLO_PAIRS", 40 * 40)
    monkeypatch.setattr(varlen, "MOST_KEYS", 100)


def off(kernel: Flash, lo: np.ndarray, hi: np.ndarray, spare: int = 0) -> float:
    """The largest error of the kernel on these rows, with `spare` keys that nobody sees behind."""
    keys = int(hi.max()) + spare
    part = Part(np.arange(len(lo)), lo, hi, 0, keys)
    chance = torch.Generator().manual_seed(0)
    q, dout = torch.randn(2, len(lo), HEADS, DIM, dtype=torch.float64, generator=chance)
    # K and V lie beside each other, as the exchange brings them.
    packed = torch.randn(keys, 2, KEY_HEADS, DIM, dtype=torch.float64, generator=chance)
    k, v = packed.unbind(1)
    got = computed(kernel, q, k, v, dout, [part], 0.3)
    want = dense_attention(q, k, v, dout, [part], 0.3)
    return max(float((got[name] - want[name]).abs().max()) for name in want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_self_test_passes(
    dtype: torch.dtype, aten: dense_flash.Aten, four: dense_flash.Four
) -> None:
    """And it has calls of every kind."""
    self_test(Flash(), CPU, dtype, 32, heads=4, key_heads=2)
    assert {(call["causal"], len(call["rows"]) > 2) for call in aten.calls} >= {
        (True, True),
        (False, True),
    }
    self_test(make_flash("flash4"), CPU, dtype, 32, heads=4, key_heads=2)
    causal, rectangles, lagging = (True, None, None), (False, None, None), (False, None, -16)
    assert set(four.windows) == {causal, rectangles, lagging}


@pytest.mark.usefixtures("aten", "small")
@pytest.mark.parametrize("seed", range(40))
def test_random_intervals(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, keys = rng.integers(1, 130, 2)
    lo, hi = random_intervals(seed, int(rows), int(keys))
    assert off(Flash(), lo, hi, spare=int(rng.integers(0, 3))) < 1e-12


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("lengths", "block"), [([150], 8), ([61, 44, 33, 5], 4), ([96, 96], 32)])
@pytest.mark.parametrize("window", [None, 20])
def test_rows_of_plans(
    lengths: list[int], block: int, window: int | None, aten: dense_flash.Aten
) -> None:
    for name, (lo, hi) in planned_intervals(lengths, block, window):
        assert off(Flash(), lo, hi) < 1e-12, name
    assert any(call["causal"] for call in aten.calls) or window is not None
    assert any(len(call["rows"]) > 2 for call in aten.calls)


def staircase(tokens: int, block: int, strict: bool) -> tuple[np.ndarray, np.ndarray]:
    start = np.arange(tokens) // block * block
    hi = start if strict else start + block
    return seeing(np.zeros(tokens, np.int32), hi.astype(np.int32))


def test_a_long_staircase_is_one_causal_call_with_no_copy(aten: dense_flash.Aten) -> None:
    lo, hi = staircase(1024, 32, strict=True)
    q, k = torch.randn(len(lo), 2, 8), torch.randn(992, 1, 8)
    spec = Flash().prepare(lo, hi, CPU)
    Flash().forward(q, k, k, spec, 1.0, torch.zeros_like(q), torch.full((len(lo), 2), -torch.inf))
    (call,) = aten.calls
    assert call["causal"]
    assert call["rows"].tolist() == [0, 992]
    assert call["keys"].tolist() == [0, 992]
    assert call["q"].data_ptr() == q.data_ptr()
    assert call["k"].data_ptr() == k.data_ptr()


def test_own_blocks_are_one_call_of_many_segments_with_no_copy(aten: dense_flash.Aten) -> None:
    start = (np.arange(320) // 32 * 32).astype(np.int32)
    q, k = torch.randn(320, 2, 8), torch.randn(320, 1, 8)
    spec = Flash().prepare(start, start + 32, CPU)
    Flash().forward(q, k, k, spec, 1.0, torch.zeros_like(q), torch.full((320, 2), -torch.inf))
    assert spec.tiles == ()  # tiles that all their rows see are segments
    (call,) = aten.calls
    assert not call["causal"]
    assert call["rows"].tolist() == call["keys"].tolist() == list(range(0, 321, 32))
    assert call["q"].data_ptr() == q.data_ptr()


def test_large_blocks_are_no_row_of_small_calls() -> None:
    """At 256 tokens a block, what is left of a staircase is not a call a block."""
    lo, hi = staircase(8192, 256, strict=False)
    calls, tiles = make_calls(cut(lo, hi, flash.LIMITS), 8192)
    assert [len(call.row_offsets) for call in calls] == [2, 33]
    assert [call.causal for call in calls] == [True, False]
    assert len(tiles) < 20


def pairs_of(calls: list[Call], rows: int, keys: int) -> np.ndarray:
    """int[rows, keys]: how often each pair is computed."""
    times = np.zeros((rows, keys), dtype=np.int64)
    for call in calls:
        right = -call.lag if call.lag else None
        causal = call.causal and not call.lag
        offsets = torch.from_numpy(call.row_offsets), torch.from_numpy(call.key_offsets)
        mask = dense_flash.visible(*offsets, causal, right).numpy()
        row, key = (np.arange(most)[at] for most, at in ((rows, call.rows), (keys, call.keys)))
        assert len(np.unique(row)) == len(row)
        np.add.at(times, np.ix_(row, key), mask)
    return times


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_calls_and_tiles_cover_each_pair_once(seed: int, windows: bool) -> None:
    rng = np.random.default_rng(seed)
    rows, keys = (int(x) for x in rng.integers(1, 200, 2))
    lo, hi = random_intervals(seed, rows, keys)
    calls, tiles = make_calls(cut(lo, hi, SMALL), keys, windows)
    times = pairs_of(calls, rows, keys)
    for batch in tiles:
        assert not batch.full
        for t in range(len(batch.row)):
            for j in range(batch.rows):
                low, high = batch.key[t] + batch.lo[t, j], batch.key[t] + batch.hi[t, j]
                times[batch.row[t] + j, low:high] += 1
    np.testing.assert_array_equal(times, dense(lo, hi, keys))


def test_copied_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "MOST_KEYS", 1000)
    pieces = Pieces((), tuple(Trapezoid(10 * i, 10 * i + 10, 0, 400) for i in range(7)), ())
    calls, _ = make_calls(pieces, 400)
    assert [int(call.key_offsets[-1]) for call in calls] == [800, 1200, 800]


@pytest.mark.usefixtures("small")
def test_documents_lag_in_one_call_without_copies(four: dense_flash.Four) -> None:
    """Clean and corrupted rows of three documents, block size 8."""
    lows, highs = [], []
    for strict in (False, True):
        for start, size in ((0, 64), (64, 40), (104, 56)):
            lo, hi = staircase(size, 8, strict)
            lows.append(lo + start)
            highs.append(hi + start)
    lo, hi = (np.concatenate(x).astype(np.int32) for x in (lows, highs))
    assert off(make_flash("flash4"), lo, hi) < 1e-12
    assert four.windows.count((False, None, -8)) == 2  # forward and backward
    (call,) = (each for each in make_calls(cut(lo, hi, SMALL), 160, True)[0] if each.lag)
    assert (call.rows, call.keys, call.lag) == (slice(160, 296), slice(0, 160), 8)
    # Where nobody sees the last block, its document has no key to lag by.
    four.windows.clear()
    assert off(make_flash("flash4"), lo[160:], hi[160:]) < 1e-12
    assert set(four.windows) >= {(False, None, -8), (True, None, None)}


def test_a_row_is_in_no_call_twice_because_of_a_lag() -> None:
    pieces = Pieces((), (Trapezoid(0, 10, 0, 10), Trapezoid(5, 15, 18, 28)), ())
    calls, _ = make_calls(pieces, 40, windows=True)
    assert [(call.lag, call.rows) for call in calls] == [(0, slice(0, 10)), (0, slice(5, 15))]
    apart = Pieces((), (Trapezoid(0, 10, 0, 10), Trapezoid(12, 22, 18, 28)), ())
    (call,), _ = make_calls(apart, 36, windows=True)
    assert (call.lag, call.keys) == (8, slice(0, 36))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", range(12))
def test_four_on_random_intervals(seed: int, four: dense_flash.Four) -> None:
    lo, hi = random_intervals(seed, 90, 110)
    assert off(make_flash("flash4"), lo, hi) < 1e-12
    assert four.windows


def test_torch_is_told_which_flash_attention_answers(
    monkeypatch: pytest.MonkeyPatch, aten: dense_flash.Aten
) -> None:
    """Before every call, so that kernels of one process do not compute each other's attention."""
    active: list[str | None] = [None]
    module = torch.nn.attention
    monkeypatch.setattr(module, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(module, "restore_flash_attention_impl", lambda: active.append(None))
    monkeypatch.setattr(module, "current_flash_attention_impl", lambda: active[-1])
    kernels = [make_flash(name) for name in ("flash_fa3", "flash", "flash_fa4", "flash_fa4")]
    assert [kernel.name for kernel in kernels[:3]] == ["flash_fa3", "flash", "flash_fa4"]
    assert kernels[1] == Flash()
    for kernel in kernels:
        self_test(kernel, CPU, torch.float64, 8, heads=1, key_heads=1)
    assert active == [None, "FA3", None, "FA4"]


def test_torch_that_cannot_says_the_way_out() -> None:
    says = r"flash_fa3 failed its self-test .*cannot use FA3 .*; use --attention-kernel flash;"
    with pytest.raises(RuntimeError, match=says):
        self_test(make_flash("flash_fa3"), CPU, torch.float64, 8, heads=1, key_heads=1)


def test_the_operators_have_the_signatures_that_are_called() -> None:
    """Of the torch that is installed; the arguments are those of dense_flash.Aten."""
    import inspect

    for real, stand_in in (
        (torch.ops.aten._flash_attention_forward, dense_flash.Aten.forward),
        (torch.ops.aten._flash_attention_backward, dense_flash.Aten.backward),
    ):
        names = [each.name for each in real.default._schema.arguments]
        called = [each for each in inspect.signature(stand_in).parameters if each != "self"]
        assert names[: len(called)] == called
