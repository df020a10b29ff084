"""Starts the ranks on both hosts, gives them orders, and leaves none behind."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_bp.tools.bench.two_hosts.link import Hosts
from megatron_bp.tools.bench.two_hosts.orders import Order, Place

ROOT = Path(__file__).resolve().parents[4]
WORKER = "megatron_bp.tools.bench.two_hosts.worker"
START_SECONDS = 300.0  # of the imports, on few cores
GRACE = 3.0  # seconds in which other ranks may still say why they fail
TAIL = 12  # lines of a log that are shown
FIRST_PORT = 29600  # of the namespaces, which are nobody else's


class RunError(RuntimeError):
    """A run did not come to its end.

    Attributes:
        refused: all ranks refused the arguments; nothing was trained.
    """

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class _Server:
    """A rank's process, which forks one for each run."""

    def __init__(self, place: Place, hosts: Hosts, log: Path) -> None:
        ranks = len(place.hosts)
        host = place.hosts[place.rank]
        environment = os.environ | {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.hosts.count(host)),
            "MASTER_ADDR": hosts.addresses[0],
            "GLOO_SOCKET_IFNAME": hosts.interface,
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*hosts.prefix(host), sys.executable, "-m", WORKER, place.written()],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        self._rest = b""

    def order(self, order: Order) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order.written()}\n".encode())
        self._process.stdin.flush()

    def answer(self, seconds: float) -> str | None:
        """The next line that it says, None if that takes longer."""
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = max(0.0, end - time.monotonic())
            if not select.select([stream], [], [], left)[0]:
                return None
            read = os.read(stream, 4096)
            if not read:
                raise RunError(f"a rank's server ended\n{tail(self._log)}")
            self._rest += read
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Ranks:
    """All ranks of the job, waiting for orders."""

    def __init__(self, servers: list[_Server]) -> None:
        self._servers = servers
        self._port = FIRST_PORT

    def run(
        self,
        folder: Path,
        flags: list[str],
        timeout: float,
        pause_after: int | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Order:
        """Run once, to its end.

        Args:
            folder: is made.
            flags: of pretrain_bdlm.py.
            timeout: seconds.
            pause_after: see `Order`.
            meanwhile: is called again and again while it runs.

        Raises:
            RunError: a rank failed or the time is over; with the ends of the logs.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._port += 1  # the last run's may not be free yet
        order = Order(str(folder.resolve()), tuple(flags), self._port, pause_after)
        for server in self._servers:
            server.order(order)
        children = [int(server.answer(timeout) or 0) for server in self._servers]
        codes: list[int | None] = [None] * len(children)
        end = time.monotonic() + timeout
        try:
            while None in codes:
                meanwhile()
                for i, server in enumerate(self._servers):
                    if codes[i] is None and (line := server.answer(0.01)) is not None:
                        codes[i] = int(line)
                        if codes[i]:
                            end = min(end, time.monotonic() + GRACE)
                if time.monotonic() > end:
                    break
        finally:
            for child, code in zip(children, codes, strict=True):
                if code is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
        killed = [i for i, code in enumerate(codes) if code is None]
        for i in killed:
            self._servers[i].answer(GRACE)
        failed = [i for i, code in enumerate(codes) if code]
        if failed:
            told = tail(order.log(failed[0]))
            refused = all(code == 2 for code in codes)
            raise RunError(f"rank {failed[0]} ended with {codes[failed[0]]}\n{told}", refused)
        if killed:
            raise RunError(f"not over after {timeout:.0f} s (--timeout)\n{tail(order.log(0))}")
        return order


@contextmanager
def ranks(hosts: Hosts, count: int, folder: Path) -> Iterator[Ranks]:
    """Ranks on the two hosts, half of them on each, first host first.

    Raises:
        RunError: one did not start.
    """
    of_rank = tuple(rank * 2 // count for rank in range(count))
    servers: list[_Server] = []
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for rank in range(count):
            place = Place(rank, of_rank, hosts.interface)
            servers.append(_Server(place, hosts, folder / f"server{rank}.log"))
        for server in servers:
            if server.answer(START_SECONDS) != "ready":
                raise RunError(f"ranks did not start within {START_SECONDS:.0f} s")
        yield Ranks(servers)
    finally:
        for server in servers:
            server.end()


def tail(log: Path) -> str:
    """The last lines of a log, indented."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "    (no log)"
    return "\n".join(f"    {line}" for line in lines[-TAIL:])
