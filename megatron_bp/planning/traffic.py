"""What one GPU sends in one step, flow by flow, counted from the plan that training makes.

Collectives are counted as rings do them: a gather or scatter among n ranks sends (n - 1) / n of the
whole, a sum twice that. A few numbers a row or a step (the softmax of the loss head over
tensor-parallel ranks, counts, norms) are left out.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_bp.attention.exchange.count import over_heads
from megatron_bp.planning.counts import SlotCounts
from megatron_bp.planning.flops import scored_rows
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.parameters import parameters
from megatron_bp.planning.shape import Attention, Layer
from megatron_bp.planning.stages import stages
from megatron_bp.planning.task import Task

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class Flow:
    """One kind of communication.

    Attributes:
        name: what goes.
        layers: of which layers, in words; empty where it is none of a layer.
        ranks: size of the group.
        span: consecutive ranks among which the group lies: more than a node has, and it leaves one.
        bytes: that one GPU sends in one step.
        passes: how often, in a micro-batch, or a step where it goes once in a step.
    """

    name: str
    layers: str
    ranks: int
    span: int
    bytes: float
    passes: int


def traffic(
    task: Task, layout: Layout, counts: SlotCounts, stage: int, rank: int
) -> tuple[Flow, ...]:
    """All flows of a GPU that send anything.

    Args:
        task: the model and its precision.
        layout: see `Layout`.
        counts: of a micro-batch, under this layout.
        stage: pipeline stage.
        rank: slot rank.
    """
    layers = stages(task.shape, layout)[stage]
    flows = (
        *_attention(task, layout, counts, layers, rank),
        *_tensor_parallel(task, layout, counts, layers, stage, rank),
        *_pipeline(task, layout, counts, stage, rank),
        *_experts(task, layout, counts, layers, rank),
        *_parameters(task, layout, stage),
    )
    return tuple(flow for flow in flows if flow.bytes)


def attention_passes(layout: Layout) -> tuple[int, int]:
    """(passes of K/V, passes of their gradients) of a layer and micro-batch."""
    # What a recomputed forward fetched is kept for the backward that follows at once.
    return (1 if layout.keep_gathered and layout.recompute == "none" else 2), 1


def attention_bytes(
    task: Task, layout: Layout, counts: SlotCounts, attention: Attention, rank: int
) -> int:
    """Bytes of one layer and micro-batch, all passes."""
    dtype = DTYPES[task.precision.model]
    if layout.over_heads:
        return _over_heads_bytes(task, layout, counts, attention, rank)
    row = 2 * max(1, attention.key_heads // layout.tp) * attention.head_dim
    mine, window = counts.ranks[rank], attention.window
    sent = [mine.sent[window]]
    if task.passes == "two":
        sent.append(mine.clean_sent[window])
    return sum(one.bytes(row, dtype, *attention_passes(layout)) for one in sent)


def _over_heads_bytes(
    task: Task, layout: Layout, counts: SlotCounts, attention: Attention, rank: int
) -> int:
    shards = [counts.shards]
    if task.passes == "two":
        nothing = np.zeros(0, np.int64)
        shards.append(tuple(replace(shard, corrupted=nothing) for shard in counts.shards))
    heads = (attention.query_heads // layout.tp, max(1, attention.key_heads // layout.tp))
    numbers = sum(over_heads(every, rank, *heads, attention.head_dim) for every in shards)
    return numbers * task.precision.model * _over_heads_passes(layout)


def _over_heads_passes(layout: Layout) -> int:
    """Of rows there and back; a recomputed forward sends again, kept results or not."""
    return 2 + (layout.recompute != "none")


def _attention(
    task: Task, layout: Layout, counts: SlotCounts, layers: tuple[Layer, ...], rank: int
) -> Iterator[Flow]:
    """K/V and their gradients, by kind of layer."""
    if layout.cp == 1:
        return
    kinds = Counter(layer.attention for layer in layers if layer.attention is not None)
    passes = _over_heads_passes(layout) if layout.over_heads else sum(attention_passes(layout))
    for attention, number in kinds.items():
        yield Flow(
            name="rows to heads and back" if layout.over_heads else "K/V",
            layers=in_words(number, attention),
            ranks=layout.cp,
            span=layout.cp * layout.tp,
            bytes=layout.micro_batches
            * number
            * attention_bytes(task, layout, counts, attention, rank),
            passes=passes * (2 if task.passes == "two" else 1),
        )


def in_words(number: int, attention: Attention) -> str:
    """So many layers of a kind, such as "25 layers, window 1,024"."""
    kind = "full attention" if attention.window is None else f"window {attention.window:,}"
    return f"{number} layer{'s' * (number > 1)}, {kind}"


def _tensor_parallel(
    task: Task,
    layout: Layout,
    counts: SlotCounts,
    layers: tuple[Layer, ...],
    stage: int,
    rank: int,
) -> Iterator[Flow]:
    """Sums of hidden rows over the ranks that share matrices.

    Of a layer two in the forward, and two in the backward; with sequence parallelism each is a
    scatter and a gather, and the backward gathers the inputs of two products once more. Experts are
    not cut: a layer that has nothing else after attention has half of that.
    """
    if layout.tp == 1:
        return
    part = (layout.tp - 1) / layout.tp
    row = task.shape.hidden * task.precision.model * part
    mine = counts.ranks[rank]
    again = layout.recompute == "full"
    cut = len(layers) + sum(layer.mlp.width > 0 for layer in layers)
    gathers = 2 + 2 + 2 * again + layout.sequence_parallel
    yield Flow(
        name="tensor-parallel sums",
        layers=f"{len(layers)} layer{'s' * (len(layers) > 1)}",
        ranks=layout.tp,
        span=layout.tp,
        bytes=layout.micro_batches * cut * gathers * mine.rows * row,
        passes=2 + again,
    )
    ends = 0.0
    if stage == 0:  # the forward's sum of the embedding; under SP scattered, and gathered again
        ends += 2 * mine.rows
    if stage == layout.pp - 1:
        scored = scored_rows(task, counts, rank)
        ends += 2 * (mine.rows if layout.sequence_parallel else scored)
    yield Flow(
        name="tensor-parallel sums",
        layers="embedding and loss head",
        ranks=layout.tp,
        span=layout.tp,
        bytes=layout.micro_batches * ends * row,
        passes=1,
    )


def _pipeline(
    task: Task, layout: Layout, counts: SlotCounts, stage: int, rank: int
) -> Iterator[Flow]:
    """Hidden rows to the next stage, their gradients to the one before."""
    chunks, last = layout.split.chunks, layout.pp - 1
    if layout.pp == 1:
        return
    shared = layout.tp if layout.sequence_parallel else 1
    sends = (chunks - (stage == last)) + (chunks - (stage == 0))
    rows = counts.ranks[rank].rows / shared
    yield Flow(
        name="pipeline sends",
        layers="",
        ranks=layout.pp,
        span=layout.gpus,
        bytes=layout.micro_batches * sends * rows * task.shape.hidden * task.precision.model,
        passes=sends,
    )


def _experts(
    task: Task, layout: Layout, counts: SlotCounts, layers: tuple[Layer, ...], rank: int
) -> Iterator[Flow]:
    """Rows to the ranks of their experts and back, if all experts get as many."""
    sparse = [layer for layer in layers if layer.mlp.experts]
    if layout.ep == 1 or not sparse:
        return
    shared = layout.tp if layout.sequence_parallel else 1
    rows = counts.ranks[rank].rows / shared * (layout.ep - 1) / layout.ep
    passes = 2 + (layout.recompute == "full")
    copies = sum(layer.mlp.top_k for layer in sparse)
    number = rows * copies * 2 * passes * task.shape.hidden
    yield Flow(
        name="rows to experts and back",
        layers=f"{len(sparse)} layer{'s' * (len(sparse) > 1)}",
        ranks=layout.ep,
        span=layout.ep,  # whose ranks follow each other: TP cuts no expert
        bytes=layout.micro_batches * number * task.precision.model,
        passes=passes,
    )


def _parameters(task: Task, layout: Layout, stage: int) -> Iterator[Flow]:
    """Gradients summed over replicas and slot; parameters back from whoever updates them."""
    shape, precision = task.shape, task.precision
    held = parameters(shape, layout, stage)
    span = layout.tp * layout.dp * layout.slot
    for name, own, ranks in (
        ("", held.dense, held.replicas),
        (" of experts", held.experts, held.expert_replicas),
    ):
        numbers = own * (ranks - 1) / ranks
        there = numbers * precision.gradient
        if task.distributed_optimizer:
            yield Flow(f"gradients{name}", "", ranks, span, there, 1)
            yield Flow(f"parameters{name}", "", ranks, span, numbers * precision.model, 1)
        else:
            yield Flow(f"gradients{name}", "", ranks, span, 2 * there, 1)
    if shape.tied and layout.pp > 1 and stage in (0, layout.pp - 1):
        whole = shape.vocabulary * shape.hidden / layout.tp * precision.gradient
        yield Flow("gradients of the tied embedding", "", 2, layout.gpus, whole, 1)
