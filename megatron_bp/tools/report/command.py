"""`python -m megatron_bp.tools.report RUN` writes RUN/report.md again, from RUN alone."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_bp.tools.report.numbers import Row
from megatron_bp.tools.report.page import Record, page
from megatron_bp.training.journal import read_journal
from megatron_bp.training.record import read_metrics

REPORT = "report.md"
PICTURE = "report_losses"


def read(run: Path) -> Record:
    """What a run left in its folder.

    Raises:
        OSError, ValueError: a metrics file is not there, or it or config.yaml cannot be read.
    """
    journal = read_journal(run)
    rows = _metrics(run, journal)
    config: dict[str, Any] = {}
    if (run / "config.yaml").is_file():
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")) or {}
    return Record(run.resolve().name, rows, journal, config)


def _metrics(run: Path, journal: list[Row]) -> list[Row]:
    """The rows of all starts, each from its own --metrics-file; none where none wrote any."""
    usual = run / "metrics.jsonl"
    if not any(row["kind"] == "began" for row in journal):
        return read_metrics(usual) if usual.exists() or not journal else []
    path, rows = usual, list[Row]()
    for row in journal:
        if row["kind"] == "start":
            path = Path(row.get("metrics") or usual)
        elif row["kind"] == "began":
            first = row["iteration"]
            found = [r for r in read_metrics(path) if not rows or r["iteration"] >= first]
            again = {(r["kind"], r["iteration"]) for r in found}
            kept = [r for r in rows if r["iteration"] <= first]
            rows = [r for r in kept if (r["kind"], r["iteration"]) not in again] + found
    return rows


def write(run: Path) -> Path:
    """Write the report of a run into its folder; where it is.

    Raises:
        OSError, ValueError: see `read`, or it cannot be written.
    """
    record = read(run)
    path, fresh = run / REPORT, run / f"{REPORT}.tmp"
    fresh.write_text(page(record, _draw(record.rows, run)), encoding="utf-8")
    os.replace(fresh, path)
    return path


def _draw(rows: list[Row], run: Path) -> str | None:
    """The picture of the losses, a file in `run`; None without matplotlib, or without a step.

    Nor is there one, and it is told, where drawing fails: the report is worth more.
    """
    if not any(row["kind"] == "train" and row["loss"] is not None for row in rows):
        return None
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return None
    from megatron_bp.training.loss_curve import draw_losses

    try:
        drawn = draw_losses({run.resolve().name: rows}, run / PICTURE)
    except Exception as error:  # whatever matplotlib finds here
        told = f"megatron_bp: no picture of the losses: {type(error).__name__}: {error}"
        print(told, file=sys.stderr, flush=True)
        return None
    return next((path.name for path in drawn if path.suffix == ".png"), None)


def main(argv: Sequence[str] | None = None) -> None:
    """Write it and say where."""
    parser = argparse.ArgumentParser("python -m megatron_bp.tools.report", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run (its --save)")
    options = parser.parse_args(argv)
    try:
        print(write(options.run))
    except (OSError, ValueError, yaml.YAMLError) as error:
        sys.exit(f"report: error: {error}")
