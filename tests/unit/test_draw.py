"""The data behind the pictures, their looks, and their files."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from megatron_bp import picture
from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.planning.counts import options_of
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.shape import Attention, Layer, Mlp, Shape
from megatron_bp.planning.task import Task
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.tools.draw import cost, exchanged, mask, owners, scaling
from megatron_bp.tools.draw.__main__ import main
from megatron_bp.tools.draw.rows import described, random_lengths, told
from megatron_bp.tools.draw.sample import attention_kinds, draw_sample
from megatron_bp.training import loss_curve

# The worked example of docs/parallelism.md: 24 tokens, blocks of 4, CSBP on 2 ranks, none moved.
# Rank 0 has blocks 0, 4 and 5, rank 1 those between; no unit sees the clean rows of block 5.
ROW = described("24")
CSBP = SequenceOptions(4, 2, 2, row_cost=10, max_imbalance=math.inf)
# 6 tokens, blocks of 3, CP on 2 ranks: the rows 0' to 5', 0, 1, 2 are cut after 2, 4 and 6 of them.
SIX = described("6")
CP = SequenceOptions(3, 1, 2)


def plan_of(options: SequenceOptions = CSBP) -> SequencePlan:
    return make_plan(ROW if options.block_size == 4 else SIX, options)


def letters(cells: Any) -> list[str]:
    return ["".join(".OCRX"[cell] for cell in row) for row in cells]


def test_the_mask_of_the_worked_example() -> None:
    shown = mask.mask(plan_of(), ROW)
    assert shown.owner.tolist() == [0] * 4 + [1] * 12 + [0] * 4 + [-1] * 4 + (
        [0] * 4 + [1] * 12 + [0] * 8
    )
    assert letters(shown.cells[::4, ::4]) == [  # rows are blocks here: all of a block see the same
        "C...........",
        "RC..........",
        "RCC.........",
        "RCCC........",
        "CRRRC.......",
        "............",
        "......O.....",
        "R......O....",
        "RC......O...",
        "RCC......O..",
        "CRRR......O.",
        "CRRRC......O",
    ]
    whole = np.repeat(np.repeat(shown.cells[::4, ::4], 4, 0), 4, 1)
    assert np.array_equal(whole, shown.cells)
    assert (shown.clean, shown.step) == (24, 1)
    assert not shown.prompt.any()


def test_the_mask_of_mode_cp_cuts_units() -> None:
    shown = mask.mask(plan_of(CP), SIX)
    assert shown.owner.tolist() == [0, 0, 0, -1, -1, -1, 0, 0, 1, 1, 1, 1]
    assert letters(shown.cells) == [
        *(["CCC........."] * 3),
        *(["............"] * 3),
        *(["......OOX..."] * 2),
        "......XXO...",
        *(["RRR......OOO"] * 3),
    ]


def test_prompts_have_no_corrupted_rows() -> None:
    sample = described("4,4+2")
    shown = mask.mask(make_plan(sample, SequenceOptions(2)), sample)
    assert shown.prompt.tolist() == [False] * 4 + [True] * 4 + [False] * 2
    assert shown.document.tolist() == [0] * 4 + [1] * 6 + [0] * 4 + [1] * 2


def test_of_a_long_row_some_rows_are_shown() -> None:
    sample = random_lengths(600, 5, 1)
    plan = make_plan(sample, SequenceOptions(8, 4, 4))
    whole, some = mask.mask(plan, sample, 40, most=1200), mask.mask(plan, sample, 40, most=200)
    rows = [*range(0, 600, 6), *range(600, 1200, 6)]
    assert (whole.step, some.step) == (1, 6)
    assert np.array_equal(some.cells, whole.cells[np.ix_(rows, rows)])
    assert some.owner.tolist() == whole.owner[rows].tolist()


@pytest.mark.parametrize("window", [None, 6])
def test_pairs_that_cross_ranks_are_counted_whole(window: int | None) -> None:
    cells = mask.mask(plan_of(), ROW, window).cells
    remote = np.count_nonzero(cells >= mask.REMOTE) / np.count_nonzero(cells)
    assert mask.crossing(plan_of(), window) == pytest.approx(remote)
    assert remote > 0
    title = mask.title_of(plan_of(), mask.mask(plan_of(), ROW), "CSBP", None)
    # Of 36 pairs of blocks that see each other above, 15 lie on two ranks.
    assert title.startswith("CSBP, 2 ranks, blocks of 4: only clean keys cross ranks (42% of")


def test_cells_are_painted_in_the_colour_of_the_rows_rank() -> None:
    shown = mask.mask(plan_of(), ROW)
    pixels = mask.image(shown)
    size = len(pixels) // len(shown.owner)

    def colours(row: int, key: int) -> set[str]:
        cell = pixels[row * size : (row + 1) * size, key * size : (key + 1) * size]
        return {"#{:02X}{:02X}{:02X}".format(*pixel) for pixel in cell.reshape(-1, 3)}

    assert colours(0, 0) == {picture.BLUE}
    assert colours(4, 4) == {picture.ORANGE}
    assert colours(4, 0) == {picture.ORANGE, picture.tint(picture.ORANGE)}
    assert colours(0, 4) == {"#FFFFFF"}


def test_owners_of_the_worked_example() -> None:
    plan = plan_of()
    shown = owners.owners(plan, ROW)
    assert shown.documents == [(0, 24)]
    assert shown.clean == [[(0, 4), (16, 20)], [(4, 16)]]
    assert shown.home == [[(0, 4), (16, 24)], [(4, 16)]]
    assert (shown.moved, shown.moved_fraction) == ([[], []], 0)
    owner = plan.unit_owner.copy()
    owner[1] = 0  # the unit of tokens 4 to 7 moves
    shown = owners.owners(dataclasses.replace(plan, unit_owner=owner), ROW)
    assert shown.home == [[(0, 4), (16, 24)], [(8, 16)]]
    assert shown.moved == [[(4, 8)], []]
    assert shown.moved_fraction == pytest.approx(4 / 24)
    title = owners.title_of(shown, ROW, "CSBP")
    assert "2 ranks share 24 tokens in one document\n17% of the corrupted rows move" in title


def test_units_away_where_chunks_are_cut_anew() -> None:
    plan = plan_of()
    other = dataclasses.replace(plan.clean_runs, stop=plan.clean_runs.stop + 1)
    unmoved = dataclasses.replace(plan, clean_runs=other, unit_owner=1 - plan.unit_owner)
    assert owners.away(plan, unmoved).tolist() == [False] * 6
    owner = np.array([1, 1, 1, 1, 0, 1], np.int32)  # nobody has clean rows of the last block
    found = owners.away(dataclasses.replace(plan, unit_owner=owner), unmoved)
    assert found.tolist() == [True] + [False] * 5
    assert owners.away(plan, dataclasses.replace(plan, unit_owner=owner)).tolist() == [
        *([True] + [False] * 4),
        True,
    ]


def test_owners_of_mode_cp() -> None:
    shown = owners.owners(plan_of(CP), SIX)
    assert shown.clean == [[(0, 3)], []]
    assert shown.home == [[(0, 2)], [(2, 6)]]
    assert shown.moved == [[], []]


def test_cost_by_part() -> None:
    # Rows of block i see 4 (i + 1) keys, clean or corrupted, and cost 10 beside that.
    found = cost.parts(plan_of(), "CSBP")
    assert found.clean.tolist() == [4 * (14 + 30), 4 * (18 + 22 + 26)]
    assert found.corrupted.tolist() == [4 * (14 + 30 + 34), 4 * (18 + 22 + 26)]
    assert found.worst == pytest.approx(528 / 508)
    assert cost.of_one(ROW, CSBP) == 488 + 528
    modes = cost.by_mode(ROW, 2, CSBP)
    assert [mode.mode for mode in modes] == ["CSBP", "CSBP, no moves", "CP", "BP"]
    plan, sample = long_row()
    moved, unmoved = cost.by_mode(sample, 8, plan.options)[:2]
    assert (moved.clean + moved.corrupted).tolist() == plan.cost.tolist()
    stays = make_plan(sample, dataclasses.replace(plan.options, max_imbalance=math.inf))
    assert (unmoved.clean + unmoved.corrupted).tolist() == stays.cost.tolist()
    assert unmoved.worst > moved.worst


HEADS = Attention(2, 2, 8)  # K|V of a row in bfloat16: 64 B


def test_bytes_of_the_worked_example() -> None:
    def sent(window: int | None, **layout: Any) -> list[int]:
        asked = Layout(**layout)
        plan = make_plan(ROW, options_of(CSBP, asked))
        return exchanged.of_form(plan, asked, HEADS, (window,))[window].tolist()

    def form(name: Any) -> ExchangeOptions:
        return ExchangeOptions(name)

    csbp = {"bp": 2, "cp": 2}
    assert sent(None, **csbp, exchange=form("all_gather")) == [12 * 64 * 3] * 2
    # Rank 0 lacks 12 rows, rank 1 lacks 4; K|V go twice, gradients once, the other way.
    needed = form("needed_rows")
    assert sent(None, **csbp, exchange=needed) == [(4 * 2 + 12) * 64, (12 * 2 + 4) * 64]
    # With a window of 2 each lacks the row before its chunk: rank 0 row 15, rank 1 row 3.
    assert sent(2, **csbp, exchange=needed) == [3 * 64] * 2
    assert sent(None, cp=2, exchange=form("all_gather")) == [22 * 64 * 3] * 2
    # Over heads: 22 rows of Q, K and V of one head there, and outputs of 22 rows back, twice.
    assert sent(None, cp=2, over_heads=True) == [(22 * 3 + 22) * 8 * 2 * 2] * 2
    assert sent(None, bp=2) == [0, 0]


def test_forms_that_heads_allow() -> None:
    assert "CP, a2a" in exchanged.layouts(4, Attention(8, 2, 8))
    assert "CP, a2a" not in exchanged.layouts(4, Attention(6, 2, 8))
    assert "hybrid, CP 4, ring" in exchanged.layouts(8, HEADS)
    assert {layout.slot for layout in exchanged.layouts(8, HEADS).values()} == {8}
    assert exchanged.layouts(2, HEADS, 2)["BP"] == Layout(tp=2, bp=2)


def test_kinds_of_attention() -> None:
    sliding, full = Attention(4, 2, 8, window=16, norms=True), Attention(4, 1, 16)
    both = Attention(4, 2, 8)
    layers = tuple(Layer(a, Mlp(16)) for a in (sliding, full, both, None))
    task = Task(Shape("s", 32, 64, True, layers), CSBP, 24)
    assert attention_kinds(task) == {both: (None, 16), full: (None,)}


def train(*losses: float | None) -> list[dict[str, Any]]:
    return [{"kind": "train", "iteration": i + 1, "loss": x} for i, x in enumerate(losses)]


def evaluation(step: int, bound: float, error: float | None, unit: str) -> dict[str, Any]:
    name = f"bound_bits_per_{unit}"
    return {"kind": "validation", "iteration": step, "loss": 1.0, name: bound} | {
        f"{name}_error": error
    }


def test_smoothed_is_a_mean_of_the_last() -> None:
    assert loss_curve.smoothed(np.array([1.0, 2.0, 3.0, 6.0]), 2).tolist() == [1, 1.5, 2.5, 4.5]


def test_curves_of_metrics() -> None:
    rows = [
        *train(3.0, None, 2.0),
        evaluation(3, 5.0, None, "byte"),
        evaluation(3, 4.0, 0.5, "byte"),
    ]
    found = loss_curve.curve(rows, "train", "loss")
    assert (found.step.tolist(), found.value.tolist()) == ([1, 3], [3, 2])
    axis, curves = loss_curve.validation({"a": rows})
    assert axis == "validation bound, bits/byte"
    assert (curves["a"].value.tolist(), curves["a"].error.tolist()) == ([4], [0.5])
    # A run that knows no bytes: what both have. One that was never evaluated takes no part.
    other = [*train(1.0), evaluation(1, 6.0, None, "token") | {"standard_error": 0.25}]
    axis, curves = loss_curve.validation({"a": rows, "b": other, "c": train(1.0)})
    assert axis == "validation loss, nats/token"
    assert curves["b"].error.tolist() == [0.25]
    assert set(curves) == {"a", "b"}
    assert loss_curve.validation({"c": train(1.0)}) == ("", {})


def test_the_papers_ratios() -> None:
    # 22,152 / 20,092 of Nemotron at 64K, and 9,815 / 6,079 of DiffusionGemma at 512K.
    assert scaling.paper_title().startswith("CSBP is 1.10 to 1.61 times as fast")


def test_predicted_series() -> None:
    text = {"Nemotron 14B": {"CSBP, predicted": [[65536, 2e4]]}, "other": {"x": [[1024, 5]]}}
    panels = scaling.together(scaling.PAPER, scaling.series_of(text))
    assert list(panels) == [*scaling.PAPER, "other"]
    assert [s.measured for s in panels["Nemotron 14B"]] == [True, True, False]
    assert panels["other"] == [scaling.Series("x", ((1024, 5.0),), measured=False)]
    with pytest.raises(ValueError, match="predicted series are"):
        scaling.series_of({"m": {"x": [3]}})
    with pytest.raises(ValueError, match="a point in each series"):
        scaling.draw_scaling({"m": [scaling.Series("x", (), True)]}, "", "never")


def test_rows_to_draw() -> None:
    sample = described("3,2+1", 8)
    assert sample.document.tolist() == [0, 0, 0, 1, 1, 1, -1, -1]
    assert sample.supervised.tolist() == [True] * 3 + [False] * 2 + [True] + [False] * 2
    assert told(sample) == "6 tokens in 2 documents"
    for wrong in ("3,x", "3,,4", "+3", "3+"):
        with pytest.raises(ValueError, match="is neither tokens nor PROMPT"):
            described(wrong)
    with pytest.raises(ValueError, match="--random 0: must be from 1 to --length 8"):
        random_lengths(8, 0, 0)


def test_names_of_numbers_of_tokens() -> None:
    told = [picture.tokens(value) for value in (0, 1000, 1024, 65536, 2**20)]
    assert told == ["0", "1,000", "1K", "64K", "1,024K"]


def long_row() -> tuple[SequencePlan, Any]:
    sample = random_lengths(4096, 8, 2)
    return make_plan(sample, SequenceOptions(32, 8, 8, row_cost=300)), sample


def forms() -> dict[str, list[exchanged.FormBytes]]:
    sample = random_lengths(1024, 3, 0)
    heads = Attention(8, 8, 8)
    asked = exchanged.layouts(8, heads)
    return {"a": exchanged.by_form(sample, SequenceOptions(8), asked, heads, (None, 32))}


RUNS = {
    "one": [*train(5.0, *np.linspace(4, 2, 30)), evaluation(31, 4.0, 0.5, "byte")],
    "other": [*train(4.0, 3.0), evaluation(2, 3.0, None, "byte")],
}
PICTURES: dict[str, tuple[float, Callable[[Any], None]]] = {
    "mask": (8.3, lambda f: mask.paint(f, mask.mask(plan_of(), ROW), "title")),
    "mask of CP": (8.3, lambda f: mask.paint(f, mask.mask(plan_of(CP), SIX), "title")),
    "mask of a long row": (8.3, lambda f: mask.paint(f, mask.mask(*long_row()), "title")),
    "owners": (4.7, lambda f: owners.paint(f, owners.owners(*long_row()), "title")),
    "cost": (5.1, lambda f: cost.paint(f, cost.by_mode(ROW, 2, CSBP), 1016, "title")),
    "bytes": (5.7, lambda f: exchanged.paint(f, forms(), "title")),
    "scaling": (3.8, lambda f: scaling.paint(f, scaling.PAPER, "title")),
    "loss": (5.4, lambda f: loss_curve.paint(f, RUNS)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_can_be_read(name: str) -> None:
    """No text is small, cut or covered by another; all colours are ours."""
    pytest.importorskip("matplotlib")
    height, paint = PICTURES[name]
    with picture.style():
        figure = picture.new(height)
        paint(figure)
        assert picture.flaws(figure) == []


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ({"x": 0.5, "y": 0.5, "s": "a", "fontsize": 7}, "'a' has 7 points"),
        ({"x": 0.99, "y": 0.5, "s": "a long text"}, "'a long text' is cut by the edge"),
        ({"x": 0.5, "y": 0.9, "s": "a"}, "'above' and 'a' overlap"),
        ({"x": 0.5, "y": 0.5, "s": "a", "color": "red"}, "#ff0000 is no colour of ours"),
    ],
)
def test_flaws_are_found(text: dict[str, Any], flaw: str) -> None:
    pytest.importorskip("matplotlib")
    with picture.style():
        figure = picture.new(3)
        figure.text(0.5, 0.9, "above")
        figure.text(**text)
        assert picture.flaws(figure) == [flaw]


def test_each_kind_is_written_as_png_and_svg(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(picture, "DPI", 20)
    run, predicted = tmp_path / "run", tmp_path / "predicted.json"
    run.mkdir()
    rows = "".join(f"{json.dumps(row)}\n" for row in RUNS["one"])
    (run / "metrics.jsonl").write_text(rows)
    predicted.write_text('{"Nemotron 14B": {"CSBP, predicted": [[65536, 20000], [131072, 15000]]}}')
    row = ["--documents", "22,8+6,18", "--block-size", "4"]
    for kind, *flags in (
        ["mask", *row, "--bp", "4", "--window", "8"],
        ["owners", *row, "--bp", "4", "--cp", "2"],
        ["cost", *row, "--ranks", "2"],
        ["bytes", "--length", "64", "--random", "2", "--block-size", "4", "--ranks", "2"],
        ["scaling", "--predicted", str(predicted)],
        ["loss", str(run)],
    ):
        prefix = tmp_path / "new" / kind
        main([kind, *flags, "--out", str(prefix)])
        assert capsys.readouterr().out == f"draw: {prefix}.png, {prefix}.svg\n"
        png, svg = (Path(f"{prefix}.{ending}").read_bytes() for ending in ("png", "svg"))
        assert png.startswith(b"\x89PNG")
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    main([kind, *flags, "--out", str(prefix)])
    assert Path(f"{prefix}.svg").read_bytes() == svg  # the same, whenever drawn


def test_all_pictures_of_a_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn = []

    @contextmanager
    def not_saved(prefix: Path, height: float) -> Iterator[Any]:
        with picture.style():
            yield picture.new(height)
        drawn.append(prefix)

    monkeypatch.setattr(picture, "drawn", not_saved)
    heads = Attention(4, 2, 8, window=16), Attention(4, 1, 16)
    shape = Shape("s", 32, 64, True, tuple(Layer(a, Mlp(16)) for a in heads))
    task = Task(shape, SequenceOptions(4), 64)
    files = draw_sample(task, Layout(bp=2, cp=2), described("40,24"), tmp_path / "deep" / "new")
    names = ["mask", "mask_window_16", "owners", "cost", "bytes", "bytes_2"]
    assert [file.name for file in files] == [f"{n}.{e}" for n in names for e in ("png", "svg")]
    assert drawn == [tmp_path / "deep" / "new" / name for name in names]
    # Of 2,000 tokens every 12th row is shown, and a window of 16 is no picture.
    files = draw_sample(task, Layout(), described("2000"), tmp_path)
    assert [file.stem for file in files[::2]] == ["mask", "owners"]


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as error:
        main(["mask", "--documents", "8", "--out", "never"])
    text = 'pictures need matplotlib, which is not installed: .venv/bin/pip install -e ".[plot]"'
    assert str(error.value) == f"draw: error: {text}"
    with pytest.raises(ImportError, match="pip install"):
        loss_curve.draw_losses(RUNS, "never")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["mask"], "which row? give --documents"),
        (["cost", "--length", "8", "--ranks", "1"], "--ranks 1: modes differ from 2 ranks on"),
        (["mask", "--length", "8", "--bp", "4", "--cp", "3"], "CP must be 1, BP or a divisor"),
        (["loss", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_drawn(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.setattr(picture, "need_matplotlib", lambda: None)
    with pytest.raises(SystemExit) as error:
        main([*flags, "--out", "never"])
    assert str(error.value).startswith("draw: error: ")
    assert message in str(error.value)


def test_a_run_without_steps() -> None:
    with pytest.raises(ValueError, match="empty: no training step with a loss"):
        loss_curve.draw_losses({"empty": [evaluation(1, 2.0, None, "byte")]}, "never")
