"""Bytes that a rank sends in one layer, by mode and form of exchange, with a window and without."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_bp import picture
from megatron_bp.attention.exchange.choose import ExchangeOptions, Form
from megatron_bp.attention.exchange.count import over_heads, sending
from megatron_bp.planning.counts import options_of
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.shape import Attention
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.tools.draw.rows import told

_LOOKS = (
    {"facecolor": picture.BLUE, "edgecolor": "#FFFFFF"},
    {"facecolor": picture.ORANGE, "edgecolor": "#FFFFFF", "hatch": "////"},
)
# K|V come in the forward and again in the backward, their gradients go back; over heads everything
# goes once there and once back.
FETCHES, RETURNS, OVER_HEADS = 2, 1, 2


@dataclass(frozen=True, eq=False)
class FormBytes:
    """What the R ranks of a slot send in one layer of one micro-batch.

    Attributes:
        name: mode and form.
        sent: int64[R] of each window.
    """

    name: str
    sent: dict[int | None, NDArray[np.int64]]


def layouts(ranks: int, attention: Attention, tp: int = 1) -> dict[str, Layout]:
    """The modes and forms that so many ranks can work in, by name; 2 ranks or more."""
    found = {}
    forms: tuple[Form, ...] = ("all_gather", "needed_rows", "ring")
    inner = next((c for c in range(ranks - 1, 1, -1) if ranks % c == 0), None)
    modes = {"CSBP": ranks} | ({f"hybrid, CP {inner}": inner} if inner else {})
    for mode, cp in modes.items():
        for form in forms:
            exchange = ExchangeOptions(form)
            found[f"{mode}, {form}"] = Layout(bp=ranks, cp=cp, exchange=exchange)
    gather, ring = ExchangeOptions("all_gather"), ExchangeOptions("ring")
    found["CP, all_gather"] = Layout(cp=ranks, exchange=gather)
    found["CP, p2p"] = Layout(cp=ranks, exchange=ring)
    queries, keys = attention.query_heads // tp, max(1, attention.key_heads // tp)
    if queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0):
        found["CP, a2a"] = Layout(cp=ranks, over_heads=True)
    found["CP, clean_all_gather"] = Layout(cp=ranks, exchange=gather, aligned=True)
    found["BP"] = Layout(bp=ranks)
    return {name: replace(layout, tp=tp) for name, layout in found.items()}


def of_form(
    plan: SequencePlan, layout: Layout, attention: Attention, windows: tuple[int | None, ...]
) -> dict[int | None, NDArray[np.int64]]:
    """int64[R] of each window: what each rank sends in training, in bfloat16.

    Args:
        plan: made with `options_of(..., layout)`.
        layout: its exchange, TP and slot.
        attention: of the layer; its own window is not looked at.
        windows: to count for.
    """
    shards = tuple(plan.rows_of(rank) for rank in range(layout.slot))
    heads = attention.query_heads // layout.tp, max(1, attention.key_heads // layout.tp)
    dtype, row = torch.bfloat16, 2 * heads[1] * attention.head_dim
    found = {}
    for window in windows:
        sent = []
        for rank in range(layout.slot):
            if layout.over_heads:
                numbers = over_heads(shards, rank, *heads, attention.head_dim)
                sent.append(OVER_HEADS * numbers * dtype.itemsize)
                continue
            group = tuple(shards[peer] for peer in plan.shard_group(rank))
            there = sending(plan, group, rank, window, layout.exchange)
            sent.append(there.bytes(row, dtype, FETCHES, RETURNS))
        found[window] = np.array(sent, dtype=np.int64)
    return found


def by_form(
    sample: Sample,
    options: SequenceOptions,
    asked: dict[str, Layout],
    attention: Attention,
    windows: tuple[int | None, ...],
) -> list[FormBytes]:
    """What every layout that is asked for sends of a packed row."""
    plans: dict[SequenceOptions, SequencePlan] = {}
    found = []
    for name, layout in asked.items():
        own = options_of(replace(options, block_parallel_size=1, context_parallel_size=1), layout)
        plan = plans.get(own) or make_plan(sample, own)
        plans[own] = plan
        found.append(FormBytes(name, of_form(plan, layout, attention, windows)))
    return found


def paint(figure: Any, panels: dict[str, list[FormBytes]], title: str) -> None:
    """The picture, on an empty figure.

    Args:
        figure: empty.
        panels: what is sent of each packed row, by the row in words; the same forms in each.
        title: above all panels.
    """
    grid = figure.subplots(1, len(panels), sharey=True, sharex=True, squeeze=False)[0]
    first = next(iter(panels.values()))
    windows = tuple(first[0].sent)
    unit = _unit(
        max(int(s.max()) for forms in panels.values() for f in forms for s in f.sent.values())
    )
    height = 0.8 / len(windows)
    for axes, (row, forms) in zip(grid, panels.items(), strict=True):
        most_of_all = 0.0
        for k, window in enumerate(windows):
            at = np.arange(len(forms)) + (k - (len(windows) - 1) / 2) * height
            most = [float(form.sent[window].max()) / unit[0] for form in forms]
            mean = [float(form.sent[window].mean()) / unit[0] for form in forms]
            name = "no window" if window is None else f"window of {picture.tokens(window)} tokens"
            axes.barh(at, most, height, label=name, linewidth=0.5, **_LOOKS[k % 2])
            axes.plot(
                mean,
                at,
                linestyle="",
                marker="|",
                markersize=8,
                color="#000000",
                markeredgewidth=1.4,
                label="mean of ranks" if k == len(windows) - 1 else None,
            )
            for place, value in zip(at, most, strict=True):
                axes.annotate(
                    _told(value),
                    (value, place),
                    (3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            most_of_all = max(most_of_all, *most)
        axes.set_title(row)
        axes.set_xlabel(f"{unit[1]} sent by the rank that sends most")
        axes.grid(axis="x")
        axes.set_xlim(0, max(axes.get_xlim()[1], most_of_all * 1.2))
    grid[0].set_yticks(range(len(first)), [form.name for form in first])
    grid[0].set_ylim(len(first) - 0.4, -0.6)
    figure.suptitle(title)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)


def _unit(most: int) -> tuple[int, str]:
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if most >= size:
            return size, name
    return 1, "bytes"


def _told(value: float) -> str:
    if value == 0:
        return "0"
    digits = max(0, 1 - math.floor(math.log10(value)))
    return f"{value:,.{digits}f}"


def title_of(panels: dict[str, list[FormBytes]]) -> str:
    """What the picture tells: the best form of CSBP against the best of CP."""
    most = max(int(s.max()) for forms in panels.values() for f in forms for s in f.sent.values())
    size, name = _unit(most)
    found = []
    for row, forms in panels.items():
        csbp, cp = (
            min(int(next(iter(f.sent.values())).max()) for f in forms if f.name.startswith(mode))
            for mode in ("CSBP,", "CP,")
        )
        found.append(
            f"{_told(csbp / size)} and {_told(cp / size)} {name} ({row.split(' in ')[-1]})"
        )
    window = next(iter(next(iter(panels.values()))[0].sent))
    layers = "without a window" if window is None else f"with a window of {window:,}"
    return (
        f"What a rank sends in a layer {layers}, in the best form of CSBP and of CP:\n"
        + ", ".join(found)
    )


def draw(
    rows: list[Sample],
    options: SequenceOptions,
    asked: dict[str, Layout],
    attention: Attention,
    windows: tuple[int | None, ...],
    prefix: str | Path,
) -> list[Path]:
    """PREFIX.png and PREFIX.svg of one or two packed rows."""
    panels = {told(row): by_form(row, options, asked, attention, windows) for row in rows}
    with picture.drawn(prefix, 1.5 + 0.19 * len(windows) * len(asked)) as figure:
        paint(figure, panels, title_of(panels))
    return picture.files(prefix)
