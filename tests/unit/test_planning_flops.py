"""Layers of stages, parameters and FLOPs: against Megatron, and worked out by hand."""

import dataclasses
from typing import Any

import pytest
from ranks import run_ranks

from megatron_bp.planning.counts import SlotCounts, count, full_rows, options_of
from megatron_bp.planning.flops import Part, flops
from megatron_bp.planning.layout import Layout, Split
from megatron_bp.planning.shape import Attention, Layer, Mlp, Shape
from megatron_bp.planning.stages import deal, stages
from megatron_bp.planning.task import Task
from megatron_bp.sequence.plan import SequenceOptions, make_plan

# --- stages --------------------------------------------------------------------------------------

SPLITS: list[tuple[int, int, Split]] = [
    (8, 4, Split()),
    (8, 2, Split(chunks=2)),
    (8, 2, Split(chunks=4)),
    (7, 4, Split(first=1)),
    (7, 3, Split(first=1, last=4)),
    (9, 3, Split(last=1)),
    (6, 4, Split(embedding=True, loss=True)),
    (7, 2, Split(chunks=2, loss=True)),
    (6, 1, Split()),
]


def stages_on_rank(
    rank: int, world: int, splits: list[tuple[int, int, Split]]
) -> list[list[list[list[int]]]]:
    """Megatron's own numbers."""
    import torch
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    out = []
    for layers, pp, split in splits:
        chunks = split.chunks if split.chunks > 1 else None
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=pp,
            pipeline_dtype=torch.float32,
            virtual_pipeline_model_parallel_size=chunks,
            num_layers_in_first_pipeline_stage=split.first,
            num_layers_in_last_pipeline_stage=split.last,
            account_for_embedding_in_pipeline_split=split.embedding,
            account_for_loss_in_pipeline_split=split.loss,
        )
        out.append([])
        for stage in range(pp):
            out[-1].append([])
            for chunk in range(split.chunks):
                vp = chunk if chunks else None
                first = get_transformer_layer_offset(config, vp, stage)
                number = get_num_layers_to_build(config, vp, stage)
                out[-1][-1].append(list(range(first, first + number)))
    return out


@pytest.mark.ranks
def test_layers_are_dealt_as_megatron_deals_them() -> None:
    (theirs,) = run_ranks(1, stages_on_rank, SPLITS)
    for (layers, pp, split), want in zip(SPLITS, theirs, strict=True):
        got = [[list(chunk) for chunk in stage] for stage in deal(layers, pp, split)]
        assert got == want, (layers, pp, split)


@pytest.mark.parametrize(
    ("layers", "pp", "split", "words"),
    [
        (7, 2, Split(), "7 layers, .* cannot be dealt evenly to 2 pipeline stages"),
        (8, 2, Split(first=3, last=4), "1 layers, .* to 0 pipeline stages"),
        (6, 2, Split(chunks=2), "a pipeline stage of 3 layers cannot be cut into 2"),
        (0, 2, Split(embedding=True, loss=True, chunks=1, first=0), "one would have -1 layers"),
        (2, 4, Split(embedding=True, loss=True, chunks=1), None),
    ],
)
def test_layers_that_cannot_be_dealt(layers: int, pp: int, split: Split, words: str | None) -> None:
    if words is None:
        assert sum(len(chunk) for stage in deal(layers, pp, split) for chunk in stage) == layers
        return
    with pytest.raises(ValueError, match=words):
        deal(layers, pp, split)


# --- parameters ----------------------------------------------------------------------------------

DENSE: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 40,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 32,
    "moe_token_dispatcher_type": "alltoall",
}
ATTENTION = Attention(4, 2, 8)
SHAPE = Shape("dense", 24, 128, False, (Layer(ATTENTION, Mlp(40)),) * 3)


def shape(attention: Attention = ATTENTION, mlp: Mlp = Mlp(40), **changed: Any) -> Shape:  # noqa: B008
    return dataclasses.replace(SHAPE, layers=(Layer(attention, mlp),) * 3, **changed)


MODELS: dict[str, tuple[dict[str, Any], Shape]] = {
    "dense, untied": ({}, shape()),
    "tied": ({"tied": True}, shape(tied=True)),
    "biases and LayerNorm, two matrices": (
        {"normalization": "LayerNorm", "add_bias_linear": True, "gated_linear_unit": False},
        shape(mlp=Mlp(40, gated=False), norm_vectors=2, bias=True),
    ),
    "biases, gated": ({"add_bias_linear": True}, shape(bias=True)),
    "bias of queries, keys and values": (
        {"add_qkv_bias": True},
        shape(dataclasses.replace(ATTENTION, bias=True)),
    ),
    "norms of queries and keys": (
        {"qk_layernorm": True},
        shape(dataclasses.replace(ATTENTION, norms=True)),
    ),
    "LayerNorm of queries and keys": (
        {"qk_layernorm": True, "normalization": "LayerNorm"},
        shape(dataclasses.replace(ATTENTION, norms=True), norm_vectors=2),
    ),
    "output gate": (
        {"attention_output_gate": True},
        shape(dataclasses.replace(ATTENTION, output_gate=True)),
    ),
    "experts with a shared one": (EXPERTS, shape(mlp=Mlp(32, 4, 2, 16))),
    "experts alone": (
        EXPERTS | {"moe_shared_expert_intermediate_size": None},
        shape(mlp=Mlp(0, 4, 2, 16)),
    ),
}


def parameters_on_rank(rank: int, world: int, models: list[dict[str, Any]]) -> list[int]:
    """Of Megatron's model of each config."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron_bp import cpu

    cpu.install()
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    out = []
    for changed in models:
        settings = DENSE | changed
        tied = settings.pop("tied", False)
        config = TransformerConfig(
            **settings,
            activation_func=torch.nn.functional.silu,
            use_cpu_initialization=True,
            transformer_impl="local",
        )
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
        )
        model = GPTModel(
            config,
            spec,
            vocab_size=128,
            max_sequence_length=64,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
        )
        out.append(sum(p.numel() for p in model.parameters()))
    return out


@pytest.mark.ranks
def test_parameters_are_those_of_megatrons_model() -> None:
    (theirs,) = run_ranks(
        1, parameters_on_rank, [changed for changed, _ in MODELS.values()], fresh=True
    )
    got = {name: ours.parameters for name, (_, ours) in MODELS.items()}
    assert got == dict(zip(MODELS, theirs, strict=True))


# --- FLOPs, by hand ------------------------------------------------------------------------------

# 24 tokens in blocks of 4: 24 corrupted rows and 20 clean ones that are needed. Clean rows of block
# i see 4 (i + 1), i = 0 .. 4: 4 x 4 x 15 = 240 pairs. Corrupted rows of block i see 4 i clean ones
# and 4 of their own, i = 0 .. 5: 4 x 4 x 21 = 336. Together 576.
#
# A row of a layer passes 24 x (32 + 2 x 2 x 8) + 32 x 24 + 3 x 24 x 40 = 5,184 parameters.
# Products: 2 x 44 x 5,184 x 3 layers = 1,368,576. Attention: 4 x 4 heads x 8 x 576 x 3 = 221,184.
# Head: half of 24 rows, three products of 2 x 24 x 128: 12 x 6 x 24 x 128 = 221,184.
PRODUCTS, PAIRS, HEAD = 1_368_576, 221_184, 221_184


def counted(
    layout: Layout, options: SequenceOptions, windows: tuple[int | None, ...]
) -> SlotCounts:
    plan = make_plan(full_rows(24), options_of(options, layout))
    return count(plan, layout, windows)


def task(shape: Shape, **options: Any) -> Task:
    return Task(shape, SequenceOptions(4, **options), 24)


def of(shape: Shape, layout: Layout, stage: int = 0, rank: int = 0, **options: Any) -> Any:
    windows = tuple(
        {a.window for a in (layer.attention for layer in shape.layers) if a is not None}
    )
    job = task(shape, **options)
    return flops(job, layout, counted(layout, job.sequence, windows), stage, rank)


@pytest.mark.parametrize(
    ("layout", "products", "attention"),
    [
        (Layout(), 1, 1),
        (Layout(keep_attention=True), 1, 0),
        (Layout(recompute="attention"), 0, 1),
        (Layout(recompute="none"), 0, 0),
    ],
)
def test_flops_of_one_gpu(layout: Layout, products: int, attention: int) -> None:
    got = of(SHAPE, layout)
    assert got.products == Part(PRODUCTS, products * PRODUCTS, 2 * PRODUCTS)
    assert got.attention == Part(PAIRS, attention * PAIRS, 2.5 * PAIRS)
    assert got.head == Part(HEAD, 0, 0)


def test_flops_of_tensor_parallel_ranks_and_stages() -> None:
    layout = Layout(tp=2, pp=3, sequence_parallel=True)
    parts = [of(SHAPE, layout, stage) for stage in range(3)]
    assert [part.products.forward for part in parts] == [PRODUCTS / 6] * 3
    assert [part.attention.forward for part in parts] == [PAIRS / 6] * 3
    assert [part.head.forward for part in parts] == [0, 0, HEAD / 2]


@pytest.mark.parametrize(
    "layout", [Layout(bp=2, cp=2), Layout(cp=2), Layout(cp=2, over_heads=True)]
)
def test_ranks_of_a_slot_share_all_there_is(layout: Layout) -> None:
    parts = [of(SHAPE, layout, rank=rank) for rank in range(2)]
    assert sum(part.products.forward for part in parts) == PRODUCTS
    assert sum(part.attention.forward for part in parts) == PAIRS
    assert sum(part.head.forward for part in parts) == HEAD


def test_flops_of_experts_gates_windows_and_other_mixers() -> None:
    """Of experts those that a row passes and the router; of a window 4 what lies in it.

    Clean rows of block 0 see 4 each. In a later block the j-th sees 3 before itself and up to the
    block's end: 7 - j, 22 a block: 16 + 4 x 22 = 104 pairs. Corrupted rows see their 4, and 3 - j
    before the block: 6 x 16 + 5 x 6 = 126.
    """
    windowed = dataclasses.replace(ATTENTION, window=4, output_gate=True)
    layers = (Layer(windowed, Mlp(32, 4, 2, 16)), Layer(None, Mlp(40), mixer=1_000))
    got = of(dataclasses.replace(SHAPE, layers=layers), Layout())
    # 24 x (2 x 32 + 32) + 32 x 24 + 24 x 4 + 3 x 24 x (32 + 2 x 16) = 7,776; 1,000 + 2,880
    assert got.products.forward == 2 * 44 * (7_776 + 3_880)
    assert got.attention.forward == 4 * 4 * 8 * (104 + 126)


def test_next_token_rows_are_scored_too() -> None:
    """All 24 clean rows are needed then, and scored, beside half of the corrupted ones."""
    got = of(SHAPE, Layout(), score_clean="all")
    assert got.head.forward == (12 + 24) * 6 * 24 * 128
    assert got.products.forward == 2 * 48 * 5_184 * 3


def test_stages_hold_the_layers_themselves() -> None:
    layers = tuple(Layer(ATTENTION, Mlp(width)) for width in range(1, 5))
    dealt = stages(dataclasses.replace(SHAPE, layers=layers), Layout(pp=2, split=Split(chunks=2)))
    assert [[layer.mlp.width for layer in stage] for stage in dealt] == [[1, 3], [2, 4]]
