"""Tokens/s against context: what was measured as markers, what is predicted as lines.

Takes plain series, wherever they come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bp import picture

K = 1024


@dataclass(frozen=True)
class Series:
    """Tokens/s at several contexts.

    Attributes:
        name: of what it is, as the legend says it.
        points: (tokens of a packed row, clean tokens/s counted once).
        measured: drawn as markers; else predicted, as a line.
    """

    name: str
    points: tuple[tuple[int, float], ...]
    measured: bool


def _pair(contexts: Sequence[int], cp: Sequence[float], csbp: Sequence[float]) -> list[Series]:
    names = ("best CP baseline", cp), ("CSBP", csbp)
    return [
        Series(
            f"{name}, measured by the paper's authors",
            tuple((context * K, value) for context, value in zip(contexts, values, strict=True)),
            measured=True,
        )
        for name, values in names
    ]


# The authors' project page for arXiv 2609.19242 (v1): 16 H200, blocks of 256.
PAPER: dict[str, list[Series]] = {
    "Nemotron 14B": _pair((64, 128, 256), (20092, 13114, 7884), (22152, 15136, 9301)),
    "DiffusionGemma 26B-A4B": _pair(
        (64, 128, 256, 512), (22154, 14584, 10557, 6079), (27653, 21049, 15359, 9815)
    ),
    "Qwen3.8-27B": _pair((64, 128, 256), (4697, 3742, 2623), (5905, 4853, 3490)),
}


def paint(figure: Any, panels: dict[str, list[Series]], title: str) -> None:
    """The picture, on an empty figure; series of one name look alike in all panels."""
    columns = min(3, len(panels))
    grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    names = list(dict.fromkeys(series.name for panel in panels.values() for series in panel))
    measured = {series.name for panel in panels.values() for series in panel if series.measured}
    looks = _looks(names, measured)
    handles: dict[str, Any] = {}
    for axes, (model, panel) in zip(grid.flat, panels.items(), strict=False):
        for series in panel:
            context, speed = zip(*sorted(series.points), strict=True)
            (handles[series.name],) = axes.plot(context, speed, **looks[series.name])
        contexts = sorted({x for series in panel for x, _ in series.points})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(contexts, [picture.tokens(context) for context in contexts])
        axes.set_yticks(_ticks([y for series in panel for _, y in series.points]))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.minorticks_off()
        axes.margins(0.1)
        axes.set_title(model)
        axes.grid()
        axes.set_xlabel("context, tokens")
    for axes in grid[:, 0]:
        axes.set_ylabel("clean tokens/s, all GPUs")
    figure.suptitle(title)
    figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=2)


def _looks(names: list[str], measured: set[str]) -> dict[str, dict[str, Any]]:
    """How each series looks: its colour is that of what stands before the first comma."""
    stems = list(dict.fromkeys(name.split(",")[0] for name in names))
    found = {}
    predicted = [name for name in names if name not in measured]
    for name in names:
        stem = stems.index(name.split(",")[0])
        look: dict[str, Any] = {"color": picture.COLOURS[stem % len(picture.COLOURS)]}
        if name in measured:
            marker = picture.MARKERS[stem % len(picture.MARKERS)]
            look |= {"linestyle": "", "marker": marker, "markersize": 6}
        else:
            line = picture.LINES[predicted.index(name) % len(picture.LINES)]
            look |= {"linestyle": line, "linewidth": 1.6}
        found[name] = look
    return found


def _ticks(values: list[float]) -> list[float]:
    """1, 1.5, 2, 3, 4, 5 and 7 times powers of ten within the values, stretched by a tenth."""
    ladder = [step * 10.0**power for power in range(-3, 10) for step in (1, 1.5, 2, 3, 4, 5, 7)]
    low, high = min(values) / 1.1, max(values) * 1.1
    return [tick for tick in ladder if low <= tick <= high]


def series_of(text: Any) -> dict[str, list[Series]]:
    """Predicted series from JSON: {model: {name: [[context, tokens/s], ...]}}.

    Raises:
        ValueError: it is not of that form.
    """
    try:
        return {
            str(model): [
                Series(str(name), tuple((int(x), float(y)) for x, y in points), measured=False)
                for name, points in panel.items()
            ]
            for model, panel in text.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"predicted series are {{model: {{name: [[context, tokens/s], ...]}}}}: {error}"
        ) from error


def together(*many: dict[str, list[Series]]) -> dict[str, list[Series]]:
    """The series of each model, in the order in which models come first."""
    models = dict.fromkeys(model for panels in many for model in panels)
    return {model: [s for panels in many for s in panels.get(model, [])] for model in models}


def draw_scaling(panels: dict[str, list[Series]], title: str, prefix: str | Path) -> list[Path]:
    """PREFIX.png and PREFIX.svg, a panel for each model.

    Raises:
        ValueError: a series has no point, or there is none.
    """
    if not panels or not all(s.points for panel in panels.values() for s in panel):
        raise ValueError("there must be a series for each model, and a point in each series")
    count = len({series.name for panel in panels.values() for series in panel})
    height = 0.8 + 2.5 * -(-len(panels) // 3) + 0.22 * -(-count // 2)
    with picture.drawn(prefix, height) as figure:
        paint(figure, panels, title)
    return picture.files(prefix)


def paper_title() -> str:
    """What the paper's own figures tell."""
    ratios = [
        csbp / cp
        for baseline, ours in PAPER.values()
        for (_, cp), (_, csbp) in zip(baseline.points, ours.points, strict=True)
    ]
    return (
        f"CSBP is {min(ratios):.2f} to {max(ratios):.2f} times as fast as the best CP baseline\n"
        "on 16 H200, as measured by the authors of arXiv 2609.19242"
    )
