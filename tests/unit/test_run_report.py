"""The report of a run: its numbers from rows made by hand, its words, and that it fails no run."""

import contextlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from megatron_bp.tools.report import command, numbers, run, words
from megatron_bp.tools.report.page import Record, page
from megatron_bp.training import journal
from megatron_bp.training.journal import Journal, read_journal

SPEEDS = [10.0, 100.0, 200.0, 20.0, 300.0, 400.0]  # the first and the fourth come after a start


def train(step: int, **other: Any) -> dict[str, Any]:
    row = {
        "kind": "train",
        "iteration": step,
        "loss": 6.0 - step,
        "diffusion_loss": 6.0 - step,
        "diffusion_loss_sum": 1.0,
        "masked_fraction": 0.5,
        "clean_tokens": 1000,
        "bytes_sent": 3 << 20,
        "balance": 1.0 + step / 100,
        "memory_bytes": (step if step < 5 else 2) << 30,
        "seconds": 1000 / SPEEDS[step - 1],
        "clean_tokens_per_second": SPEEDS[step - 1],
        "learning_rate": 1e-3,
        "grad_norm": 0.25,
        "skipped": 0,
    }
    return row | other


def validation(step: int, loss: float, **other: Any) -> dict[str, Any]:
    row = {"kind": "validation", "iteration": step, "loss": loss, "standard_error": 0.125}
    row |= {"samples": 12, "draws": 2, "seconds": 4.0}
    row |= {"bound_bits_per_token": 2.5, "bound_bits_per_token_error": 0.0625}
    return row | other


def event(kind: str, minute: int, step: int, **other: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "time": f"2026-01-02T03:{minute:02}:00+00:00",
        "rank": 1,
        "step": step,
    } | (other)


PREDICTED = {"parameters": 1234567, "memory_bytes": 5 << 30, "attention_bytes": 4 << 20}
ROWS = [
    *(train(step) for step in (1, 2, 3)),
    validation(3, 4.0),
    train(4),
    train(5, skipped=1, loss=None),
    train(6),
    validation(6, 3.5),
    validation(6, 3.25, bound_bits_per_byte=1.75, bound_bits_per_byte_error=None),
]
JOURNAL = [
    event("start", 0, 0, train_iters=9, ranks=2, predicted=PREDICTED),
    event("began", 1, 0, iteration=1, again=0, seconds=0),
    event("warning", 2, 2, message="look out"),
    event("start", 5, 0, train_iters=8, ranks=4, hosts="2", device="cpu", predicted=PREDICTED),
    event("began", 6, 3, iteration=4, again=2, seconds=75.5),
    event("warning", 6, 4, message="look out"),
    event("end", 8, 6, how="it was told to stop"),
]
CONFIG = {"given": {"lr": 0.001, "seq_length": 64}, "derived": {"mode": "CSBP", "rows": 3}}
RECORD = Record("mine", ROWS, JOURNAL, CONFIG)


def section(text: str, title: str) -> str:
    (found,) = (part for part in text.split("\n## ") if part.startswith(f"{title}\n"))
    return found


def test_a_start_is_warm_after_its_first_step() -> None:
    sessions = numbers.sessions(JOURNAL)
    assert [(s.first, s.again, s.seconds, s.wall) for s in sessions] == [
        (1, 0, 0, None),
        (4, 2, 75.5, 180.0),
    ]
    steps = numbers.of_kind(ROWS, "train")
    warm = numbers.warm(steps, sessions)
    assert [row["iteration"] for row in warm] == [2, 3, 5, 6]
    assert numbers.warm(steps[:1], sessions) == steps[:1]  # better than none
    speed = numbers.spread(warm, "clean_tokens_per_second")
    assert speed == numbers.Spread(250.0, 175.0, 325.0, 400.0, 4)
    assert numbers.spread(warm[:1], "balance") == numbers.Spread(1.02, 1.02, 1.02, 1.02, 1)
    assert numbers.spread(warm, "nothing") is None


def test_the_table_has_first_and_last_step_and_means_between() -> None:
    steps = [{"iteration": n, "loss": float(n)} for n in range(1, 101)]
    chosen = [row["iteration"] for row in numbers.chosen(steps, 4)]
    assert chosen == [1, 34, 67, 100]
    assert numbers.chosen(steps[:3], 4) == steps[:3]
    assert numbers.since(steps, 34, 67, "loss") == 51.0  # of 35 to 67
    assert numbers.since([{"iteration": 3, "loss": None}], 2, 3, "loss") is None


def test_the_page() -> None:
    text = page(RECORD, "losses.png")
    assert text.startswith("# Run mine\n\nAfter step 6 of 8; it was told to stop.\n")
    losses = section(text, "Losses")
    assert "![Losses of the run](losses.png)" in losses
    assert "| 2 | 4.000000 | 4.000000 | 0.2500 | 0.001 |" in losses
    assert "| 5 | - | - | 0.2500 | 0.001 |" in losses
    evaluations = section(text, "Evaluations").splitlines()
    assert evaluations[4:] == [
        "| 3 | validation | 4.000000 +- 0.125000 | 2.5000 +- 0.0625 | - | 12 x 2 |",
        "| 6 | validation | 3.250000 +- 0.125000 | 2.5000 +- 0.0625 | 1.7500 | 12 x 2 |",
    ]
    throughput = section(text, "Throughput")
    assert "| clean tokens/s | 250 | 175 to 325 | 4 steps |" in throughput
    assert "6,000 clean tokens trained on, in 2 min" not in throughput
    # 100 + 10 + 5 + 50 + 3.333 + 2.5 s of steps, and three evaluations of 4 s
    assert "6,000 clean tokens trained on, in 0 h 02 min 51 s (170.8 s)" in throughput
    assert "steps and evaluations together: 0 h 03 min 03 s (182.8 s)" in throughput
    assert "2 starts; made again after one: 2 rows, 0 h 01 min 16 s (75.5 s)" in throughput
    memory = section(text, "Memory")
    assert "| 4.000 GiB (4,294,967,296 bytes) | 5.000 GiB (5,368,709,120 bytes) | 0.800 |" in memory
    assert "Of the steps from 4 on: those of the last start." in memory
    assert "| 3.000 MiB (3,145,728 bytes) | 4.000 MiB (4,194,304 bytes) | 0.750 |" in (
        section(text, "Traffic")
    )
    balance = section(text, "Balance and noise")
    assert "| planned work, worst rank over mean | 1.0350 | 1.0225 to 1.0475 | 1.0600 |" in balance
    assert (
        "| corrupted of the tokens that could be | 0.5000 | 0.5000 to 0.5000 | 0.5000 |" in balance
    )
    topology = section(text, "Topology")
    for line in ("| mode | CSBP |", "| ranks | 4 |", "| hosts | 2 |", "| parameters | 1,234,567 |"):
        assert line in topology
    assert section(text, "Warnings").splitlines()[2:5] == [
        "- skipped steps, 1: 5",
        "- steps without a finite loss, 1: 5",
        "- after step 2, 4 (2 times): look out",
    ]
    given = section(text, "Config").split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(given) == CONFIG["given"]


def test_what_is_predicted_stands_beside_steps_of_its_own_start() -> None:
    rows = [train(n, memory_bytes=9 << 30, bytes_sent=8 << 20) for n in (1, 2, 3)]
    text = page(Record("fewer ranks", [*rows, train(4)], JOURNAL, {}))
    assert "| 4.000 GiB (4,294,967,296 bytes) | 5.000 GiB" in section(text, "Memory")
    assert "| 3.000 MiB (3,145,728 bytes) | 4.000 MiB" in section(text, "Traffic")


def test_a_run_that_left_little_has_a_page() -> None:
    text = page(Record("none", [], [], {}))
    assert text.startswith("# Run none\n\nNo training step is on record.\n")
    for title in ("Losses", "Evaluations", "Throughput", "Memory", "Warnings", "Config"):
        section(text, title)
    page(Record("evaluated", [validation(3, 4.0)], JOURNAL, {}))
    two = train(1, ar_loss=2.0, ar_loss_sum=3.0)
    assert "| step | loss | diffusion loss | ar loss | mean loss |" in page(
        Record("two terms", [two], [], {})
    )


def test_words() -> None:
    assert list(words.table(["a"], [["one\ntwo | three"]]))[-1] == "| one two / three |"
    assert words.time(3725.4) == "1 h 02 min 05 s (3,725.4 s)"
    assert words.time(1.25) == "1.2 s"
    assert words.steps_of(range(1, 11)) == "1, 2, 3, 4, 5, 6, 7, 8 and 2 more"
    assert list(words.table(["a"], [["x|y"]])) == ["| a |", "|---|", "| x/y |"]


# --- the journal -------------------------------------------------------------------------------


def test_the_journal_keeps_what_comes_before_it_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, steps = Journal(), iter([7, 8])
    mine.warn("early")
    assert capsys.readouterr().out == "megatron_bp: early\n"
    mine.open(tmp_path / "run", 3, lambda: next(steps))
    mine.note("began", iteration=1)
    mine.warn("late")
    found = [
        (r["kind"], r["rank"], r["step"], r.get("message")) for r in read_journal(tmp_path / "run")
    ]
    assert found == [("warning", 3, 0, "early"), ("began", 3, 7, None), ("warning", 3, 8, "late")]


def test_a_step_that_is_done_counts_before_the_next_one_begins(tmp_path: Path) -> None:
    mine = Journal()
    mine.open(tmp_path, 0, lambda: 7)  # Megatron's count, set when step 8 begins
    mine.reached(8)
    mine.note("end", how="it came to its end")
    assert [r["step"] for r in read_journal(tmp_path)] == [8]


def test_a_damaged_or_missing_journal_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    assert read_journal(tmp_path) == []
    good = json.dumps(JOURNAL[0])
    (tmp_path / journal.FILE).write_text(f'{good}\nnot json\n[1]\n{{"kind": "end"}}\n{good[:20]}')
    assert read_journal(tmp_path) == [JOURNAL[0]]


def test_a_journal_that_cannot_be_written_fails_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    mine = Journal()
    mine.open(tmp_path / "file", 0, lambda: 1)
    mine.warn("look out")
    assert "could not be written" in capsys.readouterr().out


# --- the folder --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "mine"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (run / journal.FILE).write_text("".join(json.dumps(row) + "\n" for row in JOURNAL))
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return run


def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_the_tool_makes_the_report_of_the_folder_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_pictures(monkeypatch)
    command.main([str(folder)])
    assert capsys.readouterr().out.strip() == str(folder / "report.md")
    assert (folder / "report.md").read_text() == page(RECORD)
    moved = folder / "elsewhere.jsonl"
    (folder / "metrics.jsonl").rename(moved)
    there = [r | {"metrics": str(moved)} if r["kind"] == "start" else r for r in JOURNAL]
    (folder / journal.FILE).write_text("".join(json.dumps(row) + "\n" for row in there))
    command.main([str(folder)])
    assert "After step 6 of 8;" in (folder / "report.md").read_text()
    with pytest.raises(SystemExit, match="report: error"):
        command.main([str(folder / "nowhere")])


def test_each_start_may_have_a_metrics_file_of_its_own(tmp_path: Path) -> None:
    """A, B, A: what a start made again counts once, from where it was made last."""

    def keep(name: str, steps: list[int], speed: float) -> None:
        rows = [train(1, iteration=n, loss=speed) for n in steps]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    other = str(tmp_path / "b.jsonl")
    keep("metrics.jsonl", [1, 2, 3, 4, 6, 7], 1.0)  # 3 and 4 are of the first start
    keep("b.jsonl", [3, 4, 5], 2.0)
    begins = [
        (event("start", 0, 0), 1),
        (event("start", 1, 0, metrics=other), 3),
        (event("start", 2, 0), 6),
    ]
    rows = [
        row for start, n in begins for row in (start, event("began", 3, n, iteration=n, again=0))
    ]
    (tmp_path / journal.FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [(row["iteration"], row["loss"]) for row in command.read(tmp_path).rows]
    assert found == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0), (6, 1.0), (7, 1.0)]


def test_a_picture_that_fails_costs_no_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_bp.training import loss_curve

    def draw(runs: dict[str, Any], out: Path) -> list[Path]:
        raise RuntimeError("no fonts")

    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setattr(loss_curve, "draw_losses", draw)
    assert command.write(folder).read_text() == page(RECORD)
    assert "no picture of the losses: RuntimeError: no fonts" in capsys.readouterr().err


def test_the_picture_is_drawn_where_matplotlib_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_bp.training import loss_curve

    def draw(runs: dict[str, Any], out: Path) -> list[Path]:
        assert runs == {"mine": ROWS}
        return [out.with_suffix(".png"), out.with_suffix(".svg")]

    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setattr(loss_curve, "draw_losses", draw)
    assert "(report_losses.png)" in command.write(folder).read_text()


# --- the run -----------------------------------------------------------------------------------


@pytest.fixture
def args(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    without_pictures(monkeypatch)
    monkeypatch.setattr(journal, "JOURNAL", mine := Journal())
    for name, method in (("note", mine.note), ("warn", mine.warn), ("start", mine.open)):
        monkeypatch.setattr(journal, name, method)
    monkeypatch.setattr(run, "started", lambda args: {"train_iters": 6, "predicted": {}})
    return Namespace(save=str(folder), skip_train=False, rank=1, world_size=2, iteration=6)


def test_the_report_is_written_however_a_run_ends(folder: Path, args: Namespace) -> None:
    for error, how in (
        (None, "it came to its end"),
        (SystemExit(0), "it was told to stop"),
        (SystemExit(3), "it ended with status 3"),
        (ValueError("no good\nframe 0\nframe 1"), "it failed: ValueError: no good"),
        (ValueError(), "it failed: ValueError: "),
    ):
        (folder / "report.md").unlink(missing_ok=True)
        ends = contextlib.nullcontext() if error is None else pytest.raises(type(error))
        with ends, run.reported(args):
            if error is not None:
                raise error
        assert f"After step 6 of 6; {how}." in (folder / "report.md").read_text()


def test_one_rank_writes_and_only_of_training_that_is_saved(folder: Path, args: Namespace) -> None:
    for other in ({"rank": 0}, {"save": None}, {"skip_train": True}):
        with run.reported(Namespace(**(vars(args) | other))):
            pass
        assert not (folder / "report.md").exists()


def test_a_report_that_cannot_be_written_is_told_and_fails_no_run(
    folder: Path, args: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "metrics.jsonl").unlink()
    with run.reported(args):
        pass
    assert (
        "the report of the run could not be written: FileNotFoundError" in capsys.readouterr().out
    )


def test_a_run_that_fails_before_its_first_step_has_a_report(folder: Path, args: Namespace) -> None:
    for name in ("metrics.jsonl", journal.FILE):
        (folder / name).unlink()
    with pytest.raises(SystemExit), run.reported(args):
        raise SystemExit(2)
    text = (folder / "report.md").read_text()
    assert "No training step is on record; it ended with status 2." in text


def test_a_start_that_cannot_be_told_fails_no_run(
    folder: Path,
    args: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def started(args: Namespace) -> dict[str, Any]:
        raise OSError("no name")

    monkeypatch.setattr(run, "started", started)
    with run.reported(args):
        pass
    assert "its start is not on record: OSError: no name" in capsys.readouterr().out


def test_what_cannot_be_predicted_fails_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def predicted(args: Namespace) -> dict[str, int]:
        raise ValueError("no plan")

    monkeypatch.setattr(run, "predicted", predicted)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    facts = run.started(Namespace(train_iters=5, world_size=8, metrics_file=None, objective="x"))
    assert facts["hosts"].startswith("2 (this one: ")
    assert "predicted" not in facts
    assert "not predicted: ValueError: no plan" in capsys.readouterr().out
