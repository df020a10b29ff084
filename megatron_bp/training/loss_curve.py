"""Loss curves of runs from the rows of their metrics files: training loss, and bounds with errors.

Drawn by the run report and by `python -m megatron_bp.tools.draw loss`. No torch.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp import picture

Rows = list[dict[str, Any]]
# What of an evaluation is drawn, the first that all runs have: value, its error, the axis.
_VALIDATION = (
    ("bound_bits_per_byte", "bound_bits_per_byte_error", "validation bound, bits/byte"),
    ("bound_bits_per_token", "bound_bits_per_token_error", "validation bound, bits/token"),
    ("loss", "standard_error", "validation loss, nats/token"),
)


@dataclass(frozen=True, eq=False)
class Curve:
    """One line: values at steps, each with an error or NaN."""

    step: NDArray[np.int64]
    value: NDArray[np.float64]
    error: NDArray[np.float64]


def curve(rows: Rows, kind: str, value: str, error: str | None = None) -> Curve:
    """A field of the rows of a kind, by step; of several at a step the last, without nulls."""
    found = {
        row["iteration"]: (row[value], row.get(error) if error else None)
        for row in rows
        if row["kind"] == kind and row.get(value) is not None
    }
    steps = sorted(found)
    return Curve(
        np.array(steps, dtype=np.int64),
        np.array([found[step][0] for step in steps], dtype=np.float64),
        np.array(
            [math.nan if found[step][1] is None else found[step][1] for step in steps],
            dtype=np.float64,
        ),
    )


def smoothed(value: NDArray[np.float64], over: int) -> NDArray[np.float64]:
    """The mean of each value and up to `over` - 1 before it."""
    before = np.append(0.0, np.cumsum(value))
    stop = np.arange(1, len(value) + 1)
    start = np.maximum(0, stop - over)
    mean: NDArray[np.float64] = (before[stop] - before[start]) / (stop - start)
    return mean


def validation(runs: dict[str, Rows]) -> tuple[str, dict[str, Curve]]:
    """(what it is, curve of each run that has one): bits a byte where all that have any have it."""
    for value, error, axis in _VALIDATION:
        evaluated = {
            name: rows
            for name, rows in runs.items()
            if any(row["kind"] == "validation" for row in rows)
        }
        curves = {name: curve(rows, "validation", value, error) for name, rows in evaluated.items()}
        if curves and all(len(one.step) for one in curves.values()):
            return axis, curves
    return "", {}


def paint(figure: Any, runs: dict[str, Rows]) -> None:
    """The picture, on an empty figure: training above, validation below if there is any."""
    axis, bounds = validation(runs)
    train = {name: curve(rows, "train", "loss") for name, rows in runs.items()}
    grid = figure.subplots(1 + bool(bounds), 1, sharex=True, squeeze=False)[:, 0]
    looks = {name: picture.look(k) for k, name in enumerate(runs)}
    for name, one in train.items():
        over = max(1, len(one.step) // 25)
        look = looks[name]
        raw = {"color": picture.tint(look["color"]), "linewidth": 0.8}
        grid[0].plot(one.step, one.value, **raw, zorder=1)
        smooth = smoothed(one.value, over)
        shown = {key: look[key] for key in ("color", "linestyle")}
        grid[0].plot(one.step, smooth, linewidth=1.6, zorder=2, label=name, **shown)
    every = np.concatenate([one.value for one in train.values()])
    if len(every) > 20:  # the first steps are far above the rest
        low, high = float(every.min()), float(np.quantile(every, 0.99))
        grid[0].set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    grid[0].set_ylabel("training loss, nats/token")
    for name, one in bounds.items():
        error = np.where(np.isnan(one.error), 0, one.error)
        grid[1].errorbar(
            one.step, one.value, error, markersize=4, capsize=2.5, label=name, **looks[name]
        )
        grid[1].set_ylabel(axis)
    for axes in grid:
        axes.grid()
        axes.xaxis.get_major_locator().set_params(integer=True)
    grid[-1].set_xlabel("step (thin: each step; thick: mean of the last 4 %; bars: standard error)")
    figure.suptitle(title_of(train, axis, bounds))
    if len(runs) > 1:
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(runs)))


def title_of(train: dict[str, Curve], axis: str, bounds: dict[str, Curve]) -> str:
    """What the picture tells: where the run, or the best of several, ends."""
    curves = bounds or train
    last = {name: float(one.value[-1]) for name, one in curves.items() if len(one.step)}
    what, unit = (axis or "training loss, nats/token").split(", ")
    best = min(last, key=lambda name: last[name])
    if len(curves) > 1:
        return f"{what}, lowest at the end: {best} with {last[best]:.3f} {unit}"
    first = float(curves[best].value[0])
    return f"{what}: from {first:.3f} to {last[best]:.3f} {unit} at step {curves[best].step[-1]:,}"


def draw_losses(runs: dict[str, Rows], out: str | Path) -> list[Path]:
    """OUT.png and OUT.svg.

    Args:
        runs: rows of `metrics.jsonl` by the name of their run.
        out: path without its ending.

    Raises:
        ImportError: matplotlib is missing; its text says how to get it.
        ValueError: a run has no training step.
    """
    for name, rows in runs.items():
        if not any(row["kind"] == "train" and row.get("loss") is not None for row in rows):
            raise ValueError(
                f"{name}: no training step with a loss in its metrics; nothing to draw"
            )
    if not runs:
        raise ValueError("no run is given; name at least one")
    with picture.drawn(out, 5.4 if validation(runs)[1] else 3.4) as figure:
        paint(figure, runs)
    return picture.files(out)
