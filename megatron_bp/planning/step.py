"""A step as --dry-run and the report of a run tell it: of the GPU that holds most, that sends most.

Its rows are one document of full length each.
"""

from collections.abc import Iterator

from megatron_bp.planning import rates
from megatron_bp.planning.counts import SlotCounts, count, full_rows, options_of
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.memory import Memory, memory
from megatron_bp.planning.task import Task
from megatron_bp.planning.traffic import Flow, traffic
from megatron_bp.sequence.plan import make_plan

Gpu = tuple[int, int]
"""Pipeline stage and slot rank."""

OF_ATTENTION = ("K/V", "rows to heads and back")  # flows that a run counts as bytes sent


def counted(task: Task, layout: Layout) -> SlotCounts:
    """The counts of a micro-batch."""
    sample = full_rows(task.length, layout.micro_batch)
    plan = make_plan(sample, options_of(task.sequence, layout))
    windows = {layer.attention.window for layer in task.shape.layers if layer.attention is not None}
    return count(plan, layout, windows)


def gpus(layout: Layout) -> Iterator[Gpu]:
    """One of each kind: TP ranks and replicas hold and send as much."""
    yield from ((stage, rank) for stage in range(layout.pp) for rank in range(layout.slot))


def most_traffic(task: Task, layout: Layout, counts: SlotCounts) -> tuple[Gpu, tuple[Flow, ...]]:
    """The GPU that sends most in a step, and what it sends."""
    every = {gpu: traffic(task, layout, counts, *gpu) for gpu in gpus(layout)}
    return max(every.items(), key=lambda item: sum(flow.bytes for flow in item[1]))


def most_memory(task: Task, layout: Layout, counts: SlotCounts) -> tuple[Gpu, Memory]:
    """The GPU that holds most at its peak, and what it holds."""
    _, uncounted = rates.read()
    every = {gpu: memory(task, layout, counts, *gpu, uncounted) for gpu in gpus(layout)}
    return max(every.items(), key=lambda item: item[1].total)


def attention_bytes(task: Task, layout: Layout, counts: SlotCounts) -> int:
    """Bytes that attention sends in a step, all GPUs together."""
    flows = (flow for gpu in gpus(layout) for flow in traffic(task, layout, counts, *gpu))
    of_one = sum(flow.bytes for flow in flows if flow.name in OF_ATTENTION)
    return round(of_one * layout.tp * layout.dp)
