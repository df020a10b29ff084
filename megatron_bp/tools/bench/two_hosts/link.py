"""The two hosts as namespaces, and the rate of the link between them.

They stand already (scripts/bench_two_hosts.sh). Here commands are run in them, and the link's rate
is set by the kernel's token bucket in both directions.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

COUNTER = "/sys/class/net/{interface}/statistics/tx_bytes"
BURST_SECONDS = 0.005  # of the rate: what the bucket holds, above the timer's grain
LEAST_BURST = 32 * 1024  # bytes; holds some frames of 9000


@dataclass(frozen=True)
class Hosts:
    """Namespaces of the two hosts, the name of the link's end in each, and their addresses."""

    namespaces: tuple[str, str]
    interface: str
    addresses: tuple[str, str]

    def check(self) -> None:
        """See that commands can be run on both hosts, and that the link is there.

        Raises:
            ValueError: they cannot, or it is not.
        """
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise ValueError(f"there is no `{tool}` on this machine (package iproute2)")
        for host in (0, 1):
            told = self._run(host, ["cat", COUNTER.format(interface=self.interface)])
            if told.returncode:
                raise ValueError(
                    f"namespace {self.namespaces[host]} has no link {self.interface}: "
                    f"{told.stderr.strip()}; scripts/bench_two_hosts.sh makes both"
                )

    def prefix(self, host: int) -> list[str]:
        """The words before a command that is to run on a host."""
        return ["ip", "netns", "exec", self.namespaces[host]]

    def limit(self, rate: float | None) -> None:
        """Set the rate of both directions.

        Args:
            rate: bytes a second; None for as fast as the machine copies.

        Raises:
            RuntimeError: the kernel refused.
        """
        for host in (0, 1):
            done = self._run(host, ["tc", *limiting(self.interface, rate)])
            # there is nothing to remove at first
            if done.returncode and rate is not None:
                raise RuntimeError(f"tc on host {host}: {done.stderr.strip()}")

    def _run(self, host: int, command: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*self.prefix(host), *command], capture_output=True, text=True, check=False
        )


def limiting(interface: str, rate: float | None) -> list[str]:
    """Arguments of `tc` that set a rate in bytes a second, or remove the limit."""
    if rate is None:
        return ["qdisc", "del", "dev", interface, "root"]
    burst = max(LEAST_BURST, round(rate * BURST_SECONDS))
    bucket = ["tbf", "rate", f"{round(rate * 8)}bit", "burst", str(burst), "latency", "400ms"]
    return ["qdisc", "replace", "dev", interface, "root", *bucket]


def sent_bytes(interface: str) -> int:
    """What this host's end of the link has sent since it was made, headers included."""
    return int(Path(COUNTER.format(interface=interface)).read_text())
