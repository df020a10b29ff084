"""What a run tells besides its metrics, kept for its report: starts, ends and warnings.

Rows of journal.jsonl in the --save folder, one JSON object a line, from any rank: `kind`, `time`,
`rank`, `step` and what belongs to the kind. Whatever warns does so through `warn`.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FILE = "journal.jsonl"


class Journal:
    """The journal of this process. Before it is opened it keeps its rows; it never fails a run."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._waiting: list[dict[str, Any]] = []
        self._rank = 0
        self._step: Callable[[], int] = lambda: 0
        self._done = 0

    def open(self, folder: Path, rank: int, step: Callable[[], int]) -> None:
        """Write to `folder` from here on, what waits first.

        Args:
            folder: is made if it is not there.
            rank: of this process.
            step: gives the steps done when the step under way began.
        """
        self._path, self._rank, self._step = folder / FILE, rank, step
        waiting, self._waiting = self._waiting, []
        for row in waiting:
            self._write(row | {"rank": rank})

    def reached(self, step: int) -> None:
        """A step is done: what `open` was given tells so only when the next one begins."""
        self._done = step

    def note(self, kind: str, **fields: Any) -> None:
        """Add a row."""
        head = {"kind": kind, "time": datetime.now(UTC).isoformat(timespec="seconds")}
        row = head | {"rank": self._rank, "step": max(self._step(), self._done)} | fields
        if self._path is None:
            self._waiting.append(row)
        else:
            self._write(row)

    def warn(self, message: str) -> None:
        """Print a warning, and keep it for the report."""
        print(f"megatron_bp: {message}", flush=True)
        self.note("warning", message=message)

    def _write(self, row: dict[str, Any]) -> None:
        assert self._path is not None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            print(f"megatron_bp: {self._path} could not be written: {error.strerror}", flush=True)


JOURNAL = Journal()
note, warn, start, reached = JOURNAL.note, JOURNAL.warn, JOURNAL.open, JOURNAL.reached


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's journal, in the order they were written; lines that are none left out."""
    try:
        lines = (folder / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and {"kind", "time", "step"} <= row.keys():
            rows.append(row)
    return rows
