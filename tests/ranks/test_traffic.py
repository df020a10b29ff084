"""What a step sends, in bytes worked out by hand; and that it never holds a corrupted K or V."""

import pytest
import torch
import torch.distributed as dist
from cases import Case, sample_of
from ranks import run_ranks
from traffic import Sent, recording
from whole import LLAMA, Shape, step_on_rank

from megatron_bp.attention.exchange import CleanExchange
from megatron_bp.attention.function import attend
from megatron_bp.attention.kernels import tiled
from megatron_bp.attention.parts import make_view, shard_sizes
from megatron_bp.sequence.plan import SequenceOptions, make_plan
from megatron_bp.sequence.visibility import Visibility, corrupted_rows, visibility

# LLAMA has 2 layers and 2 key heads of 8, in float32: a clean row's K|V are 2 x 2 x 8 x 4 = 128 B.
# A step passes 3 times: K/V gathered, gathered again for the backward, dK/dV back to their owners.
#
# 24 tokens, block 4, 2 ranks: chunks [0,8) [8,12) [12,20) [20,24), 12 rows each rank.
#     12 rows x 128 B x 1 other rank x 3 passes x 2 layers = 9,216 B from each rank.
# Documents of 5 and 6, block 4, 2 ranks: blocks end at 4, 5, 9, 11. Chunks are cut next to 2.75,
#     5.5 and 8.25: [0,4) [4,5) [5,9) [9,11): rank 0 holds 6 rows, rank 1 holds 5, padded to 6.
#     6 x 128 x 1 x 3 x 2 = 4,608 B.
# 64 tokens, block 2, 4 ranks: 8 chunks of 8, 16 rows a rank.
#     16 x 128 x 3 other ranks x 3 x 2 = 36,864 B.
SHAPES = [
    (2, Case((24,), 4), 9_216),
    (2, Case((5, 6), 4), 4_608),
    (4, Case((64,), 2), 36_864),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "case", "want"), SHAPES)
def test_a_step_sends_what_the_design_says(world: int, case: Case, want: int) -> None:
    shape = Shape(LLAMA, (case,))
    for result in run_ranks(world, step_on_rank, shape, world):
        sent: list[Sent] = result["sent"]
        exchange = [s for s in sent if s.name in ("all_gather_into_tensor", "all_to_all_single")]
        assert sum(s.bytes for s in exchange) == want
        assert len(exchange) == 3 * LLAMA.layers
        parameters = sum(p.numel() for p in result["weights"].values()) * 4
        rest = [s for s in sent if s not in exchange]
        assert {s.name for s in rest} == {"all_reduce"}, "only Megatron's own reductions"
        # the gradients once (padded to Megatron's bucket), and the integer count
        reduced = sum(s.bytes for s in rest) // (world - 1)
        assert parameters <= reduced <= parameters + 4096


@pytest.mark.ranks
def test_one_rank_sends_nothing() -> None:
    (result,) = run_ranks(1, step_on_rank, Shape(LLAMA, (Case((24,), 4),)), 1)
    assert result["sent"] == []


def poisoned(rank: int, world: int, blind: bool) -> list[Sent]:
    """What attention sends when every corrupted K and V is NaN.

    A corrupted row that sees a NaN key hands NaN to the gradients of all its keys, as it should.
    With `blind` the corrupted rows see clean keys only: then nothing sent may be NaN at all.
    """
    case = Case((13, 9), 4)
    plan = make_plan(sample_of(case), SequenceOptions(4, world, world))
    clean, corrupted = plan.clean_positions(rank), corrupted_rows(plan, plan.owned_units(rank))
    seen = visibility(plan, clean, corrupted)
    if blind:
        seen = Visibility(
            seen.clean_lo, seen.clean_hi, seen.own_lo, seen.own_lo, seen.index, seen.num_clean
        )
    view = make_view(seen, plan.chunks, rank, 5, torch.device("cpu"))
    exchange = CleanExchange(dist.group.WORLD, shard_sizes(plan.chunks, world))
    torch.manual_seed(rank)
    q, k, v = (torch.randn(len(seen.index), heads, 8) for heads in (4, 2, 2))
    k[seen.num_clean :] = torch.nan
    v[seen.num_clean :] = torch.nan
    for tensor in (q, k, v):
        tensor.requires_grad_()
    sent: list[Sent] = []
    with recording(sent):
        attend(q, k, v, view, exchange, tiled, 0.3).sum().backward()
    assert sum(s.bytes for s in sent) == exchange.bytes_sent
    return sent


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_corrupted_keys_and_values_stay_home(world: int) -> None:
    for sent in run_ranks(world, poisoned, True):
        assert [s.nan for s in sent] == [False, False, False]
    for sent in run_ranks(world, poisoned, False):
        gathers = [s for s in sent if s.name == "all_gather_into_tensor"]
        assert [s.nan for s in gathers] == [False, False]
