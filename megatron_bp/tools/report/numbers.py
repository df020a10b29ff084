"""What the rows of metrics and journal add up to. Plain values in, plain values out."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Of some steps.

    Attributes:
        middle: median.
        low, high: quartiles; the only value where there is one.
        worst: largest.
        steps: how many.
    """

    middle: float
    low: float
    high: float
    worst: float
    steps: int


@dataclass(frozen=True)
class Session:
    """From a start of the run to its end, or to the next start.

    Attributes:
        start: when.
        end: when; None if the run was killed, or still runs.
        first: the first step whose row it wrote; None if it wrote none.
        again: rows of an earlier session that it wrote anew.
        seconds: of steps and evaluations of those rows.
        how: how it ended, in words.
    """

    start: str
    end: str | None
    first: int | None
    again: int
    seconds: float
    how: str

    @property
    def wall(self) -> float | None:
        """Seconds from start to end."""
        if self.end is None:
            return None
        return (
            datetime.fromisoformat(self.end) - datetime.fromisoformat(self.start)
        ).total_seconds()


def of_kind(rows: Sequence[Row], *kinds: str) -> list[Row]:
    """Those rows."""
    return [row for row in rows if row["kind"] in kinds]


def evaluations(rows: Sequence[Row]) -> list[Row]:
    """The evaluations; of several of one split at one step the last, as after the last step."""
    return list(
        {(r["iteration"], r["kind"]): r for r in of_kind(rows, "validation", "test")}.values()
    )


def spread(steps: Sequence[Row], name: str) -> Spread | None:
    """Of a field over steps; None if no step has it."""
    values = sorted(row[name] for row in steps if row.get(name) is not None)
    if not values:
        return None
    low, middle, high = (
        values * 3 if len(values) == 1 else statistics.quantiles(values, n=4, method="inclusive")
    )
    return Spread(middle, low, high, values[-1], len(values))


def warm(steps: Sequence[Row], sessions: Sequence[Session]) -> list[Row]:
    """The steps without the first after each start, which waits for much else; all if none left."""
    cold = {session.first for session in sessions} | {row["iteration"] for row in steps[:1]}
    return [row for row in steps if row["iteration"] not in cold] or list(steps)


def of_last(steps: Sequence[Row], sessions: Sequence[Session]) -> list[Row]:
    """The steps of the last start: degrees and predictions of an earlier one may be others."""
    if not sessions:
        return list(steps)
    first = sessions[-1].first
    return [] if first is None else [row for row in steps if row["iteration"] >= first]


def sessions(journal: Sequence[Row]) -> list[Session]:
    """The starts of a run, one after another."""
    found: list[Session] = []
    for row in journal:
        if row["kind"] == "start":
            found.append(Session(row["time"], None, None, 0, 0.0, "no end is on record"))
        elif found and row["kind"] == "began":
            last = found[-1]
            began = (row["iteration"], row["again"], row["seconds"])
            found[-1] = Session(last.start, last.end, *began, last.how)
        elif found and row["kind"] == "end":
            last = found[-1]
            found[-1] = Session(
                last.start, row["time"], last.first, last.again, last.seconds, row["how"]
            )
    return found


def chosen(steps: Sequence[Row], most: int) -> list[Row]:
    """At most so many of the steps, evenly apart, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    places = [round(n * (len(steps) - 1) / (most - 1)) for n in range(most)]
    return [steps[place] for place in places]


def losses(rows: Sequence[Row]) -> list[str]:
    """Names of the fields that are losses: the total, and terms where there are several."""
    terms = [name for name in rows[0] if name.endswith("_loss") and f"{name}_sum" in rows[0]]
    return ["loss", *(terms if len(terms) > 1 else [])]


def since(steps: Sequence[Row], before: int, step: int, name: str) -> float | None:
    """Mean of a field over the steps after `before`, up to `step`."""
    values = [
        row[name]
        for row in steps
        if before < row["iteration"] <= step and row.get(name) is not None
    ]
    return statistics.fmean(values) if values else None


def warnings(journal: Sequence[Row]) -> list[tuple[str, int, list[int]]]:
    """(message, how often it was printed, at which steps) of each warning, in order."""
    found = of_kind(journal, "warning")
    often = Counter(row["message"] for row in found)
    steps = {
        message: sorted({row["step"] for row in found if row["message"] == message})
        for message in often
    }
    return [(message, number, steps[message]) for message, number in often.items()]
