"""All ways to share a step among so many GPUs."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.task import Task

MICRO_BATCHES = (1, 2, 4)
CHUNKS = 8  # in which K/V of others arrive, where they do not come at once


def candidates(task: Task, gpus: int, start: Layout | None = None) -> Iterator[Layout]:
    """Layouts of that many GPUs, those that training refuses among them; without recomputation.

    Args:
        task: the model: only one with experts shares them.
        gpus: how many.
        start: the user's: clean K/V are exchanged as it says, at once and in chunks.
    """
    sparse = any(layer.mlp.experts for layer in task.shape.layers)
    exchange = start.exchange if start is not None and start.mode != "CP" else ExchangeOptions()
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            for slot in divisors(gpus // tp // pp):
                dp = gpus // tp // pp // slot
                for shared in of_slot(slot, exchange):
                    layout = replace(shared, tp=tp, pp=pp, dp=dp, recompute="none")
                    for ep in divisors(tp * slot * dp) if sparse else (1,):
                        for micro in MICRO_BATCHES:
                            yield from _with(task, layout, ep, micro)


def _with(task: Task, layout: Layout, ep: int, micro: int) -> Iterator[Layout]:
    """With so many expert ranks and packed rows; SP and arrivals in chunks on and off."""
    steps = task.global_batch // (layout.dp * micro)
    layout = replace(layout, ep=ep, micro_batch=micro, micro_batches=steps)
    exchange, chunked = layout.exchange, []
    if layout.cp > 1 and not layout.over_heads and exchange.form != "ring":
        most = exchange.most_rows or -(-task.length * micro // CHUNKS)
        chunked = [replace(layout, exchange=replace(exchange, most_rows=most))]
    at_once = replace(layout, exchange=replace(exchange, most_rows=None))
    for one in (at_once, *chunked):
        if layout.tp > 1:
            yield replace(one, sequence_parallel=True)
        yield one


def of_slot(slot: int, exchange: ExchangeOptions) -> Iterator[Layout]:
    """All modes and forms in which so many ranks can work on one row."""
    yield Layout(bp=slot, cp=slot, exchange=exchange)
    if slot == 1:
        return
    for cp in reversed(divisors(slot)[:-1]):  # hybrid, and BP last
        yield Layout(bp=slot, cp=cp, exchange=exchange)
    gathered = ExchangeOptions("all_gather", exchange.most_rows, exchange.needed_fraction)
    yield Layout(cp=slot, exchange=gathered)
    yield Layout(cp=slot, exchange=gathered, aligned=True)
    yield Layout(cp=slot, exchange=replace(gathered, form="ring", most_rows=None))
    yield Layout(cp=slot, exchange=replace(gathered, most_rows=None), over_heads=True)


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]
