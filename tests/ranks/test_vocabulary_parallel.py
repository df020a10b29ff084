"""What is computed over TP ranks' ids, against the dense definition: an excluded id on any rank."""

import oracle
import pytest
import torch
from ranks import run_ranks
from torch import Tensor

pytestmark = pytest.mark.ranks

ROWS, HIDDEN, VOCABULARY, PADDED = 7, 6, 17, 32


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, padded weight, labels, weights, and the rows that leave the id out."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.tensor([3, 12, 1, 14, 9, 2, 15])
    weights = torch.rand(ROWS, generator=generator) + 0.5
    return hidden, weight, labels, weights, torch.tensor([0, 1, 1, 1, 0, 1, 0], dtype=torch.bool)


def excluding(rank: int, world: int, token: int) -> list[Tensor]:
    """[loss, cross-entropies, gradient of hidden and of this rank's shard of the weight]."""
    from megatron_bp.model.output import Excluded, weighted_cross_entropy

    group = torch.distributed.group.WORLD if world > 1 else None
    hidden, weight, labels, weights, out = inputs()
    leaves = [hidden.requires_grad_(), weight.chunk(world)[rank].clone().requires_grad_()]
    loss, ce = weighted_cross_entropy(
        *leaves, labels, weights, VOCABULARY, 2 * VOCABULARY, group, Excluded(token, out)
    )
    dhidden, dweight = torch.autograd.grad(loss, leaves)
    torch.distributed.all_reduce(dhidden)
    return [loss.detach(), ce, dhidden, dweight]


# Of two ranks with 16 ids each the second has one true id: the last one, 16.
@pytest.mark.parametrize("token", [0, 8, 16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_excluded_id_takes_no_part_whichever_rank_has_it(ranks: int, token: int) -> None:
    hidden, weight, labels, weights, out = inputs()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    logits, ce = hidden @ weight.T, torch.empty(ROWS, dtype=torch.float64)
    ce[out] = oracle.cross_entropy(logits[out], labels[out], VOCABULARY, [token])
    ce[~out] = oracle.cross_entropy(logits[~out], labels[~out], VOCABULARY)
    loss = (weights.double() * ce).sum()
    dhidden, dweight = torch.autograd.grad(loss, leaves)
    results = run_ranks(ranks, excluding, token)
    for got in results:
        for mine, want in zip(got[:3], (loss, ce, dhidden), strict=True):
            torch.testing.assert_close(mine, want.detach(), rtol=1e-9, atol=1e-9)
    whole = torch.cat([got[3] for got in results])
    torch.testing.assert_close(whole, dweight, rtol=1e-9, atol=1e-9)
