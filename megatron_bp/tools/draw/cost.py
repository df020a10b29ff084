"""Planned work of each rank of a packed row, mode by mode: its clean and its corrupted part."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp import picture
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.sequence.visibility import visibility
from megatron_bp.tools.draw.rows import told
from megatron_bp.tools.modes import degrees

_LOOKS = (
    {"facecolor": picture.BLUE, "edgecolor": "#FFFFFF"},
    {"facecolor": picture.ORANGE, "edgecolor": "#FFFFFF", "hatch": "////"},
)


@dataclass(frozen=True, eq=False)
class ModeCost:
    """Work of the R ranks of a slot in one mode, in visible pairs.

    Attributes:
        mode: its name.
        clean: int64[R], of clean rows.
        corrupted: int64[R], of corrupted ones.
    """

    mode: str
    clean: NDArray[np.int64]
    corrupted: NDArray[np.int64]

    @property
    def worst(self) -> float:
        """Work of the worst rank over the mean."""
        work = self.clean + self.corrupted
        return float(work.max() / max(1.0, float(work.mean())))


def parts(plan: SequencePlan, mode: str) -> ModeCost:
    """A plan's cost by part; both together are `plan.cost`."""
    nothing = np.zeros(0, dtype=np.int32)
    clean = []
    for rank in range(plan.options.slot):
        rows = plan.clean_positions(rank)
        pairs = visibility(plan, rows, nothing.astype(np.int64)).pairs()
        clean.append(pairs + plan.options.row_cost * len(rows))
    of_clean = np.array(clean, dtype=np.int64)
    return ModeCost(mode, of_clean, plan.cost - of_clean)


def by_mode(sample: Sample, ranks: int, options: SequenceOptions) -> list[ModeCost]:
    """All modes that so many ranks can work in, and CSBP without any move.

    Args:
        sample: the packed row.
        ranks: of the slot, 2 or more.
        options: their degrees are not looked at.
    """
    found = []
    for mode, (bp, cp) in degrees(ranks).items():
        own = replace(options, block_parallel_size=bp, context_parallel_size=cp, align_chunks=False)
        found.append(parts(make_plan(sample, own), mode))
        if mode == "CSBP":
            unmoved = replace(own, max_imbalance=math.inf)
            found.append(parts(make_plan(sample, unmoved), "CSBP, no moves"))
    return found


def of_one(sample: Sample, options: SequenceOptions) -> int:
    """Work of a single rank that has the whole row."""
    single = replace(options, block_parallel_size=1, context_parallel_size=1, align_chunks=False)
    return int(make_plan(sample, single).cost.sum())


def paint(figure: Any, modes: list[ModeCost], one: int, title: str) -> None:
    """The picture, on an empty figure.

    Args:
        figure: empty.
        modes: a panel each.
        one: work of a single rank that has it all.
        title: above all panels.
    """
    ranks = len(modes[0].clean)
    even = one / ranks
    columns = min(3, len(modes))
    grid = figure.subplots(
        -(-len(modes) // columns), columns, sharex=True, sharey=True, squeeze=False
    )
    for axes in grid.flat[len(modes) :]:
        axes.set_axis_off()
    for axes, mode in zip(grid.flat, modes, strict=False):
        at = np.arange(ranks)
        clean, corrupted = mode.clean / even, mode.corrupted / even
        axes.bar(at, clean, width=0.8, label="clean rows", linewidth=0.5, **_LOOKS[0])
        axes.bar(
            at,
            corrupted,
            width=0.8,
            bottom=clean,
            label="corrupted rows",
            linewidth=0.5,
            **_LOOKS[1],
        )
        mean = float((clean + corrupted).mean())
        axes.axhline(mean, color="#000000", linestyle="--", linewidth=1.2, label="mean of ranks")
        axes.set_title(f"{mode.mode}: worst / mean {mode.worst:.2f}")
        axes.set_xticks(at if ranks <= 8 else at[:: -(-ranks // 8)])
        axes.grid(axis="y")
        axes.tick_params(labelbottom=True)
    for axes in grid[:, 0]:
        axes.set_ylabel("work / even share")
    for axes in grid[-1]:
        axes.set_xlabel("rank")
    figure.suptitle(title)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)


def title_of(modes: list[ModeCost], one: int, sample: Sample) -> str:
    """What the picture tells."""
    work = {mode.mode: int((mode.clean + mode.corrupted).max()) for mode in modes}
    best, worst = min(work, key=lambda m: work[m]), max(work, key=lambda m: work[m])
    return (
        f"Planned work of {told(sample)}: {one / work[best]:.1f} times as fast as one rank\n"
        f"in mode {best}, {one / work[worst]:.1f} times in mode {worst}"
    )


def draw(sample: Sample, ranks: int, options: SequenceOptions, prefix: str | Path) -> list[Path]:
    """PREFIX.png and PREFIX.svg of all modes of so many ranks."""
    modes, one = by_mode(sample, ranks, options), of_one(sample, options)
    with picture.drawn(prefix, 1.3 + 1.9 * -(-len(modes) // 3)) as figure:
        paint(figure, modes, one, title_of(modes, one, sample))
    return picture.files(prefix)
