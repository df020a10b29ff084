"""The loss head: weighted cross-entropy in chunks against the oracle, and its peak memory."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_bp.batch.shard import LocalTerm
from megatron_bp.model.output import (
    Excluded,
    LossHead,
    Scored,
    scored_rows,
    weighted_cross_entropy,
)

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY, HIDDEN, ROWS = 300, 16, 11


def inputs(
    rows: int = ROWS, padded: int = VOCABULARY, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight (its first rows the same whatever the padding), labels, weights."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, weights = normal(rows, HIDDEN), normal(VOCABULARY, HIDDEN), normal(rows).exp()
    labels = torch.randint(VOCABULARY, (rows,), generator=generator)
    weight = torch.cat([weight, 3 * normal(padded - VOCABULARY, HIDDEN)])
    return hidden.to(dtype), weight.to(dtype), labels, weights.float()


def grads(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def ours(
    hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor, rows_a_chunk: int = 3
) -> list[Tensor]:
    """[loss, gradient of hidden, gradient of weight]."""
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss, ce = weighted_cross_entropy(
        *leaves, labels, weights, VOCABULARY, VOCABULARY * rows_a_chunk
    )
    assert not ce.requires_grad
    torch.testing.assert_close((weights.to(ce) * ce).sum(), loss.detach())
    return [loss.detach(), *grads(loss, *leaves)]


def dense(hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor) -> list[Tensor]:
    leaves = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    ce = oracle.cross_entropy(leaves[0] @ leaves[1].T, labels, VOCABULARY)
    loss = (weights.double() * ce).sum()
    return [loss.detach(), *grads(loss, *leaves)]


@pytest.mark.parametrize("rows_a_chunk", [1, 3, ROWS, 1000])
def test_value_and_gradients_are_the_oracles(rows_a_chunk: int) -> None:
    for got, want in zip(ours(*inputs(), rows_a_chunk), dense(*inputs()), strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_a_chunk_holds_no_more_logits_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, real = [], torch.logsumexp

    def logsumexp(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        sizes.append(len(x))
        return real(x, *args, **kwargs)

    monkeypatch.setattr(torch, "logsumexp", logsumexp)
    ours(*inputs(), 4)
    assert sizes == [4, 4, 3]


def test_gradients_are_scaled_by_what_comes_from_above() -> None:
    hidden, weight, labels, weights = inputs()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss, _ = weighted_cross_entropy(*leaves, labels, weights, VOCABULARY)
    for got, want in zip(grads(loss * -2.5, *leaves), dense(*inputs())[1:], strict=True):
        torch.testing.assert_close(got, -2.5 * want, rtol=1e-9, atol=1e-9)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, labels, weights = inputs(dtype=torch.float32)
    got = ours(hidden * 1e3, weight, labels, weights)
    for ours_, want in zip(got, dense(hidden * 1e3, weight, labels, weights), strict=True):
        torch.testing.assert_close(ours_.double(), want, rtol=1e-4, atol=1e-3)


def test_no_scored_row_gives_zero_and_a_backward_that_runs() -> None:
    loss, dhidden, dweight = ours(*inputs(rows=0))
    assert loss == 0
    assert dhidden.shape == (0, HIDDEN)
    assert dweight.shape == (VOCABULARY, HIDDEN)
    assert not dweight.any()


@pytest.mark.parametrize("padded", [384, 512])
def test_padding_of_the_vocabulary_takes_no_part(padded: int) -> None:
    loss, dhidden, dweight = ours(*inputs(padded=padded))
    want_loss, want_dhidden, want_dweight = dense(*inputs())
    torch.testing.assert_close(loss, want_loss, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dhidden, want_dhidden, rtol=1e-9, atol=1e-9)
    assert dweight.shape == (padded, HIDDEN)
    torch.testing.assert_close(dweight[:VOCABULARY], want_dweight, rtol=1e-9, atol=1e-9)
    assert torch.equal(dweight[VOCABULARY:], torch.zeros(padded - VOCABULARY, HIDDEN).double())


def test_without_gradients_the_value_is_the_same_and_none_is_formed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, labels, weights = inputs()
    for name in ("zeros_like", "empty_like"):  # where the gradients would go
        monkeypatch.setattr(torch, name, None)
    with torch.no_grad():
        loss, ce = weighted_cross_entropy(
            hidden.requires_grad_(), weight.requires_grad_(), labels, weights, VOCABULARY
        )
    monkeypatch.undo()
    assert not ce.requires_grad
    assert not loss.requires_grad
    torch.testing.assert_close(loss, dense(*inputs())[0], rtol=1e-9, atol=1e-9)


def test_bfloat16_is_within_twice_the_error_of_plain_pytorch() -> None:
    hidden, weight, labels, weights = inputs(rows=1024, dtype=torch.bfloat16)
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    ce = F.cross_entropy(leaves[0] @ leaves[1].T, labels, reduction="none")
    loss = (weights * ce).sum()
    plain = [loss.detach(), *grads(loss, *leaves)]
    want = dense(hidden, weight, labels, weights)
    got_in_chunks = ours(hidden, weight, labels, weights, rows_a_chunk=2)
    for got, other, exact in zip(got_in_chunks, plain, want, strict=True):
        error, budget = ((x.double() - exact).norm() for x in (got, other))
        assert error <= 2 * budget
        assert error < 0.02 * exact.norm()


def test_the_sum_is_float32_and_the_gradients_keep_their_dtype() -> None:
    loss, dhidden, dweight = ours(*inputs(dtype=torch.bfloat16))
    assert (loss.dtype, dhidden.dtype, dweight.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    )


def term(labels: Tensor, weights: Tensor, name: str = "diffusion") -> LocalTerm:
    return LocalTerm(name, labels, weights, int(torch.count_nonzero(weights)), 1.0)


@pytest.mark.parametrize("rows_a_chunk", [1, 3, ROWS])
def test_the_cross_entropy_of_each_row_is_the_oracles(rows_a_chunk: int) -> None:
    hidden, weight, labels, weights = inputs()
    _, got = weighted_cross_entropy(
        hidden, weight, labels, weights, VOCABULARY, VOCABULARY * rows_a_chunk
    )
    want = oracle.cross_entropy(hidden @ weight.T, labels, VOCABULARY)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("token", [0, 7, VOCABULARY - 1])
@pytest.mark.parametrize("rows_a_chunk", [1, 3, ROWS])
def test_an_excluded_id_takes_no_part_in_its_rows(token: int, rows_a_chunk: int) -> None:
    hidden, weight, labels, weights = inputs(padded=384)
    labels[labels == token] = 1
    out = torch.tensor([row % 3 != 0 for row in range(ROWS)])
    labels[0] = token  # of a row that keeps it
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss, ce = weighted_cross_entropy(
        *leaves,
        labels,
        weights,
        VOCABULARY,
        VOCABULARY * rows_a_chunk,
        excluded=Excluded(token, out),
    )
    wanted = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    logits = wanted[0] @ wanted[1].T
    want = torch.empty_like(ce)
    want[out] = oracle.cross_entropy(logits[out], labels[out], VOCABULARY, [token])
    want[~out] = oracle.cross_entropy(logits[~out], labels[~out], VOCABULARY)
    torch.testing.assert_close(ce, want.detach(), rtol=1e-9, atol=1e-9)
    truth = grads((weights.double() * want).sum(), *wanted)
    for got, right in zip(grads(loss, *leaves), truth, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)


def test_an_excluded_id_gets_no_gradient_of_its_rows() -> None:
    hidden, weight, labels, weights = inputs()
    leaf, every = weight.requires_grad_(), torch.ones(ROWS, dtype=torch.bool)
    labels[labels == 5] = 1
    loss, _ = weighted_cross_entropy(
        hidden, leaf, labels, weights, VOCABULARY, excluded=Excluded(5, every)
    )
    (gradient,) = grads(loss, leaf)
    assert not gradient[5].any()
    assert gradient[4].any()


@pytest.mark.parametrize("excluded_id", [None, 7])
def test_rows_of_the_diffusion_term_leave_the_mask_token_out(excluded_id: int | None) -> None:
    hidden, weight, labels, _ = inputs()
    labels[labels == 7] = 1
    one, two = torch.zeros(2, ROWS).unbind()
    one[[1, 3]], two[[0, 1]] = 1.0, 1.0
    scored = scored_rows([term(labels, one), term(labels, two, "ar")], [1.0, 1.0])
    assert scored.without_mask.tolist() == [True, True, False, False]
    head = LossHead(scored, VOCABULARY, excluded_id=excluded_id)
    head(hidden_states=hidden[:, None], output_layer=torch.nn.Identity(), output_weight=weight)
    out = [] if excluded_id is None else [excluded_id]
    logits = hidden @ weight.T
    first = oracle.cross_entropy(logits[[1, 3]], labels[[1, 3]], VOCABULARY, out)
    second = oracle.cross_entropy(logits[[0, 1]], labels[[0, 1]], VOCABULARY)
    assert head.cross_entropy is not None
    torch.testing.assert_close(head.cross_entropy, torch.cat([first, second]))


@pytest.mark.parametrize("tied", [False, True])
def test_loss_head_scores_the_chosen_rows(tied: bool) -> None:
    hidden, weight, labels, _ = inputs()
    weights = torch.tensor([0.0, 2.0, 0.0, 0.5] + [0.0] * (ROWS - 4))
    scored = scored_rows([term(labels, weights)], [1.0])
    assert scored.rows.tolist() == [1, 3]
    layer = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
    leaf = hidden.clone().requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(weight if not tied else torch.zeros_like(weight))
    head = LossHead(scored, VOCABULARY)
    loss = head(
        hidden_states=leaf[:, None],
        output_layer=layer,
        output_weight=weight if tied else None,
        context=None,
        anything_else=None,
    )
    want, want_dhidden, _ = dense(hidden, weight, labels, weights)
    torch.testing.assert_close(loss.detach(), want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grads(loss, leaf)[0], want_dhidden, rtol=1e-9, atol=1e-9)
    ce = oracle.cross_entropy(hidden[[1, 3]] @ weight.T, labels[[1, 3]], VOCABULARY)
    assert head.cross_entropy is not None
    torch.testing.assert_close(head.cross_entropy, ce, rtol=1e-9, atol=1e-9)


def test_a_row_that_two_terms_score_counts_in_both_with_their_scales() -> None:
    hidden, weight, labels, _ = inputs()
    one = torch.tensor([0.0, 2.0, 0.0, 0.5] + [0.0] * (ROWS - 4))
    two = torch.tensor([1.0, 3.0] + [0.0] * (ROWS - 2))
    other = labels.flip(0)
    scored = scored_rows([term(labels, one), term(other, two, "ar")], [0.25, -3.0])
    assert scored.rows.tolist() == [1, 3, 0, 1]
    assert scored.term.tolist() == [0, 0, 1, 1]
    assert scored.weights.tolist() == [2.0, 0.5, 1.0, 3.0]
    assert scored.scale.tolist() == [0.25, 0.25, -3.0, -3.0]
    assert scored.labels.tolist() == [*labels[[1, 3]].tolist(), *other[[0, 1]].tolist()]
    leaf = hidden.clone().requires_grad_()
    loss = LossHead(scored, VOCABULARY)(
        hidden_states=leaf[:, None], output_layer=torch.nn.Identity(), output_weight=weight
    )
    first, second = dense(hidden, weight, labels, one), dense(hidden, weight, other, two)
    torch.testing.assert_close(loss.detach(), 0.25 * first[0] - 3 * second[0])
    torch.testing.assert_close(grads(loss, leaf)[0], 0.25 * first[1] - 3 * second[1])


def test_a_term_that_scores_nothing_on_a_rank_leaves_the_other_alone() -> None:
    labels, weights = torch.tensor([4, 5, 6]), torch.tensor([0.0, 1.0, 2.0])
    scored = scored_rows([term(labels, 0 * weights), term(labels, weights)], [5.0, 7.0])
    assert scored.term.tolist() == [1, 1]
    assert scored.scale.tolist() == [7.0, 7.0]


def test_scored_rows_move_as_one() -> None:
    labels, weights = torch.tensor([4, 5, 6]), torch.tensor([0.0, 1.0, 2.0])
    scored = scored_rows([term(labels, weights)], [1.5])
    meta, same = scored.to(torch.device("meta")), scored.to(torch.device("cpu"))
    assert {getattr(meta, f.name).device.type for f in fields(Scored)} == {"meta"}
    assert (same.rows.tolist(), same.labels.tolist(), same.weights.tolist()) == (
        [1, 2],
        [5, 6],
        [1.0, 2.0],
    )
    assert (same.scale.tolist(), same.term.tolist()) == ([1.5, 1.5], [0, 0])


PEAK = """
import resource, torch
from megatron_bp.model.output import weighted_cross_entropy
torch.set_num_threads(2)
rows, vocabulary, hidden = {rows}, {vocabulary}, 64
h = torch.randn(rows, hidden, requires_grad=True)
w = (torch.randn(vocabulary, hidden) / 8).requires_grad_()
labels, weights = torch.randint(vocabulary, (rows,)), torch.ones(rows)
weighted_cross_entropy(h[:2], w[:256], labels[:2] % 256, weights[:2], 256)[0].backward()
h.grad = w.grad = None
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
weighted_cross_entropy(h, w, labels, weights, vocabulary)[0].backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def peak_growth(rows: int, vocabulary: int) -> int:
    """Bytes by which the peak of a fresh process grows in a forward and backward."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-c", PEAK.format(rows=rows, vocabulary=vocabulary)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(run.stdout.split()[-1]) * 1024


def test_peak_memory_is_that_of_one_chunk() -> None:
    """Whole logits would be 2.15 GB, and their gradient as much again."""
    assert peak_growth(4 * 1024, 128 * 1024) < 1.5e9
