"""The training runs that the planner's memory is compared with, and which of them are held out.

Each is a task under a layout, as the planner takes it; the flags of the real run are made from it.
Rows are one document of full length each, so the planner counts the very rows that are trained on.
The runs that are held out were chosen before any run was measured; no constant is fitted on them.
"""

from dataclasses import dataclass
from typing import Any

from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.shape import Attention, Layer, Mlp, Shape
from megatron_bp.planning.task import Precision, Task
from megatron_bp.sequence.plan import SequenceOptions

BLOCK = 32
VOCABULARY = 4096
FLOAT32 = Precision(model=4, gradient=4, optimizer=8)
BFLOAT16 = Precision(model=2, gradient=4, optimizer=12)


@dataclass(frozen=True)
class Run:
    """One run; `held_out` ones are never used for a fit."""

    name: str
    task: Task
    layout: Layout
    held_out: bool = False


def make_shape(
    layers: int,
    hidden: int,
    heads: int,
    key_heads: int,
    width: int,
    window: int | None = None,
    experts: int = 0,
) -> Shape:
    """A SwiGLU model with heads of 64; of experts, each `width` wide, a row passes two."""
    attention = Attention(heads, key_heads, 64, window)
    mlp = Mlp(0, experts, 2, width) if experts else Mlp(width)
    each = (Layer(attention, mlp),) * layers
    return Shape("bench", hidden, VOCABULARY, False, each)


SMALL = make_shape(4, 384, 6, 2, 1152)
FLAT = make_shape(2, 384, 6, 2, 1152)
NARROW = make_shape(2, 384, 2, 1, 1152)
WIDE = make_shape(4, 1024, 16, 4, 3072)
WINDOW = make_shape(6, 384, 6, 2, 1152, window=1024)
SPARSE = make_shape(3, 384, 6, 2, 768, experts=8)


def make_run(
    name: str, shape: Shape, length: int, held_out: bool = False, rows: int = 1, **flags: Any
) -> Run:
    """A run whose step has `rows` packed rows; `flags` are the layout's, or the task's."""
    task = Task(
        shape,
        SequenceOptions(BLOCK, row_cost=row_cost(shape)),
        length,
        global_batch=rows,
        fused=False,
        precision=flags.pop("precision", FLOAT32),
        distributed_optimizer=flags.pop("distributed_optimizer", False),
    )
    flags.setdefault("recompute", "none")
    layout = Layout(micro_batches=rows // flags.get("dp", 1), **flags)
    return Run(name, task, layout, held_out)


def row_cost(shape: Shape) -> int:
    """Linear work of a row in visible pairs, as training counts it."""
    layer = shape.layers[0]
    attention = layer.attention
    assert attention is not None
    weights = shape.hidden * (attention.qkv_numbers + attention.query_heads * attention.head_dim)
    weights += layer.mlp.matrices * shape.hidden * layer.mlp.active_width
    return round(2 * weights / (4 * attention.query_heads * attention.head_dim))


RING = ExchangeOptions("ring")
CHUNKS = ExchangeOptions(most_rows=2048)
RUNS = (
    make_run("single 8K", SMALL, 8192),
    make_run("single 2K, wide", WIDE, 2048),
    make_run("single 8K, attention recomputed", SMALL, 8192, recompute="attention"),
    make_run("CSBP 2, 16K", FLAT, 16384, bp=2, cp=2),
    make_run("CSBP 4, 32K", NARROW, 32768, held_out=True, bp=4, cp=4),
    make_run(
        "CSBP 4, 16K, ring, full recompute",
        SMALL,
        16384,
        bp=4,
        cp=4,
        exchange=RING,
        recompute="full",
    ),
    make_run(
        "CSBP 2, 8K, chunks, bf16", SMALL, 8192, bp=2, cp=2, exchange=CHUNKS, precision=BFLOAT16
    ),
    make_run("CP 2, 8K", SMALL, 8192, cp=2),
    make_run("BP 2, 8K", SMALL, 8192, bp=2),
    make_run("hybrid 4/2, 16K", FLAT, 16384, held_out=True, bp=4, cp=2),
    make_run("TP 2 with SP, 8K", SMALL, 8192, tp=2, sequence_parallel=True),
    make_run("TP 2, 8K", SMALL, 8192, tp=2),
    make_run("PP 2, 4K", SMALL, 4096, held_out=True, rows=4, pp=2),
    make_run(
        "DP 2, 2K, wide, distributed optimizer",
        WIDE,
        2048,
        rows=4,
        dp=2,
        distributed_optimizer=True,
    ),
    make_run("CSBP 2, 32K, window, full recompute", WINDOW, 32768, bp=2, cp=2, recompute="full"),
    make_run("CSBP 2 with EP 2, 4K", SPARSE, 4096, held_out=True, bp=2, cp=2, ep=2),
)


def flags_of(run: Run) -> list[str]:
    """The command line of a run, data and output apart."""
    shape, layout = run.task.shape, run.layout
    layer = shape.layers[0]
    attention, mlp = layer.attention, layer.mlp
    assert attention is not None
    values: dict[str, Any] = {
        "num-layers": len(shape.layers),
        "hidden-size": shape.hidden,
        "num-attention-heads": attention.query_heads,
        "num-query-groups": attention.key_heads,
        "kv-channels": attention.head_dim,
        "ffn-hidden-size": mlp.width or mlp.expert_width,
        "vocab-size": shape.vocabulary,
        "mask-token-id": shape.vocabulary - 1,
        "seq-length": run.task.length,
        "global-batch-size": run.task.global_batch,
        "diffusion-block-size": run.task.sequence.block_size,
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "block-parallel-size": layout.bp,
        "context-parallel-size": layout.cp,
    }
    switches = ["group-query-attention"]
    if attention.window is not None:
        values["window-size"] = f"{attention.window - 1},0"
    if mlp.experts:
        values |= {
            "num-experts": mlp.experts,
            "moe-ffn-hidden-size": mlp.expert_width,
            "moe-router-topk": mlp.top_k,
            "expert-model-parallel-size": layout.ep,
        }
    if layout.exchange.form != "auto":
        values["clean-kv-exchange"] = layout.exchange.form
    if layout.exchange.most_rows is not None:
        values["clean-kv-rows"] = layout.exchange.most_rows
    if layout.recompute == "full":
        values |= {"recompute-granularity": "full", "recompute-method": "uniform"}
        values["recompute-num-layers"] = 1
    elif layout.recompute == "attention":
        values["recompute-granularity"] = "selective"
    if layout.sequence_parallel:
        switches.append("sequence-parallel")
    if run.task.distributed_optimizer:
        switches.append("use-distributed-optimizer")
    if run.task.precision == BFLOAT16:
        switches.append("bf16")
    words = [f"--{name}" for name in switches]
    for name, value in values.items():
        words += [f"--{name}", str(value)]
    return words
