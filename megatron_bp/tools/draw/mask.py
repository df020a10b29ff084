"""Who sees whom and who owns what: the rows of a packed row against its keys.

From `SequencePlan` and `Visibility`, as training has them. Of a long row every so many rows and
keys are shown.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp import picture
from megatron_bp.planning import counts
from megatron_bp.planning.layout import Layout
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequencePlan
from megatron_bp.sequence.visibility import corrupted_positions, visibility

# What a cell shows: nothing is seen; a corrupted row of its own unit, held by the row's rank; a
# clean key held by it; a clean key of another rank; a corrupted key of another rank (mode CP).
UNSEEN, OWN, CLEAN, REMOTE, REMOTE_OWN = range(5)
_SIZE, _STROKE = 720, 6  # pixels of the image at least, and from one stroke of a hatch to the next
_STRIP, _GAP = 0.028, 0.006  # of the picture's cells: the strip of owners, the space around it
_PROMPT: dict[str, Any] = {"color": "#000000", "linewidth": 2.5, "solid_capstyle": "butt"}


@dataclass(frozen=True, eq=False)
class Mask:
    """What the picture shows (S of all clean positions, then S' of the corrupted rows).

    Attributes:
        cells: int8[S + S', S + S'], rows by keys: UNSEEN, OWN, ...
        owner: int32[S + S'], slot rank of each; of clean ones the lowest that computes it, -1 for
            none.
        document: int32[S + S'].
        block: int32[S + S'], clean or corrupted ones of one block have one number.
        prompt: bool[S], clean positions whose block has no corrupted rows.
        clean: S.
        step: every so many rows and keys are shown.
    """

    cells: NDArray[np.int8]
    owner: NDArray[np.int32]
    document: NDArray[np.int32]
    block: NDArray[np.int32]
    prompt: NDArray[np.bool_]
    clean: int
    step: int


def mask(plan: SequencePlan, sample: Sample, window: int | None = None, most: int = 360) -> Mask:
    """The mask of a packed row, all ranks together.

    Args:
        plan: of the row.
        sample: the row.
        window: of the layers that it is drawn for.
        most: rows that are shown at most.
    """
    used = int(np.count_nonzero(plan.block_of >= 0))
    corrupted = int(plan.units.offset[-1])
    step = -(-(used + corrupted) // most)
    positions = np.arange(0, used, step, dtype=np.int32)
    places = np.arange(0, corrupted, step, dtype=np.int64)
    v = visibility(plan, positions, places, window)
    lo, hi, own_lo, own_hi = (
        t.numpy()[:, None] for t in (v.clean_lo, v.clean_hi, v.own_lo, v.own_hi)
    )
    sees = np.hstack([(positions >= lo) & (positions < hi), (places >= own_lo) & (places < own_hi)])
    place_owner = np.zeros(corrupted, np.int32)
    for start, stop, rank in _runs(plan.corrupted_runs):
        place_owner[start:stop] = rank
    owner = np.concatenate([plan.scorer[positions], place_owner[places]])
    held = np.zeros((plan.options.slot, len(owner)), np.bool_)
    for start, stop, rank in _runs(plan.clean_runs):
        held[rank, : len(positions)] |= (positions >= start) & (positions < stop)
    held[place_owner[places], len(positions) + np.arange(len(places))] = True
    of_clean = np.arange(len(owner)) < len(positions)
    kind = np.where(
        held[owner], np.where(of_clean, CLEAN, OWN), np.where(of_clean, REMOTE, REMOTE_OWN)
    )
    at = np.concatenate([positions, corrupted_positions(plan)[places]])
    target = np.isin(np.arange(len(plan.block_start)), plan.unit_block)
    return Mask(
        cells=np.where(sees & (owner >= 0)[:, None], kind, UNSEEN).astype(np.int8),
        owner=owner,
        document=sample.document[at],
        block=plan.block_of[at],
        prompt=~target[plan.block_of[positions]],
        clean=len(positions),
        step=step,
    )


def _runs(runs: Any) -> Any:
    return zip(runs.start, runs.stop, runs.rank, strict=True)


def spans(values: NDArray[Any]) -> list[tuple[int, int, int]]:
    """(start, stop, value) of each run of equal values."""
    if len(values) == 0:
        return []
    first = np.flatnonzero(np.append(True, np.diff(values) != 0))
    return [
        (int(a), int(b), int(values[a]))
        for a, b in zip(first, np.append(first[1:], len(values)), strict=True)
    ]


def image(shown: Mask) -> NDArray[np.uint8]:
    """uint8[pixels, pixels, 3]: cells in the colour of the row's rank; keys of others hatched."""
    count = len(shown.owner)
    full = np.array([_rgb(picture.of_rank(max(0, rank))) for rank in shown.owner])
    light = np.array([_rgb(picture.tint(picture.of_rank(max(0, r)))) for r in shown.owner])
    remote = np.isin(shown.cells, (REMOTE, REMOTE_OWN))
    colour = np.where(remote[..., None], light[:, None], full[:, None])
    colour[shown.cells == UNSEEN] = 255
    size = -(-_SIZE // count)  # of a cell
    pixels = np.repeat(np.repeat(colour, size, 0), size, 1).astype(np.uint8)
    at = np.arange(count * size)
    stroke = (at[:, None] + at[None, :]) % _STROKE == _STROKE - 1
    wide = np.repeat(np.repeat(remote, size, 0), size, 1) & stroke
    pixels[wide] = np.repeat(full, size, 0)[np.nonzero(wide)[0]]
    return pixels


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def paint(figure: Any, shown: Mask, title: str) -> None:
    """The picture, on an empty figure."""
    count, clean = len(shown.owner), shown.clean
    strip, gap = _STRIP * count, _GAP * count
    axes = figure.subplots()
    axes.imshow(image(shown), extent=(0, count, count, 0), interpolation="nearest")
    edge = 4 * strip + gap
    axes.set(xlim=(-edge, count), ylim=(count, -edge), aspect="equal")
    axes.set_axis_off()
    _lines(axes, shown)
    for of_rows in (True, False):
        _strip(axes, shown, of_rows, strip, gap)
        _documents(axes, shown, of_rows, strip, gap)
    for start, stop, name in ((0, clean, "clean"), (clean, count, "corrupted")):
        middle = (start + stop) / 2
        text = {"ha": "center", "va": "center", "fontweight": "bold"}
        axes.text(middle, -gap - 3.4 * strip, f"{name} keys", **text)
        axes.text(-gap - 3.4 * strip, middle, f"{name} rows", rotation=90, **text)
    figure.suptitle(title)
    figure.legend(
        handles=_legend(shown), loc="outside lower center", ncols=3, handlelength=1.6, fontsize=8.5
    )


def _lines(axes: Any, shown: Mask) -> None:
    """Edges of blocks, of documents, and between clean and corrupted."""
    count = len(shown.owner)
    if shown.step == 1:
        blocks = [stop for _, stop, _ in spans(shown.block)][:-1]
        for draw in (axes.hlines, axes.vlines):
            draw(blocks, 0, count, colors="#C8C8C8", linewidth=0.4)
    look = {"colors": "#505050", "linewidth": 0.8, "linestyles": "--"}
    if len(shown.document) and shown.document.max() > 8:
        look = {"colors": "#B0B0B0", "linewidth": 0.4}
    for low, high in ((0, shown.clean), (shown.clean, count)):
        for start, _, _ in spans(shown.document[low:high])[1:]:
            for draw in (axes.hlines, axes.vlines):
                draw(low + start, 0, count, **look)
    for place in (0, shown.clean, count):
        for draw in (axes.hlines, axes.vlines):
            draw(place, 0, count, colors="#000000", linewidth=1.1)


def _strip(axes: Any, shown: Mask, of_rows: bool, strip: float, gap: float) -> None:
    """Who owns each row, or key."""
    from matplotlib.patches import Rectangle

    # Clean and corrupted are told apart, so that no span crosses the line between them.
    number = shown.owner * 2 + (np.arange(len(shown.owner)) >= shown.clean)
    for start, stop, both in spans(number):
        rank = both // 2
        look: dict[str, Any] = {"facecolor": "#FFFFFF", "edgecolor": "#808080", "hatch": "xxxx"}
        look["linewidth"] = 0.3
        if rank >= 0:
            look = {"facecolor": picture.of_rank(rank), "edgecolor": "#FFFFFF", "linewidth": 0.3}
        corner: tuple[float, float] = (start, -gap - strip)
        size: tuple[float, float] = (stop - start, strip)
        if of_rows:
            corner, size = corner[::-1], size[::-1]
        axes.add_patch(Rectangle(corner, *size, **look))
        if rank >= 0 and stop - start >= 0.022 * len(shown.owner) * len(str(rank)):
            place = ((start + stop) / 2, -gap - strip / 2)
            axes.text(
                *(place[::-1] if of_rows else place),
                str(rank),
                ha="center",
                va="center_baseline" if not of_rows else "center",
                fontsize=8,
                color=picture.on(picture.of_rank(rank)),
            )


def _documents(axes: Any, shown: Mask, of_rows: bool, strip: float, gap: float) -> None:
    """Names of documents beside the strip, and a bar along each prompt."""
    count, at, bar = len(shown.owner), -gap - 2.2 * strip, -gap - 1.35 * strip
    for start, stop, prompt in spans(shown.prompt.astype(np.int8)):
        if prompt:
            along, across = (start + 0.2, stop - 0.2), (bar, bar)
            axes.plot(*((across, along) if of_rows else (along, across)), **_PROMPT)
    for low, high in ((0, shown.clean), (shown.clean, count)):
        for start, stop, document in spans(shown.document[low:high]):
            place = (low + (start + stop) / 2, at)
            fits = stop - start >= 0.13 * count
            if not fits and stop - start < 0.05 * count:
                continue
            axes.text(
                *(place[::-1] if of_rows else place),
                f"document {document}" if fits else f"doc. {document}",
                ha="center",
                va="center",
                rotation=90 if of_rows else 0,
                fontsize=8,
            )


def _legend(shown: Mask) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey, light = "#606060", "#D8D8D8"
    kinds = [
        (CLEAN, "clean key, held by the row's rank", {"facecolor": grey}),
        (OWN, "corrupted key, held by the row's rank", {"facecolor": grey}),
        (REMOTE, "clean key of another rank", _hatched(light, grey)),
        (REMOTE_OWN, "corrupted key of another rank", _hatched(light, grey)),
    ]
    there = [(text, look) for kind, text, look in kinds if (shown.cells == kind).any()]
    if (shown.cells == CLEAN).any() and (shown.cells == OWN).any():
        held = ("key that the row's rank holds", {"facecolor": grey})
        there = [held, *(pair for pair in there if pair[1] != held[1])]
    there.append(("not seen", {"facecolor": "#FFFFFF", "edgecolor": "#808080"}))
    if (shown.owner < 0).any():
        text = "computed by no rank"
        look = {"facecolor": "#FFFFFF", "edgecolor": "#808080", "hatch": "xxxx"}
        there.append((text, look))
    handles: list[Any] = [Patch(label=text, **look) for text, look in there]
    if shown.prompt.any():
        handles.append(Line2D([], [], label="prompt: no corrupted rows", **_PROMPT))
    return handles


def _hatched(face: str, edge: str) -> dict[str, Any]:
    return {"facecolor": face, "edgecolor": edge, "hatch": "/////", "linewidth": 0}


def crossing(plan: SequencePlan, window: int | None) -> float:
    """The part of all visible pairs whose key another rank holds, each rank's pairs counted."""
    asked = plan.options
    layout = Layout(
        bp=asked.block_parallel_size, cp=asked.context_parallel_size, aligned=asked.align_chunks
    )
    ranks = counts.count(plan, layout, (window,)).ranks
    pairs = sum(rank.pairs[window] for rank in ranks)
    return 1 - sum(rank.local_pairs[window] for rank in ranks) / max(1, pairs)


def title_of(plan: SequencePlan, shown: Mask, name: str, window: int | None) -> str:
    """What the picture tells."""
    remote = crossing(plan, window)
    what = "clean and corrupted keys" if plan.options.splits_units else "only clean keys"
    crosses = f"{what} cross ranks ({100 * remote:.2g}% of the pairs)"
    layers = "" if window is None else f", window of {picture.tokens(window)}"
    every = "" if shown.step == 1 else f"; one row and key of {shown.step:,} is shown"
    slot = plan.options.slot
    ranks = "1 rank" if slot == 1 else f"{slot} ranks"
    size = f"blocks of {plan.options.block_size:,}{layers}"
    found = crosses if remote else "no key crosses ranks"
    return f"{name}, {ranks}, {size}: {found}\nNumbers in the strips are ranks{every}"


def draw(
    plan: SequencePlan, sample: Sample, name: str, window: int | None, prefix: str | Path
) -> list[Path]:
    """PREFIX.png and PREFIX.svg of a plan in the mode of that name."""
    shown = mask(plan, sample, window)
    with picture.drawn(prefix, picture.WIDTH + 0.9) as figure:
        paint(figure, shown, title_of(plan, shown, name, window))
    return picture.files(prefix)
