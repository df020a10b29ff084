"""What a GPU sends in a step: K/V against bytes that are worked out elsewhere, the rest by hand."""

import dataclasses
from typing import Any

import pytest
from ranks import run_ranks

from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.planning.counts import SlotCounts, count, full_rows, options_of
from megatron_bp.planning.layout import Layout, Split
from megatron_bp.planning.shape import Attention, Layer, Mlp, Shape
from megatron_bp.planning.task import Precision, Task
from megatron_bp.planning.traffic import Flow, traffic
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequenceOptions, make_plan

# The model of tests/ranks/test_traffic.py, whose bytes are those that real ranks send, and which
# says how they come about: 2 layers, 4 query and 2 key heads of 8, float32.
ATTENTION = Attention(4, 2, 8)
SHAPE = Shape("llama", 32, 128, False, (Layer(ATTENTION, Mlp(64)),) * 2)
PRECISION = Precision(4, 4, 12)


def flows(
    layout: Layout,
    shape: Shape = SHAPE,
    stage: int = 0,
    rank: int = 0,
    tokens: int = 24,
    block: int = 4,
    **changed: Any,
) -> dict[str, Flow]:
    """By name and layers."""
    task = Task(shape, SequenceOptions(block, max_imbalance=1e9), tokens, precision=PRECISION)
    task = dataclasses.replace(task, **changed)
    counts = counted(full_rows(tokens), task, layout)
    found = traffic(task, layout, counts, stage, rank)
    return {" of ".join(filter(None, (flow.name, flow.layers))): flow for flow in found}


def counted(sample: Sample, task: Task, layout: Layout) -> SlotCounts:
    windows = {layer.attention.window for layer in task.shape.layers if layer.attention}
    return count(make_plan(sample, options_of(task.sequence, layout)), layout, windows)


def sends(layout: Layout, shape: Shape = SHAPE, **changed: Any) -> list[float]:
    """K/V of each slot rank."""
    return [
        sum(
            flow.bytes
            for flow in flows(layout, shape, rank=rank, **changed).values()
            if flow.name in ("K/V", "rows to heads and back")
        )
        for rank in range(layout.slot)
    ]


def by(form: Any) -> ExchangeOptions:
    return ExchangeOptions(form)


WINDOWED = dataclasses.replace(
    SHAPE, layers=(Layer(dataclasses.replace(ATTENTION, window=5), Mlp(64)),) * 2
)


@pytest.mark.parametrize(
    ("layout", "shape", "wanted"),
    [
        (Layout(bp=2, cp=2, exchange=by("all_gather")), SHAPE, [9_216] * 2),
        (Layout(bp=2, cp=2, exchange=by("needed_rows")), SHAPE, [5_120, 7_168]),
        (Layout(bp=2, cp=2, exchange=by("needed_rows")), WINDOWED, [3_072] * 2),
        (Layout(bp=2, cp=2, exchange=by("ring")), SHAPE, [7_168, 8_192]),
        (Layout(bp=2), SHAPE, [0] * 2),
        (Layout(bp=4, cp=2, exchange=by("all_gather")), SHAPE, [6_144] * 2 + [9_216] * 2),
        (Layout(cp=2, exchange=by("all_gather")), SHAPE, [16_896] * 2),
        (Layout(cp=2, exchange=by("ring")), SHAPE, [16_896] * 2),
        (Layout(cp=2, aligned=True, exchange=by("all_gather")), SHAPE, [9_216] * 2),
        (Layout(cp=2, over_heads=True, recompute="none"), SHAPE, [16_896] * 2),
        # once more in the recomputed forward
        (Layout(cp=2, over_heads=True), SHAPE, [25_344] * 2),
        # fetched once, returned once
        (
            Layout(bp=2, cp=2, exchange=by("all_gather"), recompute="none", keep_gathered=True),
            SHAPE,
            [6_144] * 2,
        ),
        # four micro-batches, one of two stages, half of the heads
        (
            Layout(bp=2, cp=2, tp=2, pp=2, micro_batches=4, exchange=by("all_gather")),
            SHAPE,
            [9_216] * 2,
        ),
    ],
)
def test_keys_and_values_are_what_ranks_send(
    layout: Layout, shape: Shape, wanted: list[int]
) -> None:
    assert sends(layout, shape) == wanted


def test_two_passes_exchange_clean_rows_twice() -> None:
    """CSBP: twice. CP: 22 rows of [corrupted, clean] each; chunks of 11 rows, of which the last
    two, and 9 rows of the second, are clean: rank 0 has 11 clean rows, rank 1 has 9. So 11 more."""
    assert sends(Layout(bp=2, cp=2, exchange=by("all_gather")), passes="two") == [18_432] * 2
    assert sends(Layout(cp=2, exchange=by("all_gather")), passes="two") == [(22 + 11) * 768] * 2


def test_kinds_of_layers_are_told_apart() -> None:
    shape = dataclasses.replace(
        SHAPE, layers=(WINDOWED.layers[0], *SHAPE.layers, Layer(None, Mlp(64), mixer=9))
    )
    found = flows(Layout(bp=2, cp=2, tp=4, exchange=by("all_gather")), shape)
    kinds = {f.layers: (f.ranks, f.span, f.passes) for f in found.values() if f.name == "K/V"}
    assert kinds == {"1 layer, window 5": (2, 8, 3), "2 layers, full attention": (2, 8, 3)}


# --- the rest, by hand ---------------------------------------------------------------------------

# Rank 0 of CSBP 2 has blocks 0, 4 and 5: 8 + 8 + 4 = 20 rows of 32 numbers of 4 bytes, 12 of them
# corrupted.
# Parameters of a layer: 32 x (32 + 32) + 32 x 32 + 3 x 32 x 64 = 9,216, and 2 norms of 32.
# A table: 128 x 32 = 4,096.


def test_tensor_parallel_sums() -> None:
    """Half of 128 bytes a row, by each of the two ranks, for each gather or scatter."""
    layout = Layout(tp=2, bp=2, cp=2, recompute="none")
    found = flows(layout)
    assert found["tensor-parallel sums of 2 layers"].bytes == 2 * 8 * 20 * 64
    # the embedding's of 20 rows; that of 6 scored rows, half of 12
    assert found["tensor-parallel sums of embedding and loss head"].bytes == (2 * 20 + 2 * 6) * 64
    again = flows(dataclasses.replace(layout, recompute="full"))
    assert again["tensor-parallel sums of 2 layers"].bytes == 2 * 12 * 20 * 64
    shared = flows(dataclasses.replace(layout, sequence_parallel=True))
    assert shared["tensor-parallel sums of 2 layers"].bytes == 2 * 10 * 20 * 64
    assert shared["tensor-parallel sums of embedding and loss head"].bytes == 4 * 20 * 64
    assert found["tensor-parallel sums of 2 layers"].span == 2


def test_tensor_parallel_ranks_do_not_cut_experts() -> None:
    """Of a layer with experts alone attention is summed; a shared expert is cut as an MLP is.

    2 experts of 3 x 32 x 16 on each of the 4 ranks of TP 2 and a slot of 2, which follow each
    other, so that every expert has two owners; with 4 expert ranks it has one.
    """
    layout = Layout(tp=2, bp=2, cp=2, ep=2, sequence_parallel=True)
    alone, beside = (
        dataclasses.replace(SHAPE, layers=(Layer(ATTENTION, Mlp(width, 4, 2, 16)),))
        for width in (0, 64)
    )
    found = flows(layout, alone)
    # one sum there and one back and one again, each a gather and a scatter; one gather more
    assert found["tensor-parallel sums of 1 layer"].bytes == 7 * 20 * 64
    assert flows(layout, beside)["tensor-parallel sums of 1 layer"].bytes == 14 * 20 * 64
    assert found["rows to experts and back of 1 layer"].span == 2
    assert found["gradients of experts"].bytes == 2 * 3 * 32 * 16 * 4 / 2
    assert found["gradients of experts"].ranks == 2
    # the router, 4 x 32, is whole on each rank, as norms are
    assert found["gradients"].bytes == (3_072 / 2 + 128 + 64 + 4_096 + 32) * 4 / 2
    assert "gradients of experts" not in flows(dataclasses.replace(layout, ep=4), alone)


def test_pipeline_sends() -> None:
    """The first of two stages sends rows, the last gradients; between chunks there is more."""
    two = Layout(pp=2, bp=2, cp=2, dp=3, micro_batches=5)
    assert [flows(two, stage=s)["pipeline sends"].bytes for s in (0, 1)] == [5 * 20 * 128] * 2
    assert flows(two)["pipeline sends"].span == 12
    shape = dataclasses.replace(SHAPE, layers=SHAPE.layers * 2)
    chunks = dataclasses.replace(two, split=Split(chunks=2))
    found = [flows(chunks, shape, stage=s)["pipeline sends"].bytes for s in (0, 1)]
    assert found == [3 * 5 * 20 * 128] * 2
    three = dataclasses.replace(two, pp=4)
    assert flows(three, shape, stage=1)["pipeline sends"].bytes == 2 * 5 * 20 * 128


def test_rows_to_experts_and_back() -> None:
    """20 rows of 32 x 4 bytes to two experts each, half of them elsewhere; there and back."""
    shape = dataclasses.replace(SHAPE, layers=(Layer(ATTENTION, Mlp(0, 4, 2, 16)),) * 2)
    flow = flows(Layout(bp=2, cp=2, ep=2), shape)["rows to experts and back of 2 layers"]
    assert flow.bytes == 2 * 20 * 2 * 0.5 * 128 * 2 * 3
    assert (flow.ranks, flow.passes) == (2, 3)


def test_gradients_and_parameters() -> None:
    """Over 2 replicas of a slot of 2: three quarters of 4 bytes each way."""
    dense = 2 * (9_216 + 64) + 2 * 4_096 + 32
    found = flows(Layout(bp=2, cp=2, dp=2), precision=Precision(2, 4, 12))
    assert found["gradients"].bytes == dense * 4 * 3 / 4
    assert found["parameters"].bytes == dense * 2 * 3 / 4
    assert (found["gradients"].ranks, found["gradients"].span) == (4, 4)
    plain = flows(Layout(bp=2, cp=2, dp=2), distributed_optimizer=False)
    assert plain["gradients"].bytes == dense * 4 * 2 * 3 / 4
    assert "parameters" not in plain
    half = 2 * (9_216 / 2 + 64) + 2 * 4_096 / 2 + 32  # norms are whole on each
    assert flows(Layout(tp=2, bp=2, cp=2))["gradients"].bytes == half * 4 / 2


def test_gradients_of_stages_and_experts() -> None:
    """Stages have a table each; where they are one, the two ends add up their gradients."""
    found = flows(Layout(pp=2, dp=2))
    assert found["gradients"].bytes == (9_216 + 64 + 4_096) * 4 / 2
    assert flows(Layout(pp=2, dp=2), stage=1)["gradients"].bytes == (9_280 + 4_096 + 32) * 4 / 2
    tied = dataclasses.replace(SHAPE, tied=True)
    both = flows(Layout(pp=2, dp=2), tied)
    assert both["gradients"].bytes == found["gradients"].bytes
    assert both["gradients of the tied embedding"].bytes == 4_096 * 4
    alone = flows(Layout(dp=2), tied)
    assert "gradients of the tied embedding" not in alone
    assert alone["gradients"].bytes == (2 * 9_280 + 4_096 + 32) * 4 / 2
    # 4 experts of 3 x 32 x 16, two a rank, on two pairs of ranks; a router of 4 x 32
    shape = dataclasses.replace(SHAPE, layers=(Layer(ATTENTION, Mlp(0, 4, 2, 16)),))
    experts = flows(Layout(bp=2, cp=2, dp=2, ep=2), shape)
    assert experts["gradients of experts"].bytes == 2 * 3 * 32 * 16 * 4 / 2
    assert experts["gradients"].bytes == (3_072 + 128 + 64 + 2 * 4_096 + 32) * 4 * 3 / 4


def test_one_gpu_sends_nothing() -> None:
    assert flows(Layout()) == {}


# --- against what --print-config tells -----------------------------------------------------------

RUNS: dict[str, tuple[dict[str, Any], Layout]] = {
    "CSBP": ({}, Layout(bp=2, cp=2)),
    "CSBP, needed rows": (
        {"clean_kv_exchange": "needed_rows"},
        Layout(bp=2, cp=2, exchange=by("needed_rows")),
    ),
    "CSBP, ring": ({"clean_kv_exchange": "ring"}, Layout(bp=2, cp=2, exchange=by("ring"))),
    "hybrid, TP, PP": ({}, Layout(bp=4, cp=2, tp=2, pp=2)),
    "BP": ({}, Layout(bp=2)),
    "CP": ({}, Layout(cp=2, exchange=by("all_gather"))),
    "CP, p2p": ({"bdlm_cp_comm_type": "p2p"}, Layout(cp=4, exchange=by("ring"))),
    "CP, a2a": ({"bdlm_cp_comm_type": "a2a"}, Layout(cp=2, over_heads=True)),
    "CP, whole blocks": (
        {"bdlm_cp_comm_type": "clean_all_gather"},
        Layout(cp=2, aligned=True, exchange=by("all_gather")),
    ),
    "kept": ({"keep_gathered_kv": True}, Layout(bp=2, cp=2, keep_gathered=True, recompute="none")),
    "a2a, nothing again": (
        {"bdlm_cp_comm_type": "a2a"},
        Layout(cp=2, over_heads=True, recompute="none"),
    ),
    "stages of chunks": ({}, Layout(bp=2, cp=2, pp=2, split=Split(chunks=2))),
}
# Layers 1, 2 and 4 of 4 have a window of 5.
MIXED = dataclasses.replace(SHAPE, layers=(*WINDOWED.layers, SHAPE.layers[0], WINDOWED.layers[0]))


def told_on_rank(rank: int, world: int, runs: list[tuple[dict[str, Any], Layout]]) -> list[int]:
    """What `--print-config` counts for each run."""
    from argparse import Namespace

    import torch

    from megatron_bp.arguments.exchanged import exchanged

    out = []
    for changed, layout in runs:
        again = {"full": "full", "none": None, "attention": "selective"}[layout.recompute]
        values: dict[str, Any] = {
            "block_parallel_size": layout.bp,
            "bdlm_clean_shard_size": layout.cp,
            "bdlm_cp_comm_type": "all_gather",
            "clean_kv_exchange": "auto",
            "attention_kernel": "auto",
            "params_dtype": torch.float32,
            "kv_channels": 8,
            "clean_kv_rows": None,
            "needed_rows_fraction": 0.75,
            "keep_gathered_kv": False,
            "recompute_keep_attention": False,
            "tensor_model_parallel_size": layout.tp,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "group_query_attention": True,
            "window_size": (4, 0),
            "window_attn_skip_freq": [1, 1, 0, 1],
            "num_layers": 4,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.split.chunks,
            "pipeline_model_parallel_layout": None,
            "decoder_first_pipeline_num_layers": None,
            "decoder_last_pipeline_num_layers": None,
            "account_for_embedding_in_pipeline_split": False,
            "account_for_loss_in_pipeline_split": False,
            "recompute_granularity": again,
            "recompute_method": "uniform",
            "recompute_modules": None,
            "query_scale_beta": None,
            "query_scale_length": None,
        }
        options = options_of(SequenceOptions(4), layout)
        plan = make_plan(full_rows(24), options)
        shards = [plan.rows_of(r) for r in range(layout.slot)]
        out.append(exchanged(Namespace(**values | changed), plan, shards).in_training)
    return out


@pytest.mark.ranks
def test_a_run_is_told_the_same_bytes() -> None:
    """One sequence in blocks of 4, of the stage and slot rank that send most."""
    (told,) = run_ranks(1, told_on_rank, list(RUNS.values()))
    ours = {
        name: max(
            sum(
                flow.bytes
                for flow in flows(layout, MIXED, stage, rank, sequence=SequenceOptions(4)).values()
                if flow.name in ("K/V", "rows to heads and back")
            )
            for stage in range(layout.pp)
            for rank in range(layout.slot)
        )
        for name, (_, layout) in RUNS.items()
    }
    assert ours == dict(zip(RUNS, told, strict=True))
    assert sorted(name for name, sent in ours.items() if not sent) == ["BP"]
