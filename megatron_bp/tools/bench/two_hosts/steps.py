"""One run of a form: some steps on the unlimited link, then some on the limited one."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_bp.tools.bench.two_hosts.link import Hosts
from megatron_bp.tools.bench.two_hosts.orders import GO, METRICS
from megatron_bp.tools.bench.two_hosts.servers import Ranks
from megatron_bp.training.record import read_metrics

WARM_UP = 1  # steps that are not counted, at a run's start


@dataclass(frozen=True)
class Step:
    """What one step took.

    Attributes:
        limited: whether on the limited link.
        seconds: of the slowest rank, from its first micro-batch to the end of the step.
        waits: of each rank, seconds in which it stood still for K/V and their gradients.
        sent: bytes that the exchange counts itself, of all ranks to any.
        handed, by_attention: of each host, bytes that its ranks handed to the other's, seen by a
            wrapped torch.distributed: all, and attention's.
        link: of each host, what the interface sent by its own counter.
    """

    limited: bool
    seconds: float
    waits: tuple[float, ...]
    sent: int
    handed: tuple[float, ...]
    by_attention: tuple[float, ...]
    link: tuple[int, ...]

    @property
    def waiting(self) -> float:
        """Mean over ranks of the part of the step in which they stood still."""
        return sum(self.waits) / len(self.waits) / self.seconds

    def written(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def run(
    ranks: Ranks,
    hosts: Hosts,
    folder: Path,
    flags: list[str],
    counts: tuple[int, int],
    rate: Callable[[list[Step]], float],
    timeout: float,
) -> list[Step]:
    """The counted steps of one run.

    Args:
        ranks: they run it.
        hosts: whose link it is.
        folder: of this run.
        flags: of pretrain_bdlm.py, without the number of steps.
        counts: steps on the unlimited link, then on the limited one.
        rate: bytes a second of the limited link, once the first are done.
        timeout: seconds of the whole run.
    """
    unlimited = WARM_UP + counts[0]
    waiting = counts[1] > 0

    def at_the_pause() -> None:
        nonlocal waiting
        if waiting and len(done := read(folder, unlimited)) == unlimited:
            hosts.limit(rate(done[WARM_UP:]))
            (folder / GO).touch()
            waiting = False

    hosts.limit(None)
    iterations = ["--train-iters", str(unlimited + counts[1])]
    metrics = ["--metrics-file", str(folder.resolve() / METRICS)]
    pause = unlimited if counts[1] else None
    try:
        ranks.run(folder, [*flags, *iterations, *metrics], timeout, pause, at_the_pause)
    finally:
        hosts.limit(None)
    return read(folder, unlimited)[WARM_UP:]


def read(folder: Path, unlimited: int) -> list[Step]:
    """The steps that a run in `folder` has written so far; the first `unlimited` ones were so."""
    path = folder / METRICS
    if not path.exists():
        return []
    trained = [row for row in read_metrics(path) if row["kind"] == "train"]
    of_ranks = [_rows(file) for file in sorted(folder.glob("rank*.jsonl"))]
    whole = min([len(trained), *map(len, of_ranks)])
    return [_step(trained[i], [rows[i] for rows in of_ranks], i >= unlimited) for i in range(whole)]


def _step(trained: dict[str, Any], rows: list[dict[str, Any]], limited: bool) -> Step:
    half = len(rows) // 2
    hosts = (rows[:half], rows[half:])
    return Step(
        limited=limited,
        seconds=trained["seconds"],
        waits=tuple(row["wait_seconds"] for row in rows),
        sent=trained["bytes_sent"],
        handed=tuple(sum(row["handed_bytes"] for row in host) for host in hosts),
        by_attention=tuple(sum(row["handed_by_attention"] for row in host) for host in hosts),
        link=tuple(host[0]["link_bytes"] for host in hosts),
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
