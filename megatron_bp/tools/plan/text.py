"""What a search found, for people to read."""

from collections.abc import Iterator, Sequence

import yaml

from megatron_bp.planning.hardware import GIB
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.search import TIE, Judged, Machine, Outcome, Search
from megatron_bp.planning.seconds import named
from megatron_bp.planning.task import Task
from megatron_bp.planning.words import flags, in_words


def head(task: Task, machine: Machine, rates: str) -> Iterator[str]:
    """What is planned, on what, with which rates."""
    gpu, nodes = machine.gpu, machine.gpus // machine.per_node
    yield (
        f"{task.shape.name}: {task.shape.parameters / 1e9:,.2f} billion parameters, blocks of "
        f"{task.sequence.block_size}, {task.global_batch} packed rows a step, each one document"
    )
    yield (
        f"{machine.gpus} x {gpu.name} ({gpu.memory / GIB:.1f} GiB, of which {machine.free:.0%} are "
        f"to stay free, {gpu.peak(task.precision.model) / 1e12:,.1f} TFLOP/s), {nodes} node"
        f"{'s' * (nodes > 1)} of {machine.per_node}"
    )
    yield f"rates: {rates}"


def body(
    task: Task, search: Search, outcome: Outcome, start: Layout | None, top: int
) -> Iterator[str]:
    """The best layouts of one context, the first of them in full, the user's, and the rest."""
    machine = search.machine
    yield f"## {task.length:,} tokens a row"
    yield ""
    if outcome.fitting:
        yield from _best(outcome, top)
        yield ""
        yield from whole(task, machine, outcome.fitting[0])
    else:
        yield from _nothing(machine, outcome)
    if start is not None:
        yield ""
        yield _given(search, outcome, start)
    yield ""
    yield from _dropped(outcome)


def _best(outcome: Outcome, top: int) -> Iterator[str]:
    ties, rows = outcome.ties(), []
    for place, one in enumerate(outcome.fitting[:top], 1):
        assert one.seconds is not None
        tie = len(ties) > 1 and one in ties
        rows.append(
            [
                f"1{'=' if len(ties) > 1 else ''}" if tie or place == 1 else str(place),
                f"{one.speed:,.0f}",
                f"{one.seconds.total:,.2f}",
                f"{one.memory.total / GIB:,.1f}",
                in_words(one.layout),
            ]
        )
    yield from table(["", "tokens/s", "step, s", "GiB a GPU", "layout"], rows)
    if len(ties) > 1:
        yield ""
        yield (
            f"{len(ties)} layouts within {TIE:.0%} of the fastest (1=) are not told apart; of "
            f"them first the one whose links are busy for the shortest time."
        )


def whole(task: Task, machine: Machine, one: Judged) -> Iterator[str]:
    """One layout by part."""
    yield f"The first, {in_words(one.layout)}:"
    yield ""
    yield from memory_lines(one)
    yield ""
    yield from time_lines(one)
    yield ""
    yield from traffic_lines(machine, one)
    yield ""
    yield "What a config has to say for it (in place of other flags of recomputation):"
    yield ""
    text = yaml.safe_dump(flags(task, one.layout), sort_keys=False)
    yield from (f"    {line}" for line in text.splitlines())


def memory_lines(one: Judged) -> Iterator[str]:
    """Memory by part."""
    rows = [[name, f"{part / GIB:,.2f}"] for name, part in one.memory.parts.items() if part]
    rows.append(["together", f"{one.memory.total / GIB:,.2f}"])
    yield from table(["memory of the GPU that needs most", "GiB"], rows)


def time_lines(one: Judged) -> Iterator[str]:
    """The step by part."""
    took = one.seconds
    assert took is not None
    parts = {
        "products of rows with weights": took.products,
        "attention": took.attention,
        "loss head": took.head,
        "communication that nothing hides": sum(took.exposed.values()),
        "optimizer": took.optimizer,
        "pipeline bubble": took.bubble,
    }
    rows = [[n, f"{s:,.3f}", f"{s / took.total:.0%}"] for n, s in parts.items() if s]
    rows.append(["together", f"{took.total:,.3f}", ""])
    yield from table(["a step", "seconds", "part"], rows)


def traffic_lines(machine: Machine, one: Judged) -> Iterator[str]:
    """What a GPU sends."""
    assert one.seconds is not None
    if not one.flows:
        yield "Nothing is sent."
        return
    rows = []
    for flow in one.flows:
        inside = machine.per_node % flow.span == 0
        rows.append(
            [
                flow.name,
                flow.layers or "-",
                f"{flow.ranks}",
                "inside a node" if inside else "network",
                f"{flow.bytes / GIB:,.2f}",
                f"{one.seconds.exposed.get(named(flow), 0.0):,.3f}",
            ]
        )
    heads = ["what a GPU sends in a step", "of", "ranks", "link", "GiB", "seconds nothing hides"]
    yield from table(heads, rows)


def _nothing(machine: Machine, outcome: Outcome) -> Iterator[str]:
    one = outcome.closest
    if one is None:
        yield "No layout is allowed: see what is left out, and why."
        return
    lacks, has = (one.memory.total - machine.memory) / GIB, machine.gpu.memory / GIB
    yield (
        f"Nothing fits: memory is short by {lacks:,.1f} GiB on each GPU in the layout that comes "
        f"closest, {in_words(one.layout)}. It needs {one.memory.total / GIB:,.1f} GiB, and "
        f"{machine.gpu.name} has {machine.memory / GIB:,.1f} if {machine.free:.0%} of its "
        f"{has:,.1f} stay free."
    )
    yield ""
    yield from memory_lines(one)


def _given(search: Search, outcome: Outcome, start: Layout) -> str:
    """Where the config's own layout ranks."""
    machine, own = search.machine, in_words(start)
    judged = search.judge(start)
    if judged.seconds is None:
        lacks = (judged.memory.total - machine.memory) / GIB
        return f"The config's own layout, {own}, does not fit: it lacks {lacks:,.1f} GiB a GPU."
    ahead = sum(one.speed > judged.speed for one in outcome.fitting)
    behind = 1 - judged.speed / max([judged.speed, *(one.speed for one in outcome.fitting)])
    told = f"{judged.speed:,.0f} tokens/s, {judged.memory.total / GIB:,.1f} GiB a GPU"
    if behind < TIE:
        return f"The config's own layout, {own}, is one of the best: {told}."
    return (
        f"The config's own layout, {own}: {told}, {behind:.0%} slower than the best, with "
        f"{ahead} layouts before it."
    )


def _dropped(outcome: Outcome) -> Iterator[str]:
    rows = [[str(one.number), one.what or "any", one.why] for one in outcome.dropped]
    yield from table(["layouts", "left out", "why"], rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown, its columns aligned; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    right = [all(not row[i].strip("0123456789,.%=") for row in rows) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        told = [
            cell.rjust(width) if r else cell.ljust(width)
            for cell, width, r in zip(cells, widths, right, strict=True)
        ]
        return f"| {' | '.join(told)} |"

    yield line(heads)
    yield (
        "|"
        + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True))
        + "|"
    )
    yield from map(line, rows)
