"""What a step takes: counted work over rates, and what of communication nothing hides.

A step is that of the slot rank and pipeline stage that take longest; all others wait for them in
every layer. No latency, no launch of a kernel and no reading of data is in it.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megatron_bp.planning.counts import RankCounts, SlotCounts
from megatron_bp.planning.flops import BACKWARD_ATTENTION, Flops, flops
from megatron_bp.planning.hardware import Gpu
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.parameters import parameters
from megatron_bp.planning.rates import Rates
from megatron_bp.planning.shape import Attention
from megatron_bp.planning.stages import stages
from megatron_bp.planning.task import Task
from megatron_bp.planning.traffic import DTYPES, Flow, attention_passes, in_words, traffic

KEYS = "K/V"  # the flow that attention hides
OF_ATTENTION = (KEYS, "rows to heads and back")
ONCE = ("gradients", "parameters")  # flows of a step, not of a micro-batch, by how they start


@dataclass(frozen=True)
class Seconds:
    """A step's time by part.

    Attributes:
        products: rows times weights.
        attention: visible pairs.
        head: logits and their gradients.
        exposed: communication that nothing hides, by flow as `named` tells it.
        optimizer: reading and writing its numbers.
        bubble: what a pipeline stage waits at both ends of a step.
        tokens: clean tokens of a step, each counted once.
        stage: pipeline stage of the GPU that takes longest.
        rank: its slot rank.
    """

    products: float
    attention: float
    head: float
    exposed: dict[str, float] = field(default_factory=dict)
    optimizer: float = 0.0
    bubble: float = 0.0
    tokens: int = 0
    stage: int = 0
    rank: int = 0

    @property
    def total(self) -> float:
        """The step."""
        work = self.products + self.attention + self.head + self.optimizer
        return work + sum(self.exposed.values()) + self.bubble

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.tokens / self.total


def seconds(
    task: Task, layout: Layout, counts: SlotCounts, gpu: Gpu, gpus_per_node: int, rates: Rates
) -> Seconds:
    """The time of a step.

    Args:
        task: the model.
        layout: how GPUs share it.
        counts: of a micro-batch, under this layout.
        gpu: what computes.
        gpus_per_node: ranks of a node, which follow each other.
        rates: parts of the data sheet's numbers that are reached.
    """
    peak = gpu.peak(task.precision.model)
    found = []
    for stage, rank in worst(task, layout, counts):
        work = flops(task, layout, counts, stage, rank)
        flows = traffic(task, layout, counts, stage, rank)
        took = _of(task, layout, work, peak, rates)
        exposed = {
            named(flow): flow.bytes / speed(flow, gpu, gpus_per_node, rates)
            for flow in flows
            if flow.name != KEYS
        }
        exposed |= _keys(task, layout, counts, stage, rank, gpu, gpus_per_node, rates)
        often = sum(s for name, s in exposed.items() if not name.startswith(ONCE))
        # The bubble: the other stages' part of one micro-batch, or of one of its chunks.
        micro = (sum(took.values()) + often) / layout.micro_batches
        found.append(
            Seconds(
                **took,
                exposed=exposed,
                optimizer=_optimizer(task, layout, stage, gpu),
                bubble=micro * (layout.pp - 1) / layout.split.chunks,
                tokens=task.length * task.global_batch,
                stage=stage,
                rank=rank,
            )
        )
    return max(found, key=lambda one: one.total)


def worst(task: Task, layout: Layout, counts: SlotCounts) -> Iterator[tuple[int, int]]:
    """(stage, slot rank) among which is the one that takes longest, and needs most memory."""
    dealt = stages(task.shape, layout)
    unlike = {
        (layers, n == 0, n == layout.pp - 1): n for n, layers in reversed([*enumerate(dealt)])
    }
    ranks = range(layout.slot)
    chosen = {max(ranks, key=lambda r: counts.ranks[r].rows)}
    for window in counts.ranks[0].pairs:
        chosen.add(max(ranks, key=lambda r: counts.ranks[r].pairs[window]))
    for stage in sorted(unlike.values()):
        yield from ((stage, rank) for rank in sorted(chosen))


def _of(task: Task, layout: Layout, work: Flops, peak: float, rates: Rates) -> dict[str, float]:
    """Seconds of a step by what is computed."""
    return {
        "products": layout.micro_batches * work.products.total / (peak * rates.products),
        "attention": layout.micro_batches * work.attention.total / (peak * rates.attention),
        "head": layout.micro_batches * work.head.total / (peak * rates.products),
    }


def speed(flow: Flow, gpu: Gpu, gpus_per_node: int, rates: Rates) -> float:
    """Bytes a second at which it travels: the data sheet's, of the slowest link that it takes.

    K/V, or rows to heads, are not trusted to travel faster than the fitted rate, on any link.
    """
    link = gpu.link(flow.span, gpus_per_node)
    return min(link, rates.link * gpu.network) if flow.name in OF_ATTENTION else link


def named(flow: Flow) -> str:
    """What goes, and of which layers."""
    return f"{flow.name}, {flow.layers}" if flow.layers else flow.name


def _keys(
    task: Task,
    layout: Layout,
    counts: SlotCounts,
    stage: int,
    rank: int,
    gpu: Gpu,
    gpus_per_node: int,
    rates: Rates,
) -> dict[str, float]:
    """Seconds of a step in which attention waits for K/V of others or for their gradients."""
    if layout.cp == 1 or layout.over_heads:
        return {}
    layers = stages(task.shape, layout)[stage]
    goes = Flow(KEYS, "", layout.cp, layout.cp * layout.tp, 0.0, 0)
    link = speed(goes, gpu, gpus_per_node, rates)
    rate = gpu.peak(task.precision.model) * rates.attention
    out = {}
    for attention, number in Counter(x.attention for x in layers if x.attention).items():
        waits = waited(task, layout, counts.ranks[rank], attention, link, rate)
        name = named(replace(goes, layers=in_words(number, attention)))
        out[name] = number * waits * layout.micro_batches
    return out


def waited(
    task: Task, layout: Layout, mine: RankCounts, attention: Attention, link: float, rate: float
) -> float:
    """Seconds that one layer and micro-batch wait for K/V, all passes.

    What arrives travels beside the part of attention that needs no keys of others: in the forward
    all of it; in the backward what is fetched beside own corrupted rows, and gradients beside own
    clean ones. Of a ring, or of chunks, that holds for the first (of gradients the last), and the
    others travel beside attention over those that are there.

    Args:
        task: its precision, and the block size.
        layout: recomputation, and the form of exchange.
        mine: counts of the rank.
        attention: of the layer.
        link: bytes a second.
        rate: FLOPs a second of attention.
    """
    window = attention.window
    row = 2 * max(1, attention.key_heads // layout.tp) * attention.head_dim
    pair = 4 * attention.query_heads * attention.head_dim / layout.tp / rate
    sent, dtype = mine.sent[window], DTYPES[task.precision.model]
    fetch, give = sent.bytes(row, dtype, 1, 0) / link, sent.bytes(row, dtype, 0, 1) / link
    local, parts = mine.local_pairs[window], arrivals(layout, mine, window)
    own = min(local, mine.corrupted * task.sequence.block_size) * pair
    clean = local * pair - own
    later = 1 - 1 / parts
    rest = (mine.pairs[window] - local) * pair * later

    def in_backward(fetched: float, given: float) -> float:
        first = max(0.0, fetched / parts - BACKWARD_ATTENTION * own)
        last = max(0.0, given / parts - BACKWARD_ATTENTION * clean)
        return first + last + max(0.0, (fetched + given) * later - BACKWARD_ATTENTION * rest)

    forward = max(0.0, fetch / parts - local * pair) + max(0.0, fetch * later - rest)
    fetches, _ = attention_passes(layout)
    if layout.recompute != "none":  # the recomputed forward fetches, and keeps it for the backward
        return fetches * forward + in_backward(0.0, give)
    return forward + in_backward((fetches - 1) * fetch, give)


def arrivals(layout: Layout, mine: RankCounts, window: int | None) -> int:
    """In how many parts K/V of others come."""
    most, rows = layout.exchange.most_rows, mine.arriving[window]
    if mine.sent[window].form == "ring":
        return max(1, layout.cp - 1)
    return 1 if most is None else max(1, math.ceil(rows / most))


def _optimizer(task: Task, layout: Layout, stage: int, gpu: Gpu) -> float:
    """Seconds in which its numbers are read and written, gradients read and weights written."""
    held, precision = parameters(task.shape, layout, stage), task.precision
    own = held.sharded if task.distributed_optimizer else held.total
    return own * (2 * precision.optimizer + precision.gradient + precision.model) / gpu.hbm
