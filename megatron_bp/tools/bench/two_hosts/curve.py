"""The matched-time curve: forms trained for the same time on the limited link.

All start from the same weights and see the same samples with the same noise at a constant learning
rate, so at the same step they are the same model to rounding; a form that is faster is further.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bp.tools.bench.two_hosts.link import Hosts
from megatron_bp.tools.bench.two_hosts.orders import METRICS
from megatron_bp.tools.bench.two_hosts.servers import Ranks
from megatron_bp.training.record import read_metrics

POINTS = 8  # evaluations of a run
EVALUATION_STEPS = 2


@dataclass(frozen=True)
class Length:
    """How long a form trains: steps, and how many between evaluations."""

    steps: int
    between: int

    @staticmethod
    def of(seconds: float, a_step: float) -> "Length":
        """As many steps as fit into the seconds; at least two, one of which warms up."""
        steps = max(2, int(seconds / a_step))
        return Length(steps, -(-steps // POINTS))


def run(
    ranks: Ranks,
    hosts: Hosts,
    folder: Path,
    flags: Sequence[str],
    length: Length,
    rate: float,
    timeout: float,
) -> tuple[list[dict[str, float]], str]:
    """The points of one form and their unit, see `points`.

    Args:
        ranks: they run it.
        hosts: whose link it is.
        folder: of this run.
        flags: of pretrain_bdlm.py.
        length: how long it trains.
        rate: of the link, bytes a second.
        timeout: seconds of the whole run.
    """
    more = {
        "--train-iters": length.steps,
        "--eval-interval": length.between,
        "--eval-iters": EVALUATION_STEPS,
        "--metrics-file": folder.resolve() / METRICS,
    }
    hosts.limit(rate)
    try:
        ranks.run(folder, [*flags, *(str(word) for pair in more.items() for word in pair)], timeout)
    finally:
        hosts.limit(None)
    rows = read_metrics(folder / METRICS)
    return points(rows), unit_of(rows)


def points(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Of each evaluation: step, seconds of training until then, bound in bits a `unit_of(rows)`.

    Evaluations and the start are not in the seconds. A second evaluation after the same step, as
    Megatron makes one at the end, is the same one.
    """
    seconds, found, unit = 0.0, {}, unit_of(rows)
    for row in rows:
        if row["kind"] == "train":
            seconds += row["seconds"]
        elif row["kind"] == "validation":
            bits = row[f"bound_bits_per_{unit}"]
            step = row["iteration"]
            found[step] = {"step": float(step), "seconds": seconds, "bits": bits}
    return [found[step] for step in sorted(found)]


def unit_of(rows: Sequence[dict[str, Any]]) -> str:
    """What bounds are told of: "byte", or "token" where the data does not know its bytes.

    Raises:
        ValueError: there is no bound.
    """
    evaluated = [row for row in rows if row["kind"] == "validation"]
    for unit in ("byte", "token"):
        if evaluated and all(f"bound_bits_per_{unit}" in row for row in evaluated):
            return unit
    raise ValueError("no evaluation tells a bound; see --loss-weighting bound and --eval-iters")
