"""Arguments to tasks and layouts, parsed alone and as Megatron validates them."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
from ranks import run_ranks

from megatron_bp.arguments.parse import parsed
from megatron_bp.arguments.task import filled, layout_of, task_of
from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.planning.layout import Layout, Split
from megatron_bp.planning.shape import Attention, Layer, Mlp, Shape
from megatron_bp.planning.task import Precision, Task
from megatron_bp.sequence.plan import SequenceOptions

# 4 query and 2 key heads of 8; an MLP of 64 x 2/3 x 4 = 170.67, down to a multiple of 64: 128.
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --kv-channels 8 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --seq-length 96 --global-batch-size 8 --vocab-size 250 "
    "--make-vocab-size-divisible-by 16 --mask-token-id 249 --diffusion-block-size 8"
)
DENSE = Layer(Attention(4, 2, 8), Mlp(128))
# A row: 64 x 8 x (2 x 4 + 2 x 2) + 3 x 64 x 128 = 30,720 products; x 2 / (4 x 8 x 4) pairs.
WANT = Task(
    Shape("4 layers of 64", 64, 256, True, (DENSE,) * 4),
    SequenceOptions(8, row_cost=480),
    length=96,
    global_batch=8,
    precision=Precision(4, 4, 8),
    distributed_optimizer=False,
    fused=False,
)


def on_rank(rank: int, world: int, flags: str, gpus: int | None, more: dict[str, Any]) -> Any:
    """(task, layout) of flags, or the error; `more` is what validation adds."""
    args = Namespace(**vars(parsed(flags.split())[1]) | more)
    try:
        return task_of(args), layout_of(args, gpus), filled(args).ffn_hidden_size
    except ValueError as error:
        return str(error)


def found(flags: str, gpus: int | None = None, **more: Any) -> Any:
    return run_ranks(1, on_rank, f"{BASE} {flags}", gpus, more)[0]


@pytest.mark.ranks
def test_what_validation_would_fill_in_is_filled_in() -> None:
    task, layout, width = found("")
    assert (task, width) == (replace(WANT, sequence=task.sequence), 128)
    assert task.sequence == replace(WANT.sequence, row_cost=480)
    assert layout == Layout(recompute="none", micro_batches=8)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "gpus", "want"),
    [
        ("--block-parallel-size 2", 4, {"dp": 2, "bp": 2, "cp": 2, "micro_batches": 4}),
        (
            "--block-parallel-size 4 --context-parallel-size 2 --micro-batch-size 2",
            None,
            {"bp": 4, "cp": 2, "micro_batch": 2, "micro_batches": 4},
        ),
        (
            "--context-parallel-size 2 --cp-comm-type a2a",
            2,
            {"cp": 2, "over_heads": True, "exchange": ExchangeOptions("all_gather")},
        ),
        (
            "--context-parallel-size 2 --cp-comm-type p2p",
            2,
            {"cp": 2, "exchange": ExchangeOptions("ring")},
        ),
        (
            "--context-parallel-size 2 --cp-comm-type clean_all_gather",
            2,
            {"cp": 2, "aligned": True, "exchange": ExchangeOptions("all_gather")},
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1 --recompute-keep-attention",
            2,
            {"tp": 2, "sequence_parallel": True, "recompute": "full", "keep_attention": True},
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
            "--recompute-activations",
            2,
            {"pp": 2, "split": Split(chunks=2), "recompute": "attention"},
        ),
        ("--clean-kv-rows 7 --keep-gathered-kv", 1, {"keep_gathered": True}),
    ],
)
def test_layouts(flags: str, gpus: int | None, want: dict[str, Any]) -> None:
    if "--clean-kv-rows" in flags:
        want = {**want, "exchange": ExchangeOptions(most_rows=7)}
    layout = found(flags, gpus)[1]
    assert layout == replace(Layout(recompute="none", micro_batches=8), **want)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "want"),
    [
        ("--bf16", {"precision": Precision(2, 4, 12)}),
        ("--bf16 --grad-reduce-in-bf16 --optimizer sgd", {"precision": Precision(2, 2, 8)}),
        ("--use-distributed-optimizer", {"distributed_optimizer": True}),
        ("--transformer-impl transformer_engine", {"fused": True}),
        ("--scored-tokens all", {"scored": 1.0}),
    ],
)
def test_tasks(flags: str, want: dict[str, Any]) -> None:
    assert found(flags)[0] == replace(WANT, **want)


@pytest.mark.ranks
def test_experts_windows_and_vocabularies() -> None:
    flags = (
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
        "--moe-layer-freq ([0]*1+[1]*3) --moe-shared-expert-intermediate-size 16 "
        "--window-size 15,0 --window-attn-skip-freq 2 "
        "--qk-layernorm --untie-embeddings-and-output-weights --tensor-model-parallel-size 2 "
        "--sequence-parallel"
    )
    shape = found(flags, 2)[0].shape
    near, far = Attention(4, 2, 8, window=16, norms=True), Attention(4, 2, 8, norms=True)
    sparse = Mlp(16, experts=8, top_k=2, expert_width=32)
    # Every second layer has no window; 250 ids up to a multiple of 16 x 2.
    assert shape.layers == (
        Layer(near, Mlp(128)),
        Layer(far, sparse),
        Layer(near, sparse),
        Layer(far, sparse),
    )
    assert (shape.vocabulary, shape.tied) == (256, False)


@pytest.mark.ranks
def test_validated_arguments_keep_what_they_say() -> None:
    """Megatron's lengths are rounded up and its CP degree is the slot."""
    more = {"bdlm_seq_length": 90, "bdlm_clean_shard_size": 1, "data_parallel_size": 2}
    more |= {"padded_vocab_size": 512, "context_parallel_size": 2}
    task, layout, _ = found("--block-parallel-size 2", **more)
    assert (task.length, task.shape.vocabulary) == (90, 512)
    assert (layout.bp, layout.cp, layout.dp, layout.micro_batches) == (2, 1, 2, 4)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "gpus", "words"),
    [
        ("--block-parallel-size 2", 3, "3 GPUs, and the degrees TP 1, PP 1, BP 2, CP 2 take 2"),
        ("--block-parallel-size 4", 2, "give a multiple of it"),
        ("--global-batch-size 6", 4, "make it a multiple of 4"),
        ("--objective ar", 1, "--objective ar"),
    ],
)
def test_refused(flags: str, gpus: int, words: str) -> None:
    assert words in found(flags, gpus)
