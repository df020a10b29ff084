"""What the ranks are told: one run each order, and where what they record lies."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

METRICS, GO = "metrics.jsonl", "go"


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        rank: of the job.
        hosts: host of each rank.
        interface: this host's end of the link.
    """

    rank: int
    hosts: tuple[int, ...]
    interface: str

    @property
    def local_rank(self) -> int:
        """Place among the ranks of its host."""
        return self.hosts[: self.rank].count(self.hosts[self.rank])

    def written(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(line: str) -> "Place":
        """Of such a line."""
        values = json.loads(line)
        return Place(**values | {"hosts": tuple(values["hosts"])})


@dataclass(frozen=True)
class Order:
    """One run.

    Attributes:
        folder: of its logs and numbers; absolute.
        flags: of pretrain_bdlm.py.
        port: of its rendezvous.
        pause_after: the step after which all ranks wait for the file GO; None for no pause.
    """

    folder: str
    flags: tuple[str, ...]
    port: int
    pause_after: int | None = None

    def written(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(line: str) -> "Order":
        """Of such a line."""
        values = json.loads(line)
        return Order(**values | {"flags": tuple(values["flags"])})

    def log(self, rank: int) -> Path:
        """What a rank prints."""
        return Path(self.folder) / f"rank{rank}.log"

    def steps(self, rank: int) -> Path:
        """What a rank records of each step; see `worker.record`."""
        return Path(self.folder) / f"rank{rank}.jsonl"
