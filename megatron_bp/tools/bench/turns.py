"""Alternatives measured turn by turn in one process, and what is told of them.

A machine that slows down slows all alternatives of a turn, so ratios are medians over turns of the
ratio inside each turn. Results are plain lists, as they go into JSON.
"""

import gc
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_bp.tools.bench.machine import Cost, cost


@dataclass(frozen=True)
class Way:
    """One alternative.

    Attributes:
        name: what it is called in tables.
        call: does it once.
        turns: in how many turns at most it takes part; None for all.
        warm: whether it is done once before, unmeasured (kernels that are compiled).
    """

    name: str
    call: Callable[[], object]
    turns: int | None = None
    warm: bool = False


Measured = dict[str, dict[str, list[Any]]]


def take_turns(ways: Sequence[Way], turns: int, device: torch.device | None = None) -> Measured:
    """Of each way {"seconds", "cpu_seconds", "peak_bytes"}, an entry a turn that it took part in.

    Every second turn goes backwards: what comes first or last in a turn is not always the same.
    """
    found: Measured = {way.name: {field: [] for field in Cost._fields} for way in ways}
    for way in ways:
        if way.warm:
            way.call()
    for turn in range(turns):
        for way in ways if turn % 2 == 0 else ways[::-1]:
            if way.turns is not None and turn >= way.turns:
                continue
            gc.collect()
            for name, value in cost(way.call, device)._asdict().items():
                found[way.name][name].append(value)
    return found


def median(values: Iterable[float | None]) -> float | None:
    """The median of what is known; None of nothing."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ratio(of: Sequence[float | None], to: Sequence[float | None]) -> float | None:
    """Median over turns of of / to; None if no turn has both."""
    pairs = zip(of, to, strict=False)
    return median(a / b for a, b in pairs if a is not None and b)


def spread(values: Sequence[float | None], unit: float = 1.0, digits: int = 2) -> str:
    """'median (lowest to highest)' in units of `unit`; '-' of nothing."""
    known = [value / unit for value in values if value is not None]
    if not known:
        return "-"
    middle = f"{statistics.median(known):.{digits}f}"
    if len(known) == 1:
        return middle
    return f"{middle} ({min(known):.{digits}f} to {max(known):.{digits}f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def times(value: float | None, digits: int = 2) -> str:
    """A ratio as it is told; '-' for none."""
    return "-" if value is None else f"{value:.{digits}f}x"
