"""The layouts of so many GPUs, judged: what fits, how fast it is, and why the rest is left out."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_bp.planning.allowed import refusal
from megatron_bp.planning.candidates import candidates
from megatron_bp.planning.counts import SlotCounts, count, full_rows, options_of
from megatron_bp.planning.hardware import GIB, Gpu
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.memory import Memory, memory
from megatron_bp.planning.rates import Rates, Uncounted
from megatron_bp.planning.seconds import Seconds, seconds, speed, worst
from megatron_bp.planning.task import Task
from megatron_bp.planning.traffic import Flow, traffic
from megatron_bp.planning.words import family, in_words
from megatron_bp.sequence.cache import frozen
from megatron_bp.sequence.plan import SequencePlan, make_plan

TIE = 0.02  # layouts whose tokens/s differ by less are not told apart
MOST_WORK = 2.0  # of a rank, times that of one of CSBP, with which a layout is still looked at
ROWS_ENOUGH = 16_384  # of one GPU: a micro-batch of more packed rows makes no GPU faster


@dataclass(frozen=True)
class Machine:
    """What there is.

    Attributes:
        gpu: its kind.
        gpus: how many.
        per_node: of a node.
        rates: what of the data sheet is reached.
        uncounted: memory that nobody counts.
        free: part of a GPU's memory that is to stay free: for what its allocator, NCCL and kernels
            hold beyond what is counted.
    """

    gpu: Gpu
    gpus: int
    per_node: int
    rates: Rates
    uncounted: Uncounted
    free: float = 0.0

    @property
    def memory(self) -> float:
        """Bytes of a GPU that a layout may need."""
        return self.gpu.memory * (1 - self.free)


@dataclass(frozen=True)
class Judged:
    """A layout, and what it would need.

    Attributes:
        layout: see there.
        memory: of the GPU that needs most.
        seconds: of a step; None where it does not fit, and so was not asked.
        flows: what the GPU that takes longest sends, with them.
        wire: seconds of a step in which its links are busy with that, hidden or not.
    """

    layout: Layout
    memory: Memory
    seconds: Seconds | None = None
    flows: tuple[Flow, ...] = ()
    wire: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens a second; 0 where it does not fit."""
        return self.seconds.tokens_per_second if self.seconds is not None else 0.0


@dataclass(frozen=True)
class Dropped:
    """Layouts that are left out for one reason."""

    what: str
    why: str
    number: int


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        fitting: the fastest first; of ties the one whose links are busy for the shortest time,
            since what is not counted, latency and other traffic, grows with that.
        closest: where nothing fits, the layout that lacks least memory; None if none is allowed.
        dropped: reasons, with how many layouts each left out.
    """

    fitting: tuple[Judged, ...]
    closest: Judged | None
    dropped: tuple[Dropped, ...]

    def ties(self) -> tuple[Judged, ...]:
        """Those that are not told apart from the fastest."""
        if not self.fitting:
            return ()
        least = max(one.speed for one in self.fitting) * (1 - TIE)
        return tuple(one for one in self.fitting if one.speed >= least)


@dataclass
class Counts:
    """Counts of slots by layout. Plans are made once and shared by all layouts that have them."""

    task: Task
    _plans: dict[Any, SequencePlan] = field(default_factory=dict)
    _made: dict[Any, SlotCounts] = field(default_factory=dict)

    def of(self, layout: Layout) -> SlotCounts:
        """The counts of a micro-batch under a layout."""
        plain = self._made_once(replace(layout, tp=1, sequence_parallel=False))
        if not layout.sequence_parallel or all(r.rows % layout.tp == 0 for r in plain.ranks):
            return plain  # no rank has rows that only fill up
        return self._made_once(layout)

    def _made_once(self, layout: Layout) -> SlotCounts:
        at = (layout.bp, layout.cp, layout.aligned, layout.micro_batch)
        filled = layout.tp if layout.sequence_parallel else 1
        exchange = replace(layout.exchange, most_rows=None)
        key = (*at, exchange, layout.over_heads, filled)
        if key not in self._made:
            windows = {x.attention.window for x in self.task.shape.layers if x.attention}
            self._made[key] = count(
                self._plan(layout), layout, sorted(windows, key=lambda w: w or 0)
            )
        return self._made[key]

    def work(self, layout: Layout) -> int:
        """Planned work of the slot rank that has most, in visible pairs."""
        return int(self._plan(layout).cost.max())

    def _plan(self, layout: Layout) -> SequencePlan:
        at = (layout.bp, layout.cp, layout.aligned, layout.micro_batch)
        if at not in self._plans:
            sample = full_rows(self.task.length, layout.micro_batch)
            self._plans[at] = frozen(make_plan(sample, options_of(self.task.sequence, layout)))
        return self._plans[at]


class Search:
    """Judges layouts of a task on a machine."""

    def __init__(self, task: Task, machine: Machine, counts: Counts | None = None) -> None:
        """Counts may be shared by searches over one task."""
        self.task, self.machine = task, machine
        self.counts = counts or Counts(task)

    def judge(self, layout: Layout) -> Judged:
        """What a layout needs, and if it fits how fast it is."""
        counts = self.counts.of(layout)
        needs = max(
            (
                memory(self.task, layout, counts, stage, rank, self.machine.uncounted)
                for stage, rank in worst(self.task, layout, counts)
            ),
            key=lambda one: one.total,
        )
        if needs.total > self.machine.memory:
            return Judged(layout, needs)
        return self.timed(Judged(layout, needs))

    def timed(self, one: Judged) -> Judged:
        """The same with its seconds, whether it fits or not."""
        m = self.machine
        counts = self.counts.of(one.layout)
        took = seconds(self.task, one.layout, counts, m.gpu, m.per_node, m.rates)
        flows = traffic(self.task, one.layout, counts, took.stage, took.rank)
        wire = sum(flow.bytes / speed(flow, m.gpu, m.per_node, m.rates) for flow in flows)
        return replace(one, seconds=took, flows=flows, wire=wire)

    def run(self, start: Layout | None = None, everything: bool = False) -> Outcome:
        """Judge all layouts.

        Args:
            start: the user's own layout, of which the form of exchange is taken.
            everything: also what is left out unseen: micro-batches of several rows where one is
                work enough, and modes that compute much twice.
        """
        fitting: list[Judged] = []
        short: dict[str, list[Judged]] = defaultdict(list)
        dropped: Counter[tuple[str, str]] = Counter()
        for layout in candidates(self.task, self.machine.gpus, start):
            reason = refusal(self.task, layout, self.machine.per_node)
            if reason is not None:
                dropped["", reason] += 1
            elif not everything and (known := self._known_worse(layout)) is not None:
                dropped[known] += 1
            else:
                found, unasked = self._recomputing(layout)
                dropped["", "more is recomputed than memory asks for"] += unasked
                fitting += [one for one in found if one.seconds is not None]
                short[family(layout)] += [one for one in found if one.seconds is None]
        kept = _without_idle_chunks(fitting)
        dropped["K/V in chunks", "as fast with all at once, which fits"] += len(fitting) - len(kept)
        missing = [one for group in short.values() for one in group]
        return Outcome(
            fitting=in_order(kept),
            closest=None if kept else min(missing, key=lambda x: x.memory.total, default=None),
            dropped=(
                *_slower(kept),
                *_short(short, self.machine.memory),
                *(Dropped(what, why, n) for (what, why), n in dropped.most_common() if n),
            ),
        )

    def _known_worse(self, layout: Layout) -> tuple[str, str] | None:
        """(what it is, why) if it cannot be the best, and so is not looked at."""
        if layout.micro_batch > 1:
            ranks = self.counts.of(replace(layout, micro_batch=1)).ranks
            if min(rank.rows for rank in ranks) >= ROWS_ENOUGH:
                return (
                    f"micro-batches of {layout.micro_batch} rows",
                    f"a GPU has {ROWS_ENOUGH:,} rows or more with one packed row a micro-batch",
                )
        if layout.cp < layout.slot:
            csbp = replace(layout, bp=layout.slot, cp=layout.slot)
            if self.counts.work(layout) > MOST_WORK * self.counts.work(csbp):
                why = f"a rank computes more than {MOST_WORK:g} times what one of CSBP would"
                return family(layout), why
        return None

    def _recomputing(self, layout: Layout) -> tuple[list[Judged], int]:
        """(a layout with as little recomputation as fits, all if none does; how many are left out).

        Less recomputation is never slower. Attention alone and all but attention are two ways.
        """
        attends = any(layer.attention for layer in self.task.shape.layers)
        steps = [
            [layout],
            [
                replace(layout, recompute="attention"),
                replace(layout, recompute="full", keep_attention=True),
            ],
            [replace(layout, recompute="full")],
        ]
        steps = steps if attends else [steps[0], steps[2]]
        found: list[Judged] = []
        for number, step in enumerate(steps):
            found += [self.judge(one) for one in step]
            if any(one.seconds is not None for one in found):
                return found, sum(map(len, steps[number + 1 :]))
        return found, 0


def in_order(fitting: list[Judged]) -> tuple[Judged, ...]:
    """See `Outcome.fitting`."""
    best = max((one.speed for one in fitting), default=0.0)
    tie = [one for one in fitting if one.speed >= best * (1 - TIE)]
    rest = [one for one in fitting if one.speed < best * (1 - TIE)]
    tie.sort(key=lambda one: (one.wire, one.memory.total))
    return (*tie, *sorted(rest, key=lambda one: -one.speed))


def _without_idle_chunks(fitting: list[Judged]) -> list[Judged]:
    """Without layouts in chunks that are as fast with all K/V at once."""

    def at_once(layout: Layout) -> Layout:
        return replace(layout, exchange=replace(layout.exchange, most_rows=None))

    speed = {one.layout: one.speed for one in fitting}
    return [
        one
        for one in fitting
        if one.layout.exchange.most_rows is None
        or one.speed > speed.get(at_once(one.layout), 0.0) * 1.001
    ]


def _slower(fitting: list[Judged]) -> Iterator[Dropped]:
    """By mode: how far its best is behind."""
    best = max((one.speed for one in fitting), default=0.0)
    for mode, group in _by_mode(fitting).items():
        first = max(group, key=lambda one: one.speed)
        behind = 1 - first.speed / best
        slower = sum(one.speed < best * (1 - TIE) for one in group)
        if slower and behind < TIE:
            yield Dropped(mode, f"slower than its best, {in_words(first.layout)}", slower)
        elif slower:
            why = f"{behind:.0%} slower at best: {first.speed:,.0f} tokens/s"
            yield Dropped(mode, f"{why}, {in_words(first.layout)}", slower)


def _short(short: dict[str, list[Judged]], has: float) -> Iterator[Dropped]:
    """By mode: what it lacks at least."""
    for mode, group in short.items():
        if group:
            least = min(group, key=lambda one: one.memory.total)
            lacks = (least.memory.total - has) / GIB
            why = f"{lacks:,.1f} GiB too little memory at least: {in_words(least.layout)}"
            yield Dropped(mode, why, len(group))


def _by_mode(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        groups[family(one.layout)].append(one)
    return groups
