"""Bytes of one GPU at its peak, by part, counted from the plan that training makes.

A step has three moments at which memory may be largest: the loss head, and of the last layer's
backward its MLP and its attention. Each is the sum of what stays all the time, of what is kept for
the backward, and of what is at work just then. Two numbers are measured (`Uncounted`).
"""

# Shapes: S rows of this GPU, R scored ones, H hidden size, V vocabulary of a TP rank.

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_bp.model.chunks import CHUNK_LOGITS
from megatron_bp.planning.arrivals import exchange_bytes, gathered_bytes
from megatron_bp.planning.counts import SlotCounts
from megatron_bp.planning.flops import scored_rows
from megatron_bp.planning.kept import Numbers, hidden_numbers, norm_numbers, numbers
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.parameters import Parameters, parameters
from megatron_bp.planning.rates import Uncounted
from megatron_bp.planning.shape import Layer
from megatron_bp.planning.stages import stages
from megatron_bp.planning.task import Task

STEADY = ("weights", "gradients", "optimizer")
AT_WORK = ("kept activations", "working set", "loss head", "K/V of other ranks")


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU at its peak.

    Attributes:
        parts: by what holds them; `STEADY`, `AT_WORK` and "process".
    """

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All."""
        return sum(self.parts.values())


def memory(
    task: Task, layout: Layout, counts: SlotCounts, stage: int, rank: int, uncounted: Uncounted
) -> Memory:
    """Memory of a GPU.

    Args:
        task: the model and its precision.
        layout: see `Layout`.
        counts: of a micro-batch, under this layout.
        stage: pipeline stage.
        rank: slot rank.
        uncounted: what is measured.
    """
    held = parameters(task.shape, layout, stage)
    own = held.sharded if task.distributed_optimizer else held.total
    precision = task.precision
    parts = {
        "weights": held.total * precision.model,
        "gradients": precision.gradient * (held.sharded if task.sharded_gradients else held.total),
        "optimizer": own * precision.optimizer,
    }
    moments = _moments(task, layout, counts, stage, rank, held)
    worst = max(moments, key=lambda moment: sum(moment.values()))
    parts |= {name: uncounted.slack * worst.get(name, 0.0) for name in AT_WORK}
    parts["process"] = uncounted.process
    return Memory({name: round(value) for name, value in parts.items()})


def peak(task: Task, layout: Layout, counts: SlotCounts, uncounted: Uncounted) -> Memory:
    """Memory of the GPU that needs most."""
    everyone = (
        memory(task, layout, counts, stage, rank, uncounted)
        for stage in range(layout.pp)
        for rank in range(layout.slot)
    )
    return max(everyone, key=lambda found: found.total)


def in_flight(layout: Layout, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once under 1F1B, in whole stages.

    With virtual stages, chunks of layers are in flight, of which a stage has several.
    """
    chunks = layout.split.chunks
    if layout.pp == 1:
        return 1
    if chunks == 1:
        return min(layout.pp - stage, layout.micro_batches)
    warm = 2 * (layout.pp - stage - 1) + (chunks - 1) * layout.pp + 1
    return min(warm, layout.micro_batches * chunks) / chunks


def _moments(
    task: Task, layout: Layout, counts: SlotCounts, stage: int, rank: int, held: Parameters
) -> Iterator[dict[str, float]]:
    """What is at work at each moment that may be the peak, by part."""
    size, wide = task.precision.model, wide_size(task)
    rows, last = counts.ranks[rank].rows, stage == layout.pp - 1
    layers = stages(task.shape, layout)[stage]
    kept = in_flight(layout, stage) * sum(_kept(task, layout, counts, rank, x) for x in layers)
    kept += rows * rotary_bytes(layers)
    if layout.pp > 1:  # what came of the next stage, and goes to the one before
        kept += 2 * rows * hidden_numbers(task.shape, layout) * size
    gathering = layout.tp > 1 and layout.sequence_parallel
    kept += rows * task.shape.hidden * size * gathering  # Megatron's one buffer for it
    if last:
        norm = rows * norm_numbers(task, layout) * size
        yield from _head(task, layout, counts, rank, kept + norm)
    gradient = held.largest * size  # of a matrix, before it is added to its buffer
    for layer in set(layers):
        of = numbers(task, layout, layer)
        again = 0.0  # kept of the layer that is computed again, its input apart
        if layout.recompute == "full":
            again = rows * ((of.kept - of.hidden) * size + of.wide * wide)
        working = rows * of.mlp_backward * size + gradient
        yield {
            "kept activations": kept,
            "working set": again + working,
            "K/V of other ranks": _gathered(task, layout, counts, rank, layer),
        }
        if layer.attention is None:
            continue
        working = _attention_backward(of, rows, size, wide) + gradient
        yield {
            # The MLP of this layer has let go of what it kept.
            "kept activations": kept - (rows * of.mlp * size if layout.recompute != "full" else 0),
            "working set": again - (rows * of.mlp * size if again else 0) + working,
            "K/V of other ranks": exchange_bytes(task, layout, counts, rank, layer.attention),
        }


def _kept(task: Task, layout: Layout, counts: SlotCounts, rank: int, layer: Layer) -> float:
    """Bytes that a layer keeps of a micro-batch until its backward begins."""
    of, rows = numbers(task, layout, layer), counts.ranks[rank].rows
    size, wide = task.precision.model, wide_size(task)
    if layout.recompute == "full":
        result = of.queries * size + of.wide * wide if layout.keep_attention else 0.0
        return rows * (of.hidden * size + result)
    kept = rows * of.kept * size
    if layout.recompute == "none":  # else the log-sum-exp is computed again
        kept += rows * of.wide * wide
        if layout.keep_gathered and layer.attention is not None:
            kept += gathered_bytes(task, layout, counts, rank, layer.attention)
    return kept


def _gathered(task: Task, layout: Layout, counts: SlotCounts, rank: int, layer: Layer) -> float:
    """K/V that a layer's recomputation brought, and that wait for its attention's backward."""
    if layer.attention is None or layout.recompute != "full" or layout.keep_attention:
        return 0.0
    return gathered_bytes(task, layout, counts, rank, layer.attention)


def _attention_backward(of: Numbers, rows: int, size: int, wide: int) -> float:
    """What attention's backward holds, the exchange apart.

    The gradient that goes round the layer, that of the output, and those of queries, keys and
    values in the accumulation dtype; at the end queries' in the model's dtype as well, until then
    what the kernel gives of one part.
    """
    return rows * ((of.hidden + 2 * of.queries + of.keys) * size + (of.queries + of.keys) * wide)


def _head(
    task: Task, layout: Layout, counts: SlotCounts, rank: int, kept: float
) -> Iterator[dict[str, float]]:
    """The loss head at its last chunk, and when its gradients go back."""
    size, hidden = task.precision.model, task.shape.hidden
    rows, scored = counts.ranks[rank].rows, scored_rows(task, counts, rank)
    vocabulary = task.shape.vocabulary / layout.tp
    chunk = min(scored, max(1, CHUNK_LOGITS // vocabulary)) * vocabulary
    whole = rows * hidden * size * (layout.tp > 1 and layout.sequence_parallel)  # rows of all
    table = vocabulary * hidden
    # Logits in float32 and, for their log-sum-exp, once more; of the weight's gradient a product.
    logits = 8 * chunk + (table * size if size < 4 else 0)
    yield {
        "kept activations": kept,
        "loss head": whole + 2 * scored * hidden * size + table * wide_size(task) + logits,
    }
    yield {
        "kept activations": kept,
        "loss head": whole + (2 * scored + rows) * hidden * size + 2 * table * size,
    }


def rotary_bytes(layers: tuple[Layer, ...]) -> int:
    """Of a row's angles, in float32."""
    return 4 * max((x.attention.head_dim for x in layers if x.attention is not None), default=0)


def wide_size(task: Task) -> int:
    """Bytes of a number in the accumulation dtype."""
    return max(4, task.precision.model)
