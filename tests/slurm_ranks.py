"""Ranks of real runs under scripts/slurm/, forked from a process that has imported Megatron.

What torchrun starts is this file as a program, which takes no time: it hands its command line and
environment to the test, which forks the rank from the fork server of ranks.py. Then it stands for
the rank: it passes signals on, once the rank has a handler for them, and ends as the rank ends.

A rank is pretrain_bdlm.py. In the folder SEEN it leaves a file with its place. SLOW_STEP is
STEP:SECONDS, a step that takes longer in the first start, and DIE is RANK:STEP, killed before that
step in the second.
"""

import contextlib
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Forks:
    """Listens, in the test's process, for ranks that are to be forked."""

    def __init__(self, folder: Path) -> None:
        import ranks

        ranks.start()
        self._context = multiprocessing.get_context("forkserver")
        self.path = str(folder / "forks")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.path)
        self._server.listen(16)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        gone = contextlib.suppress(OSError)  # what stands for the rank was killed
        with gone, connection, connection.makefile("rw") as lines:
            request = json.loads(lines.readline())
            process = self._context.Process(target=run_rank, args=request)
            process.start()
            try:
                print(process.pid, file=lines, flush=True)
                select.select([process.sentinel, connection], [], [])
            finally:
                if process.exitcode is None:
                    process.kill()
                process.join()
            print(process.exitcode, file=lines, flush=True)

    def close(self) -> None:
        """No more ranks."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def run_rank(argv: list[str], environment: dict[str, str], output: str, stand_in: int) -> None:
    """The rank: pretrain_bdlm.py in a process that was forked.

    Args:
        argv: of the rank.
        environment: of the rank.
        output: the file that its output goes to.
        stand_in: the process that torchrun takes for it.
    """
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    multiprocessing.current_process()._config["daemon"] = False
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    from entry import pretrain

    place, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    start, seen = os.environ.get("SLURM_RESTART_COUNT", "0"), Path(os.environ["SEEN"])
    names = ("SLURMD_NODENAME", "SLURM_NODEID", "LOCAL_RANK", "MASTER_ADDR")
    note = {name: os.environ[name] for name in names} | {"rank": place, "world": world}
    kind = "preflight" if "--preflight" in argv else "rank"
    (seen / f"{kind}{place}_of_start{start}.json").write_text(json.dumps(note))
    slow, seconds = (float(number) for number in os.environ["SLOW_STEP"].split(":"))

    def before_step(number: int, step: int) -> None:
        if start == "0" and step == slow:
            (seen / f"slow{number}").touch()
            time.sleep(seconds)
        if start == "1" and f"{number}:{step}" == os.environ["DIE"]:
            (seen / "dead").touch()
            os.kill(stand_in, signal.SIGKILL)  # torchrun sees it before others lose the connection
            os.kill(os.getpid(), signal.SIGKILL)

    code, _ = pretrain(place, world, argv, None if kind == "preflight" else before_step)
    sys.stdout.flush()
    os._exit(code)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)
    return False


def stand_for_rank() -> int:
    """In what torchrun started: its exit code is the rank's."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["FORKS"])
    with connection.makefile("rw") as lines:
        output = os.readlink("/proc/self/fd/1")
        request: list[Any] = [sys.argv[1:], dict(os.environ), output, os.getpid()]
        print(json.dumps(request), file=lines, flush=True)
        rank = int(lines.readline())
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(rank, number))
        handled = False
        while not select.select([connection], [], [], 0.2)[0]:
            if not handled and catches(rank, signal.SIGUSR1):
                signal.signal(signal.SIGUSR1, lambda number, frame: os.kill(rank, number))
                handled = True
        code = int(lines.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(stand_for_rank())
