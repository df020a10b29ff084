"""Of the steps of each form: medians, ratios, and whether what was promised holds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_bp.tools.bench.two_hosts.forms import CLEAN, CP, CSBP, P2P
from megatron_bp.tools.bench.two_hosts.steps import Step

FRACTION = (0.60, 0.75)  # of CP all_gather's step that waits for K/V
PART_OF_BOUND = 0.93  # of the gain that half the exposed communication would bring
NEAR_CLEAN = 0.03  # how near CSBP has to be to a CP form that gathers the clean half alone
COUNTERS = 0.05  # how far the link's counters may be from what was handed over


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and range of repeats."""

    median: float
    quartiles: tuple[float, float]
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        if len(values) == 1:
            return Spread(values[0], (values[0], values[0]), values[0], values[0])
        first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(middle, (first, third), min(values), max(values))


@dataclass(frozen=True)
class Figures:
    """Of one form. Bytes are of one step; `link` and `handed` of the host that sends more."""

    unlimited: Spread
    limited: Spread
    waiting: float
    sent: int
    handed: int
    by_attention: int
    link: int
    counters: float


def figures(steps: Sequence[Step]) -> Figures:
    """Of the steps of one form, some of them on either link."""
    slow = [step for step in steps if step.limited]
    fast = [step for step in steps if not step.limited]
    return Figures(
        unlimited=Spread.of([step.seconds for step in fast]),
        limited=Spread.of([step.seconds for step in slow]),
        waiting=statistics.median(step.waiting for step in slow),
        sent=round(statistics.median(step.sent for step in slow)),
        handed=round(statistics.median(max(step.handed) for step in slow)),
        by_attention=round(statistics.median(max(step.by_attention) for step in slow)),
        link=round(statistics.median(max(step.link) for step in slow)),
        counters=max(map(counters_off, slow)),
    )


def counters_off(step: Step) -> float:
    """How far the link's counters are from what was handed over, as a part of it; the worse host.

    Headers and acknowledgements make the counters about 2 % larger.
    """
    return max(
        abs(counted - handed) / handed if handed else float(counted > 0)
        for counted, handed in zip(step.link, step.handed, strict=True)
    )


def bound(fraction: float) -> float:
    """How much faster CSBP has to be than a form that waits a fraction of its step for K/V.

    CSBP sends half of what that form does: without the half of the waiting a step takes
    1 - f/2 of its time.
    """
    return PART_OF_BOUND / (1 - fraction / 2)


def checks(forms: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """Each promise: its name, the value, what it must be, and whether it holds."""
    csbp, found = forms[CSBP], []

    def add(name: str, value: float, rule: str, holds: bool) -> None:
        found.append({"name": name, "value": value, "rule": rule, "holds": holds})

    waiting = forms[CP].waiting
    low, high = FRACTION
    add(
        f"{CP}: part of the step that waits for K/V",
        waiting,
        f"{low:.2f} to {high:.2f}",
        low <= waiting <= high,
    )
    for name in (CP, P2P):
        if name in forms:
            ratio = forms[name].limited.median / csbp.limited.median
            least = bound(forms[name].waiting)
            add(f"{name} / {CSBP}", ratio, f"at least {least:.3f}", ratio >= least)
    if CLEAN in forms:
        ratio = csbp.limited.median / forms[CLEAN].limited.median
        most = 1 + NEAR_CLEAN
        add(f"{CSBP} / {CLEAN}", ratio, f"at most {most:.2f}", ratio <= most)
    for name, form in forms.items():
        if not name.startswith("csbp") and beyond_noise(form.unlimited, csbp.unlimited):
            ratio = csbp.unlimited.median / form.unlimited.median
            add(f"unlimited: {CSBP} / {name}", ratio, "no form is faster beyond noise", False)
    worst = max(form.counters for form in forms.values())
    add(
        "link's counters against bytes handed over",
        worst,
        f"within {COUNTERS:.2f}",
        worst <= COUNTERS,
    )
    return found


def beyond_noise(one: Spread, other: Spread) -> bool:
    """Whether `one` is faster: its upper quartile is below the other's lower one."""
    return one.quartiles[1] < other.quartiles[0]


def best_cp(forms: Mapping[str, Figures], without: Sequence[str] = ()) -> str:
    """The CP form whose step is shortest on the limited link."""
    names = [name for name in forms if name.startswith("cp:") and name not in without]
    return min(names, key=lambda name: forms[name].limited.median)
