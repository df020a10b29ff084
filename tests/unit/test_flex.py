"""FlexAttention's block mask against the dense mask, and its two calls, on a CPU."""

import numpy as np
import pytest
import torch
from planned import dense, planned_intervals, random_intervals
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from megatron_bp.attention.kernels import flex
from megatron_bp.attention.kernels.flex import Flex, block_mask, tile_map
from megatron_bp.attention.kernels.self_test import self_test

CPU = torch.device("cpu")
LAYOUTS = [([600], 32), ([300, 129, 77, 6], 16), ([512], 128), ([257, 300], 7)]


def tiles_of(lo: np.ndarray, hi: np.ndarray, keys: int, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Tiles with a visible pair and an invisible one, and tiles with none invisible, by looking."""
    seen = dense(lo, hi, keys)
    seen = np.pad(seen, ((0, -len(lo) % tile), (0, -keys % tile)))
    cut = seen.reshape(len(seen) // tile, tile, -1, tile)
    some, every = cut.any((1, 3)), cut.all((1, 3))
    return some & ~every, every


@pytest.mark.parametrize("seed", range(60))
def test_tiles_of_random_intervals(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tile = int(rng.choice([4, 8, 16]))
    rows, keys = rng.integers(1, 90, 2)
    lo, hi = random_intervals(seed, int(rows), int(keys))
    got = tile_map(lo, hi, int(keys), tile)
    for name, have, want in zip(got._fields, got, tiles_of(lo, hi, int(keys), tile), strict=True):
        np.testing.assert_array_equal(have, want, err_msg=name)


@pytest.mark.parametrize(("lengths", "block"), LAYOUTS)
@pytest.mark.parametrize("window", [None, 100])
def test_tiles_of_plans(lengths: list[int], block: int, window: int | None) -> None:
    whole = 0
    for name, (lo, hi) in planned_intervals(lengths, block, window):
        keys = int(hi.max())
        got = tile_map(lo, hi, keys)
        for have, want in zip(got, tiles_of(lo, hi, keys, flex.TILE), strict=True):
            np.testing.assert_array_equal(have, want, err_msg=name)
        whole += int(got.full.sum())
    assert whole > 0 or window is not None


@pytest.mark.parametrize("seed", range(8))
def test_the_block_mask_is_the_one_that_torch_makes_by_evaluating_every_pair(seed: int) -> None:
    rows, keys = [(300, 520), (128, 128), (1, 700), (513, 100)][seed % 4]
    lo, hi = random_intervals(seed // 4 + 2, rows, keys)
    keys = int(hi.max())
    mine = block_mask(lo, hi, keys, CPU)
    torchs = create_block_mask(mine.mask_mod, 1, 1, rows, keys, device="cpu")
    assert mine.shape == torchs.shape == (1, 1, rows, keys)
    for side in ("kv", "full_kv", "q", "full_q"):
        count = getattr(mine, f"{side}_num_blocks")
        assert torch.equal(count, getattr(torchs, f"{side}_num_blocks")), side
        here, there = getattr(mine, f"{side}_indices"), getattr(torchs, f"{side}_indices")
        assert here.shape == there.shape
        assert here.dtype == there.dtype
        real = torch.arange(here.shape[-1]) < count[..., None]
        assert torch.equal(here[real], there[real]), side
        assert here.is_contiguous()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 320])
def test_the_kernel_is_a_dense_softmax(dtype: torch.dtype, dim: int) -> None:
    self_test(Flex(direct=True), CPU, dtype, dim, heads=4, key_heads=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_backward_by_recomputing_the_part(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plain attention in place of FlexAttention, which has no gradient on a CPU."""

    def plain(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float, _: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = dtype if dtype == torch.float64 else torch.float32
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        row, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        score = (q.to(wide) @ k.to(wide).mT * scale).masked_fill(
            ~mask.mask_mod(row, row, row, key), -torch.inf
        )
        return (score.softmax(-1) @ v.to(wide)).to(dtype), score.logsumexp(-1)

    monkeypatch.setattr(flex, "_forward", plain)
    self_test(Flex(direct=False), CPU, dtype, 32, heads=4, key_heads=2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_keys_behind_the_last_one_seen_are_left_alone() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 16), torch.randn(9, 1, 16), torch.randn(9, 1, 16)
    lo, hi = np.array([0, 1, 2], np.int32), np.array([2, 3, 5], np.int32)
    spec = Flex().prepare(lo, hi, CPU)
    assert spec.keys == 5
    k[5:] = torch.nan
    out, lse = torch.zeros(3, 2, 16), torch.full((3, 2), -torch.inf)
    Flex().forward(q, k, v, spec, 0.25, out, lse)
    dq, dk, dv = torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)
    Flex().backward(q, q, k, v, out, lse, spec, 0.25, dq, dk, dv)
    assert all(bool(x.isfinite().all()) for x in (out, lse, dq, dk, dv))
    assert torch.equal(dk[5:], torch.ones(4, 1, 16))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not flex.DIRECT, reason="before torch 2.13")
def test_both_directions_compile_whole_and_not_again_for_other_row_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to the graph: what a CPU can not do is lower it to a kernel."""
    graphs: list[str] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append(" ".join(str(each) for each in called if "flex" in str(each)))
        return graph

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with torch._dynamo.config.patch(disable=False):
        compiled = flex._compiled.__wrapped__
        runs = {f: compiled(f, count) for f in (flex._forward, flex._backward)}
        monkeypatch.setattr(flex, "_runner", lambda function, device: runs[function])
        for seed, rows, keys in [(1, 200, 300), (2, 300, 400), (3, 131, 529)]:
            q, k = torch.randn(rows, 2, 16), torch.randn(keys, 1, 16)
            lo, hi = random_intervals(seed, rows, keys)
            spec = Flex().prepare(lo, hi, CPU)
            out, lse = torch.zeros_like(q), torch.full((rows, 2), -torch.inf)
            Flex().forward(q, k, k, spec, 0.25, out, lse)
            totals = [torch.zeros_like(x) for x in (q, k, k)]
            Flex().backward(q, q, k, k, out, lse, spec, 0.25, *totals)
    assert graphs == 2 * ["flex_attention", "flex_attention_backward"]
