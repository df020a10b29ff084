"""What a step sends, in bytes worked out by hand; and where it never holds a corrupted K or V."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Case, sample_of
from ranks import run_ranks
from traffic import Sent, clean_shard, recording
from whole import LLAMA, Shape, settings_of, step_on_rank

from megatron_bp.attention import layout
from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.attention.exchange.count import over_heads, sending
from megatron_bp.attention.kernels.tiled import Tiled
from megatron_bp.attention.layout import AttentionOptions
from megatron_bp.sequence.plan import SequenceOptions, make_plan
from megatron_bp.sequence.visibility import Visibility, visibility

# LLAMA has 2 layers and 2 key heads of 8, in float32: a clean row's K|V are 2 x 2 x 8 x 4 = 128 B.
# A step passes 3 times: K/V gathered, gathered again for the backward, dK/dV back to their owners.
#
# With one other rank in the clean shard group that is 128 x 3 x 2 = 768 B a row, of the rank that
# sends most.
#
# CSBP, 24 tokens, block 4, 2 ranks: 6 blocks of 8 rows, the last of 4, since nobody needs its clean
#     rows. Cut next to 11, 22 and 33: after blocks 0, 2 and 3. Rank 0 holds 8 clean rows (blocks 0
#     and 4), rank 1 holds 12 (1 to 3): 12 x 768 = 9,216 B from each rank.
# CSBP, documents of 5 and 6, block 4, 2 ranks: blocks of 8, 1, 8 and 2 rows, one in each part; each
#     rank has 4 clean rows: 4 x 768 = 3,072 B.
# CSBP, 64 tokens, block 2, 4 ranks: 8 parts of 4 blocks, at most 16 clean rows a rank, 3 others:
#     16 x 768 x 3 = 36,864 B.
# BP: nothing.
# Hybrid, 24 tokens, block 4, 4 ranks in 2 groups: unit i costs 16 (i + 1), its prefix 8 i (i + 1).
#     Units 0 to 4 cost 240 + 160, unit 5 costs 96 + 240: no other cut is better than 400. Group 0
#     has blocks of 8, 8, 8, 8 and 4 rows, cut next to 9, 18 and 27: clean 8 and 8. Group 1 has six
#     of 4 rows, cut at 8, 12 and 20: clean 8 and 12. 8 x 768 = 6,144 and 12 x 768 = 9,216 B.
# CP, 24 tokens, 2 ranks: 24 + 20 rows, 22 a rank, all sent: 22 x 768 = 16,896 B.
# CP, 64 tokens, block 2, 4 ranks: 64 + 62 rows, at most 32 a rank: 32 x 768 x 3 = 73,728 B.
SHAPES: list[tuple[tuple[int, int], Case, list[int]]] = [
    ((2, 2), Case((24,), 4), [9_216] * 2),
    ((2, 2), Case((5, 6), 4), [3_072] * 2),
    ((4, 4), Case((64,), 2), [36_864] * 4),
    ((2, 1), Case((24,), 4), [0] * 2),
    ((4, 1), Case((5, 6), 4), [0] * 4),
    ((4, 2), Case((24,), 4), [6_144] * 2 + [9_216] * 2),
    ((1, 2), Case((24,), 4), [16_896] * 2),
    ((1, 4), Case((64,), 2), [73_728] * 4),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("degrees", "case", "wanted"), SHAPES)
def test_a_step_sends_what_the_design_says(
    degrees: tuple[int, int], case: Case, wanted: list[int]
) -> None:
    shape = Shape(LLAMA, (case,))
    world = max(degrees)
    for result, want in zip(run_ranks(world, step_on_rank, shape, degrees), wanted, strict=True):
        sent: list[Sent] = result["sent"]
        exchange = [s for s in sent if s.name in ("all_gather_into_tensor", "all_to_all_single")]
        assert sum(s.bytes for s in exchange) == want
        assert {s.ranks for s in exchange} <= {degrees[1]}, "outside of the clean shard group"
        assert len(exchange) == (3 * LLAMA.layers if want else 0)
        parameters = sum(p.numel() for p in result["weights"].values()) * 4
        rest = [s for s in sent if s not in exchange]
        assert {s.name for s in rest} == {"all_reduce"}, "only Megatron's own reductions"
        # the gradients once (padded to Megatron's bucket), and the integer count
        reduced = sum(s.bytes for s in rest) // (world - 1)
        assert parameters <= reduced <= parameters + 4096


# Other forms. Of 24 tokens in blocks of 4 rank 0 has clean rows 0 to 3 and 16 to 19 and units 0, 4
# and 5, rank 1 the rest; a row is 128 B in each of 2 layers, 256 B a pass.
#
# needed_rows: rank 0 sees rows 4 to 15 of rank 1, rank 1 rows 0 to 3 of rank 0. K/V twice, their
#     gradients back once: (2 x 4 + 12) x 256 = 5,120 B from rank 0, from rank 1 (2 x 12 + 4) x 256
#     = 7,168 B.
# The same with a window of 5: row 16 sees 12 to 15, row 4 sees 0 to 3, and nobody further back:
#     (2 x 4 + 4) x 256 = 3,072 B from each.
# needed_rows, four documents of 16 in blocks of 4, 4 ranks: blocks of 8, 8, 8 and 4 rows each, 112
#     in all, 14 a part, cut at the edges next to them: after 2 blocks each. Two ranks share a
#     document; the one that has its end sees the 8 rows of its beginning, and has 8 rows that begin
#     another: (2 x 8 + 8) x 256 = 6,144 B from each.
# ring: shards of 8 and 12 rows, the other's gradients: (2 x 8 + 12) x 256 = 7,168 B from rank 0,
#     (2 x 12 + 8) x 256 = 8,192 B from rank 1.
# p2p: 22 rows each, as all_gather on 2 ranks: 3 x 22 x 256 = 16,896 B.
# a2a: 22 rows to one other rank with 2 query heads, 1 key head and 1 value head of 8 each, and the
#     output of the other's 22 rows back, 2 heads: 22 x (4 + 2) x 8 x 4 B = 4,224 B, forward and
#     backward, 2 layers: 16,896 B.
# clean_all_gather: as CSBP by all_gather, 9,216 B; in chunks of 4 of at most 12 rows too.
ONE = Case((24,), 4)
FORMS: dict[str, tuple[tuple[int, int], Shape, list[int]]] = {
    "needed_rows": ((2, 2), Shape(LLAMA, (ONE,), exchange={"form": "needed_rows"}), [5_120, 7_168]),
    "needed_rows, window": (
        (2, 2),
        Shape(
            LLAMA,
            (dataclasses.replace(ONE, window=5),),
            extra={"window_size": (4, 0)},
            exchange={"form": "needed_rows"},
        ),
        [3_072] * 2,
    ),
    "needed_rows, documents": (
        (4, 4),
        Shape(LLAMA, (Case((16,) * 4, 4),), exchange={"form": "needed_rows"}),
        [6_144] * 4,
    ),
    "ring": ((2, 2), Shape(LLAMA, (ONE,), exchange={"form": "ring"}), [7_168, 8_192]),
    "p2p": ((1, 2), Shape(LLAMA, (ONE,), exchange={"form": "ring"}), [16_896] * 2),
    "a2a": ((1, 2), Shape(LLAMA, (ONE,), attention={"over_heads": True}), [16_896] * 2),
    "clean_all_gather": ((1, 2), Shape(LLAMA, (ONE,), align_chunks=True), [9_216] * 2),
    "chunks": (
        (2, 2),
        Shape(LLAMA, (ONE,), exchange={"form": "all_gather", "most_rows": 9}),
        [9_216] * 2,
    ),
}


def counted(rank: int, shape: Shape, degrees: tuple[int, int]) -> int:
    """Bytes that the plan says that a rank sends."""
    settings = settings_of(shape.rows[0], shape, degrees, 1)
    plan = make_plan(sample_of(shape.rows[0]), settings.sequence)
    shards = tuple(plan.rows_of(peer) for peer in plan.shard_group(rank))
    gpt = shape.gpt
    if settings.attention.over_heads:
        numbers = over_heads(shards, rank, gpt.heads, gpt.groups, gpt.head_dim)
        return 2 * gpt.layers * numbers * 4
    sent = sending(plan, shards, rank, shape.rows[0].window, settings.attention.exchange)
    return gpt.layers * sent.bytes(2 * gpt.groups * gpt.head_dim, torch.float32, 2, 1)


@pytest.mark.ranks
@pytest.mark.parametrize("name", FORMS)
def test_a_step_of_each_form_sends_what_was_worked_out_by_hand(name: str) -> None:
    degrees, shape, wanted = FORMS[name]
    results = run_ranks(max(degrees), step_on_rank, shape, degrees)
    for rank, (result, want) in enumerate(zip(results, wanted, strict=True)):
        exchange = [s for s in result["sent"] if s.name != "all_reduce"]
        assert sum(s.bytes for s in exchange) == want
        assert counted(rank, shape, degrees) == want


@pytest.mark.ranks
def test_one_rank_sends_nothing() -> None:
    (result,) = run_ranks(1, step_on_rank, Shape(LLAMA, (Case((24,), 4),)), 1)
    assert result["sent"] == []


def without_own(*args: Any) -> Visibility:
    """Nobody sees a corrupted row."""
    seen = visibility(*args)
    return dataclasses.replace(seen, own_hi=seen.own_lo)


def poisoned(
    rank: int, world: int, degrees: tuple[int, int], blind: bool, form: str = "all_gather"
) -> list[Sent]:
    """What attention sends when every corrupted K and V is NaN.

    A corrupted row that sees a NaN key hands NaN to the gradients of all its keys, as it should.
    With `blind` the corrupted rows see clean keys only: then nothing sent may be NaN at all.
    """
    case = Case((13, 9), 4)
    plan = make_plan(sample_of(case), SequenceOptions(4, *degrees))
    shards = tuple(plan.rows_of(peer) for peer in plan.shard_group(rank))
    mine = shards[rank % degrees[1]]
    positions = torch.zeros(mine.num_rows, dtype=torch.long)
    options = AttentionOptions(Tiled(5), ExchangeOptions(form))
    with mock.patch.object(layout, "visibility", without_own if blind else visibility):
        made = layout.make_layout(
            plan, shards, rank, [None], positions, clean_shard(degrees, rank), options
        )
    torch.manual_seed(rank)
    q, k, v = (torch.randn(mine.num_rows, heads, 8) for heads in (4, 2, 2))
    k[mine.num_clean :] = torch.nan
    v[mine.num_clean :] = torch.nan
    for tensor in (q, k, v):
        tensor.requires_grad_()
    sent: list[Sent] = []
    with recording(sent):
        made.plans[None].attend(q, k, v, 0.3).sum().backward()
    assert sum(s.bytes for s in sent) == made.traffic.bytes_sent
    return sent


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["all_gather", "needed_rows", "ring"])
@pytest.mark.parametrize("degrees", [(2, 2), (4, 4), (4, 2)])
def test_corrupted_keys_and_values_stay_home(degrees: tuple[int, int], form: str) -> None:
    for sent in run_ranks(max(degrees), poisoned, degrees, True, form):
        assert sent
        assert not any(s.nan for s in sent)
    for sent in run_ranks(max(degrees), poisoned, degrees, False, form):
        clean, gradients = sent[: len(sent) * 2 // 3], sent[len(sent) * 2 // 3 :]
        if form == "ring":  # the last two of each step are K/V and gradients at once
            continue
        assert clean
        assert not any(s.nan for s in clean)
        assert gradients


@pytest.mark.ranks
def test_in_mode_cp_they_do_not() -> None:
    for sent in run_ranks(2, poisoned, (1, 2), True):
        gathers = [s for s in sent if s.name == "all_gather_into_tensor"]
        assert [s.nan for s in gathers] == [True, True]
