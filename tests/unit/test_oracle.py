"""The oracle's own cases with answers known by hand (objectives, "Cases with known answers")."""

import math

import oracle
import pytest
import torch
from oracle import GPTShape
from torch import Tensor
from torch.testing import assert_close


def test_blocks_and_positions_restart_in_each_document() -> None:
    document = [0] * 5 + [1] * 6 + [-1] * 2
    assert oracle.block_of(document, 4) == [0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3, -1, -1]
    assert oracle.positions(document) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0, 0]


# --- case 1: visible pairs


def with_leak(length: int, block_size: int) -> Tensor:
    """The mask with the planted mistake: corrupted rows also see their own clean block (>=)."""
    mask = oracle.visible([0] * length, block_size)
    block = torch.tensor(oracle.block_of([0] * length, block_size))
    mask[length:, :length] = block[:, None] >= block[None, :]
    return mask


@pytest.mark.parametrize(
    ("length", "block_size", "by_block", "by_token", "leaky"),
    [(8, 4, 96, 84, 128), (8, 2, 80, 76, 96), (16, 4, 320, 296, 384)],
)
def test_pairs(length: int, block_size: int, by_block: int, by_token: int, leaky: int) -> None:
    document = [0] * length
    assert by_block == length**2 + length * block_size
    assert oracle.visible(document, block_size).sum() == by_block
    assert oracle.visible(document, block_size, clean_relation="token").sum() == by_token
    assert with_leak(length, block_size).sum() == leaky  # a leak would show in the count


def test_a_changed_clean_block_is_seen_by_later_blocks_only() -> None:
    mask = oracle.visible([0] * 8, 2)
    block = torch.arange(8) // 2
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 16, 2, 4, dtype=torch.float64, generator=generator)
    before = oracle.attention(q, k, v, mask)
    for changed in range(4):
        where = torch.cat([block == changed, torch.zeros(8, dtype=torch.bool)])
        k2, v2 = k.clone(), v.clone()
        k2[where] += 1
        v2[where] -= 1
        differs = (oracle.attention(q, k2, v2, mask) != before).flatten(1).any(1)
        assert differs[:8].equal(block >= changed)
        assert differs[8:].equal(block > changed)


# --- case 2: two packed documents


def test_packed_pairs() -> None:
    first, second = oracle.visible([0] * 5, 4), oracle.visible([0] * 6, 4)
    both = oracle.visible([0] * 5 + [1] * 6, 4)
    assert (first.sum(), second.sum(), both.sum()) == (42, 56, 98)
    rows = [*range(5), *range(11, 16)]
    assert both[rows][:, rows].equal(first)
    assert not both[rows][:, [i for i in range(22) if i not in rows]].any()


# --- case 4: weights


@pytest.mark.parametrize(("masked", "p", "over_masked"), [(100, 0.1, 10.0), (1, 0.001, 1000.0)])
def test_bound_weights(masked: int, p: float, over_masked: float) -> None:
    """1000 supervised tokens; two ids, with logits that make CE 1 everywhere."""
    length = 1000
    weights, shape = constant_model(math.log(math.e - 1))
    u = torch.full([length], 0.5)
    u[torch.randperm(length, generator=torch.Generator().manual_seed(0))[:masked]] = 0.0
    total, count, weight = 0.0, 0, 0.0
    for part in u.split(20):  # 50 samples of one block
        got = oracle.bound(weights, shape, [0] * 20, [0] * 20, 20, [p], part, mask_id=1, vocab=2)
        ce = got.table["ce"][got.table["masked"]]
        assert_close(ce, torch.ones_like(ce))
        total += got.total.item()
        count += got.count
        weight += got.table["weight"].sum().item()
    assert count == length
    assert total / count == pytest.approx(1.0)
    assert total / masked == pytest.approx(over_masked)
    assert weight == pytest.approx(total)


# --- case 6: dV with constant keys


@pytest.mark.parametrize(
    ("length", "corrupted", "clean", "total"),
    [
        (
            8,
            [1, 1, 0.5, 0.5, 1 / 3, 1 / 3, 0.25, 0.25],
            [3.166667] * 2 + [1.666667] * 2 + [0.833333] * 2 + [0.25] * 2,
            16,
        ),
        (
            7,
            [1, 1, 0.5, 0.5, 0.333333, 0.333333, 0.142857],
            [2.952381] * 2 + [1.452381] * 2 + [0.619048] * 2 + [0.142857],
            14,
        ),
    ],
)
def test_value_gradients_with_constant_keys(
    length: int, corrupted: list[float], clean: list[float], total: float
) -> None:
    rows = 2 * length
    q = torch.randn(rows, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    k = torch.ones(rows, 1, 4, dtype=torch.float64)
    v = torch.zeros(rows, 1, 1, dtype=torch.float64, requires_grad=True)
    oracle.attention(q, k, v, oracle.visible([0] * length, 2)).sum().backward()
    got = v.grad.flatten()
    assert_close(got, torch.tensor(clean + corrupted).double(), atol=1e-6, rtol=0)
    assert got.sum().item() == pytest.approx(total)


# --- what else the oracle promises


def test_the_picture_in_the_docstring() -> None:
    want = """
        x x . . . . . .
        x x . . . . . .
        x x x x . . . .
        x x x x . . . .
        . . . . x x . .
        . . . . x x . .
        x x . . . . x x
        x x . . . . x x"""
    assert picture(oracle.visible([0] * 4, 2)) == want.split()


def test_causal_own_relation() -> None:
    mask = oracle.visible([0] * 4, 2, own_relation="causal")
    assert picture(mask[4:, 4:]) == picture_of("x...", "xx..", "..x.", "..xx")
    assert mask[:, :4].equal(oracle.visible([0] * 4, 2)[:, :4])


def test_window_counts_from_the_row_and_spares_the_unit() -> None:
    mask = oracle.visible([0] * 6, 2, window=2)
    assert picture(mask[:6, :6]) == picture_of(
        "xx....", "xx....", ".xxx..", "..xx..", "...xxx", "....xx"
    )
    assert picture(mask[6:, :6]) == picture_of(
        "......", "......", ".x....", "......", "...x..", "......"
    )
    assert mask[6:, 6:].equal(oracle.visible([0] * 6, 2)[6:, 6:])
    block = oracle.visible([0] * 6, 2, window=2, window_anchor="block")
    assert picture(block[6:, :6]) == picture_of(
        "......", "......", ".x....", ".x....", "...x..", "...x.."
    )
    assert block[:6].equal(mask[:6])


def test_window_stays_in_the_document() -> None:
    mask = oracle.visible([0, 0, 0, 1, 1, 1], 1, window=3)
    assert picture(mask[:6, :6]) == picture_of(
        "x.....", "xx....", "xxx...", "...x..", "...xx.", "...xxx"
    )


def test_prompt_blocks_have_no_corrupted_rows() -> None:
    supervised = [False] * 3 + [True] * 3
    rows = oracle.corrupted_rows([0] * 6, 2, supervised)
    assert rows == [2, 3, 4, 5]
    mask = oracle.visible([0] * 6, 2, corrupted=rows)
    full = oracle.visible([0] * 6, 2)
    keep = [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]
    assert mask.equal(full[keep][:, keep])
    with pytest.raises(AssertionError, match="block 0 copy 0 has corrupted rows"):
        oracle.visible([0] * 6, 2, corrupted=[1, 2, 3])


def test_copies_do_not_see_one_another() -> None:
    mask = oracle.visible([0] * 4, 2, corrupted=[0, 1, 0, 1], copy=[0, 0, 1, 1])
    assert picture(mask[4:, 4:]) == picture_of("xx..", "xx..", "..xx", "..xx")


def test_padding_sees_and_is_seen_by_nothing() -> None:
    mask = oracle.visible([0] * 3 + [-1] * 2, 2)
    assert mask.shape == (8, 8)
    assert not mask[3:5].any()
    assert not mask[:, 3:5].any()


def test_a_row_without_keys_gives_zero_and_no_gradient() -> None:
    q, k, v = (torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    out = oracle.attention(q, k, v, mask)
    assert out[1].eq(0).all()
    out[1].sum().backward()
    for x in (q, k, v):
        assert x.grad.eq(0).all()
    lse = oracle.log_sum_exp(q, k, mask)
    assert lse[1].eq(-math.inf).all()
    assert lse[[0, 2, 3]].isfinite().all()


def test_attention_is_torch_sdpa() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(12, 6, 4, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 12, 2, 4, dtype=torch.float64, generator=generator)
    mask = oracle.visible([0] * 6, 4)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    )
    assert_close(oracle.attention(q, k, v, mask), want.transpose(0, 1))
    scores = torch.einsum("shd,khd->shk", q, k.repeat_interleave(3, 1)) / 2
    want = scores.masked_fill(~mask[:, None], -math.inf).logsumexp(-1)
    assert_close(oracle.log_sum_exp(q, k, mask), want)


def test_cross_entropy_gives_padded_ids_no_probability() -> None:
    logits = torch.zeros(2, 8, requires_grad=True)
    ce = oracle.cross_entropy(logits, torch.tensor([0, 4]), vocab=5)
    assert_close(ce, torch.full([2], math.log(5)).double())
    ce.sum().backward()
    assert logits.grad[:, 5:].eq(0).all()
    ce = oracle.cross_entropy(logits, torch.tensor([0, 2]), vocab=5, excluded=[4])
    assert_close(ce, torch.full([2], math.log(4)).double())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_scores_depend_on_the_distance_only(interleaved: bool) -> None:
    q, k = torch.randn(2, 5, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k = q[:1].expand_as(q), k[:1].expand_as(k)
    position = torch.arange(5)
    for percent in (1.0, 0.5):
        a, b = (
            torch.einsum(
                "shd,shd->s",
                oracle.rotary(q, position + shift, 100.0, percent, interleaved),
                oracle.rotary(k, position.flip(0) + shift, 100.0, percent, interleaved),
            )
            for shift in (0, 7)
        )
        assert_close(a, b)
        assert a.unique().numel() == 5
    assert oracle.rotary(q, position, percent=0.5)[..., 4:].equal(q[..., 4:])
    assert oracle.rotary(q, position)[0].equal(q[0])


# --- the bound


def constant_model(logit: float, vocab: int = 2) -> tuple[dict[str, Tensor], GPTShape]:
    """A model whose logits are 0 for id 0 and `logit` for every other, whatever it reads."""
    shape = GPTShape(layers=0, hidden=2, heads=1, groups=1, head_dim=2, eps=0.0)
    output = torch.full([vocab, 2], logit, dtype=torch.float64) / 2
    output[0] = 0
    weights = {
        "embedding.word_embeddings.weight": torch.ones(vocab, 2, dtype=torch.float64),
        "decoder.final_layernorm.weight": torch.ones(2, dtype=torch.float64),
        "output_layer.weight": output,
    }
    return weights, shape


def small_model(seed: int = 0) -> tuple[dict[str, Tensor], GPTShape]:
    """Two layers, 12 ids (10 true ones), random weights that ask for gradients."""
    shape = GPTShape(layers=2, hidden=8, heads=2, groups=1, head_dim=4)
    sizes = {"embedding.word_embeddings.weight": (12, 8), "output_layer.weight": (12, 8)}
    for n in range(2):
        layer = f"decoder.layers.{n}."
        sizes |= {
            layer + "input_layernorm.weight": (8,),
            layer + "self_attention.linear_qkv.weight": (16, 8),
            layer + "self_attention.linear_proj.weight": (8, 8),
            layer + "pre_mlp_layernorm.weight": (8,),
            layer + "mlp.linear_fc1.weight": (24, 8),
            layer + "mlp.linear_fc2.weight": (8, 12),
        }
    sizes["decoder.final_layernorm.weight"] = (8,)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(size, dtype=torch.float64, generator=generator).requires_grad_()
        for name, size in sizes.items()
    }
    return weights, shape


TOKENS = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 8]
U = [0.1, 0.9, 0.3, 0.6, 0.2, 0.7, 0.4, 0.05, 0.8, 0.5, 0.35]


def test_the_table() -> None:
    weights, shape = small_model()
    got = oracle.bound(
        weights, shape, TOKENS[:6], [0] * 5 + [-1], 2, [0.5, 0.8, 0.1], U, mask_id=9, vocab=10
    )
    assert got.count == 5
    assert got.table["corrupted"].tolist() == [9, 1, 9, 9, 5, -1]
    assert got.table["masked"].tolist() == [True, False, True, True, False, False]
    want = torch.tensor([2, 0, 1.25, 1.25, 0, 0]).double()
    assert_close(got.table["weight"], want)
    assert got.table["ce"].ne(0).tolist() == got.table["masked"].tolist()
    assert_close(got.total, (want * got.table["ce"]).sum())


def test_the_weightings() -> None:
    assert oracle.noise(0.3) == (0.3, 1.0)
    p, slope = oracle.noise(0.5, "cosine")
    assert (p, slope) == pytest.approx((1 - math.sqrt(0.5), math.pi / 2 * math.sqrt(0.5)))
    weights, shape = small_model()
    for weighting, want in (("bound", slope / p), ("one", 1.0), ("inverse_p", 1 / p)):
        got = oracle.bound(
            weights, shape, [3, 1], [0, 0], 2, [0.5], [0.0, 0.9],
            mask_id=9, vocab=10, weighting=weighting, schedule="cosine",
        )  # fmt: skip
        assert got.table["weight"].tolist() == pytest.approx([want, 0.0])


def test_a_packed_row_is_the_sum_of_its_documents() -> None:
    """Case 2: the loss sum and every gradient."""
    t = [0.5, 0.9, 0.7, 0.4]
    total, gradients = {}, {}
    for name, parts in (("packed", [(0, 11, 0)]), ("alone", [(0, 5, 0), (5, 11, 2)])):
        weights, shape = small_model()
        total[name] = torch.zeros([], dtype=torch.float64)
        for start, stop, first_block in parts:
            document = ([0] * 5 + [1] * 6)[start:stop]
            got = oracle.bound(
                weights, shape, TOKENS[start:stop], document, 4, t[first_block:], U[start:stop],
                mask_id=9, vocab=10,
            )  # fmt: skip
            assert got.count == stop - start
            total[name] = total[name] + got.total
        total[name].backward()
        gradients[name] = {key: weight.grad for key, weight in weights.items()}
    assert_close(total["packed"], total["alone"])
    assert_close(gradients["packed"], gradients["alone"])


def test_it_is_what_a_decoder_would_see() -> None:
    """Block by block: the clean tokens before it, then the block as it is when half denoised."""
    weights, shape = small_model()
    t = [0.5, 0.9, 0.7]
    got = oracle.bound(weights, shape, TOKENS, [0] * 11, 4, t, U, mask_id=9, vocab=10)
    for start in range(0, 11, 4):
        stop = min(start + 4, 11)
        masked = [U[i] < t[start // 4] for i in range(start, stop)]
        block = [9 if m else TOKENS[i] for i, m in zip(range(start, stop), masked, strict=True)]
        position = torch.arange(stop)
        seen = position[:, None] // 4 >= position[None, :] // 4
        logits = oracle.gpt(weights, shape, torch.tensor(TOKENS[:start] + block), position, seen)
        ce = oracle.cross_entropy(logits[start:], torch.tensor(TOKENS[start:stop]), vocab=10)
        assert_close(got.table["ce"][start:stop], ce * torch.tensor(masked))


def test_only_supervised_tokens_are_corrupted_and_scored() -> None:
    weights, shape = small_model()
    supervised = [False, False, False, True, True, True]
    got = oracle.bound(
        weights, shape, TOKENS[:6], [0] * 6, 2, [1.0] * 3, U,
        mask_id=9, vocab=10, supervised=supervised,
    )  # fmt: skip
    assert got.count == 3
    assert got.table["corrupted"].tolist() == [-1, -1, 4, 9, 9, 9]
    assert got.table["masked"].tolist() == supervised


def test_nothing_supervised_gives_zero() -> None:
    weights, shape = small_model()
    got = oracle.bound(
        weights, shape, TOKENS[:4], [0] * 4, 2, [1.0] * 2, U,
        mask_id=9, vocab=10, supervised=[False] * 4,
    )  # fmt: skip
    assert (got.total.item(), got.count) == (0.0, 0)
    got.total.backward()
    assert all(weight.grad.eq(0).all() for weight in weights.values() if weight.grad is not None)


def test_a_masked_token_and_its_block_mates_do_not_leak_its_id() -> None:
    """The loss of block b reads no clean token of block b other than as a label."""
    weights, shape = small_model()
    kind = {"mask_id": 9, "vocab": 10}
    one = oracle.bound(weights, shape, [1, 2, 3, 4], [0] * 4, 2, [1.0] * 2, [0.0] * 4, **kind)
    two = oracle.bound(weights, shape, [1, 2, 5, 4], [0] * 4, 2, [1.0] * 2, [0.0] * 4, **kind)
    same = one.table["ce"] == two.table["ce"]
    assert same.tolist() == [True, True, False, True]


def picture(mask: Tensor) -> list[str]:
    return ["x" if seen else "." for seen in mask.flatten().tolist()]


def picture_of(*rows: str) -> list[str]:
    return list("".join(rows))
