"""What to change where no layout fits: each way is looked for, and told only if it works."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_bp.planning.allowed import refusal
from megatron_bp.planning.candidates import CHUNKS, divisors
from megatron_bp.planning.hardware import GIB, gpus
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.search import Counts, Judged, Machine, Search
from megatron_bp.planning.task import Task
from megatron_bp.planning.words import in_words

MOST_GPUS = 256
LEAST_LENGTH = 1024
SHORT = 2  # blocks of each GPU

ByLength = dict[int, Counts]


def changes(task: Task, machine: Machine) -> Iterator[str]:
    """Sentences, each of one change with which something fits, and what then."""
    counts: ByLength = {}
    yield from _optimizer(task, machine, counts)
    yield from _more_memory(task, machine, counts)
    yield from _more_gpus(task, machine, counts)
    yield from _shorter(task, machine, counts)


def leanest(task: Task, machine: Machine, counts: ByLength) -> Judged | None:
    """What fits with the means that save most memory; None if nothing does.

    CSBP or one rank, full recompute, K/V in chunks, SP wherever there is TP.
    """
    return next(_fitting(task, machine, counts), None)


def _fitting(task: Task, machine: Machine, counts: ByLength) -> Iterator[Judged]:
    """Those that fit. Counting long rows takes seconds, so shorter ones have to fit first."""
    short = SHORT * task.sequence.block_size * machine.gpus
    steps = sorted({min(task.length, short), *(max(1, task.length // n) for n in (16, 4, 1))})
    searches = [
        Search(one, machine, counts.setdefault(one.length, Counts(one)))
        for one in (replace(task, length=length) for length in steps)
    ]
    for layout in _lean(task, machine):
        if refusal(task, layout, machine.per_node) is not None:
            continue
        for search in searches:
            judged = search.judge(layout)
            if judged.seconds is None:
                break
        else:
            yield judged


def _lean(task: Task, machine: Machine) -> Iterator[Layout]:
    """Layouts of that kind, those with long slots first: they hold least activations."""
    sparse = any(layer.mlp.experts for layer in task.shape.layers)
    most = -(-task.length // CHUNKS)
    for slot in reversed(divisors(machine.gpus)):
        for tp in divisors(machine.gpus // slot):
            for pp in divisors(machine.gpus // slot // tp):
                dp = machine.gpus // slot // tp // pp
                for ep in reversed(divisors(slot * tp * dp)) if sparse else (1,):
                    layout = Layout(tp, pp, ep, dp, slot, slot, sequence_parallel=tp > 1)
                    exchange = replace(layout.exchange, most_rows=most if slot > 1 else None)
                    steps = task.global_batch // dp
                    yield replace(layout, exchange=exchange, micro_batches=steps)


def _optimizer(task: Task, machine: Machine, counts: ByLength) -> Iterator[str]:
    if task.distributed_optimizer or machine.gpus == 1:
        return
    found = leanest(replace(task, distributed_optimizer=True), machine, counts)
    if found is not None:
        yield f"share the optimizer (use_distributed_optimizer: true): {_told(found)}"


def _more_memory(task: Task, machine: Machine, counts: ByLength) -> Iterator[str]:
    """The smallest GPU that will do, and if none does so many of the largest."""
    larger = [one for one in gpus().values() if one.memory > machine.gpu.memory]
    larger.sort(key=lambda one: one.memory)
    for gpu in larger:
        found = leanest(task, replace(machine, gpu=gpu), counts)
        if found is not None:
            yield f"a GPU with more memory, {gpu.name} ({gpu.memory / GIB:.1f} GiB): {_told(found)}"
            return
    if larger:
        yield from _number(task, replace(machine, gpu=larger[-1]), counts, "more and larger GPUs")


def _more_gpus(task: Task, machine: Machine, counts: ByLength) -> Iterator[str]:
    found = [*_number(task, machine, counts, "more GPUs")]
    yield from found or [f"more GPUs do not help up to {MOST_GPUS} of {machine.gpu.name}"]


def _number(task: Task, machine: Machine, counts: ByLength, what: str) -> Iterator[str]:
    """How many GPUs of a kind will do."""
    number = machine.gpus
    while (number := 2 * number) <= MOST_GPUS:
        per_node = max(machine.per_node, min(number, machine.gpu.node))
        found = leanest(task, replace(machine, gpus=number, per_node=per_node), counts)
        if found is not None:
            yield f"{what}, {number} of {machine.gpu.name}: {_told(found)}"
            return


def _shorter(task: Task, machine: Machine, counts: ByLength) -> Iterator[str]:
    length = task.length
    while (length := length // 2) >= LEAST_LENGTH:
        shorter = replace(task, length=length)
        found = leanest(shorter, machine, counts)
        if found is not None:
            yield f"a shorter row, {length:,} tokens: {_told(found)}"
            return
    yield f"a shorter row does not help down to {LEAST_LENGTH:,} tokens"


def _told(found: Judged) -> str:
    return f"{found.memory.total / GIB:,.1f} GiB a GPU ({in_words(found.layout)})"
