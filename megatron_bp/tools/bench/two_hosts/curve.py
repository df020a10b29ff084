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
) -> list[dict[str, float]]:
    """The points of one form, see `points`.

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
    return points(read_metrics(folder / METRICS))


def points(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Of each evaluation: step, seconds of training until then, bound in bits a byte.

    Evaluations and the start are not in the seconds. A second evaluation after the same step, as
    Megatron makes one at the end, is the same one.

    Raises:
        ValueError: there is no bound in bits a byte.
    """
    seconds, found = 0.0, {}
    for row in rows:
        if row["kind"] == "train":
            seconds += row["seconds"]
        elif row["kind"] == "validation":
            if "bound_bits_per_byte" not in row:
                raise ValueError(
                    "the data does not tell its bytes: prepare it with megatron_bp.tools.prepare"
                )
            found[row["iteration"]] = {
                "step": float(row["iteration"]),
                "seconds": seconds,
                "bits_per_byte": row["bound_bits_per_byte"],
            }
    return [found[step] for step in sorted(found)]
