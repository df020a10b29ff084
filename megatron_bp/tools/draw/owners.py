"""Which rank holds which clean chunk and which units of a packed row, of any length: strips."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp import picture
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequencePlan, make_plan
from megatron_bp.tools.draw.mask import spans
from megatron_bp.tools.draw.rows import told

# (start, stop) in clean positions
Spans = list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Owners:
    """What the picture shows (R ranks).

    Attributes:
        documents: clean positions of each document.
        clean: R times the clean positions that a rank computes.
        home: R times the clean positions of the corrupted rows that a rank computes.
        moved: R times those of them that were moved to it, see `away`; none in mode CP.
        moved_fraction: of the corrupted rows.
        worst: work of the worst rank over the mean.
        worst_unmoved: the same if no unit were moved.
        loads: float64[R], work of each rank over the mean.
    """

    documents: Spans
    clean: list[Spans]
    home: list[Spans]
    moved: list[Spans]
    moved_fraction: float
    worst: float
    worst_unmoved: float
    loads: NDArray[np.float64]


def owners(plan: SequencePlan, sample: Sample) -> Owners:
    """Who has what of a row, and what of it was moved, beside a plan that moves nothing."""
    unmoved = make_plan(sample, replace(plan.options, max_imbalance=math.inf))
    ranks, units = plan.options.slot, plan.units
    clean: list[Spans] = []
    home: list[Spans] = []
    moved: list[Spans] = []
    rows = 0
    gone = away(plan, unmoved)
    for rank in range(ranks):
        start, stop = plan.clean_runs.spans(rank)
        clean.append(list(zip(start.tolist(), stop.tolist(), strict=True)))
        if plan.options.splits_units:
            home.append(_of_places(plan, rank))
            moved.append([])
            continue
        stays, came = (plan.unit_owner == rank) & ~gone, (plan.unit_owner == rank) & gone
        home.append(_touching(units.start[stays], units.stop[stays]))
        moved.append(_touching(units.start[came], units.stop[came]))
        rows += int((units.stop - units.start)[came].sum())
    return Owners(
        documents=[(a, b) for a, b, document in spans(sample.document) if document >= 0],
        clean=clean,
        home=home,
        moved=moved,
        moved_fraction=rows / max(1, int(units.offset[-1])),
        worst=_worst(plan),
        worst_unmoved=_worst(unmoved),
        loads=plan.cost / max(1.0, float(plan.cost.mean())),
    )


def away(plan: SequencePlan, unmoved: SequencePlan) -> NDArray[np.bool_]:
    """bool[U]: units that are not on the rank of their clean chunk.

    Where chunks are those of the plan that moves nothing, that plan tells. Where they are cut anew,
    a unit is away if another rank of its group has the clean rows of its block; of a block whose
    clean rows nobody needs that cannot be told, and it is not.
    """
    same = all(
        np.array_equal(getattr(plan.clean_runs, name), getattr(unmoved.clean_runs, name))
        for name in ("start", "stop", "rank")
    )
    if same or plan.options.splits_units:
        gone: NDArray[np.bool_] = plan.unit_owner != unmoved.unit_owner
        return gone
    size = plan.options.context_parallel_size
    found = np.zeros(len(plan.units), np.bool_)
    runs = plan.clean_runs
    for start, stop, rank in zip(runs.start, runs.stop, runs.rank, strict=True):
        inside = (plan.units.start >= start) & (plan.units.start < stop)
        group = plan.unit_owner // size == rank // size
        found |= inside & group & (plan.unit_owner != rank)
    return found


def _worst(plan: SequencePlan) -> float:
    return float(plan.cost.max() / max(1.0, float(plan.cost.mean())))


def _of_places(plan: SequencePlan, rank: int) -> Spans:
    """Clean positions of a rank's corrupted rows where units are split."""
    found: Spans = []
    offset, units = plan.units.offset, plan.units
    for start, stop in zip(*plan.corrupted_runs.spans(rank), strict=True):
        first = int(np.searchsorted(offset, start, side="right")) - 1
        last = int(np.searchsorted(offset, stop, side="left"))
        lo = units.start[first:last].copy()
        hi = units.stop[first:last].copy()
        lo[0] += start - offset[first]
        hi[-1] -= offset[last] - stop
        found += _touching(lo, hi)
    return found


def _touching(start: NDArray[np.int32], stop: NDArray[np.int32]) -> Spans:
    """Ascending intervals, joined where they touch or, in several copies, are the same."""
    found: Spans = []
    for lo, hi in zip(start.tolist(), stop.tolist(), strict=True):
        if found and lo <= found[-1][1]:
            found[-1] = found[-1][0], max(hi, found[-1][1])
        else:
            found.append((lo, hi))
    return found


def paint(figure: Any, shown: Owners, title: str) -> None:
    """The picture, on an empty figure."""
    from matplotlib.patches import Patch

    ranks, length = len(shown.clean), shown.documents[-1][1] if shown.documents else 1
    axes = figure.subplots()
    for number, (start, stop) in enumerate(shown.documents):
        grey = "#B8B8B8" if number % 2 else "#808080"
        axes.broken_barh([(start, stop - start)], (-0.95, 0.4), facecolor=grey)
    for rank in range(ranks):
        colour = picture.of_rank(rank)
        lanes = (
            (shown.clean[rank], 0.0, {"facecolor": colour}),
            (shown.home[rank], 0.42, {"facecolor": picture.tint(colour)}),
            (
                shown.moved[rank],
                0.42,
                {"facecolor": picture.tint(colour), "hatch": "//////", "edgecolor": "#000000"},
            ),
        )
        for held, at, look in lanes:
            bars = [(start, stop - start) for start, stop in held]
            axes.broken_barh(bars, (rank + at, 0.4), **{"linewidth": 0, **look})
        axes.text(
            length * 1.01,
            rank + 0.4,
            f"{shown.loads[rank]:.2f}",
            va="center",
            ha="left",
            fontsize=8,
        )
    axes.text(length * 1.01, -0.75, "work / mean", va="center", ha="left", fontsize=8)
    axes.set(xlim=(0, length), ylim=(ranks, -1.1), xlabel="position in the packed row, tokens")
    axes.set_yticks(
        [-0.75, *(rank + 0.4 for rank in range(ranks))],
        ["documents", *(f"rank {rank}" for rank in range(ranks))],
    )
    axes.tick_params(axis="y", length=0)
    if length % 8192 == 0:
        axes.set_xticks(range(0, length + 1, length // 8))
    axes.xaxis.set_major_formatter(picture.tokens)
    axes.spines["left"].set_visible(False)
    figure.suptitle(title)
    dark, light = "#606060", "#D0D0D0"
    handles = [
        Patch(facecolor=dark, label="clean rows (upper half of a lane)"),
        Patch(facecolor=light, label="corrupted rows (lower half)"),
    ]
    if any(shown.moved):
        came: dict[str, Any] = {"facecolor": light, "edgecolor": "#000000", "hatch": "//////"}
        handles.append(Patch(label="moved here for balance", linewidth=0, **came))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


def title_of(shown: Owners, sample: Sample, name: str) -> str:
    """What the picture tells."""
    ranks = len(shown.clean)
    text = f"{name}: {ranks} ranks share {told(sample)}\n"
    if shown.moved_fraction:
        return text + (
            f"{shown.moved_fraction:.0%} of the corrupted rows move: the worst rank has "
            f"{shown.worst:.2f} times the mean work, not {shown.worst_unmoved:.2f}"
        )
    return text + f"no unit moves: the worst rank has {shown.worst:.2f} times the mean work"


def draw(plan: SequencePlan, sample: Sample, name: str, prefix: str | Path) -> list[Path]:
    """PREFIX.png and PREFIX.svg of a plan in the mode of that name."""
    shown = owners(plan, sample)
    lane = 0.34 if len(shown.clean) <= 16 else 0.17
    with picture.drawn(prefix, 1.8 + lane * (len(shown.clean) + 1)) as figure:
        paint(figure, shown, title_of(shown, sample, name))
    return picture.files(prefix)
