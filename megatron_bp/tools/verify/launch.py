"""Starts the ranks of a layout and waits for them: none hangs, and none is left behind."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WORKER = "megatron_bp.tools.verify.worker"
GRACE = 3.0  # seconds in which other ranks may still say why they fail
TAIL = 15  # lines of a log that are shown

Launch = Callable[[Path, int, float], None]


class LaunchError(RuntimeError):
    """A layout did not run to its end.

    Attributes:
        refused: the ranks refused the arguments; nothing was trained.
    """

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


def local(folder: Path, ranks: int, timeout: float) -> None:
    """Run a layout on this machine, each rank a process of its own; logs are in its folder.

    Raises:
        LaunchError: a rank failed or the time is over; with the ends of the logs.
    """
    import torch
    from torch._C._distributed_c10d import TCPStore

    # The store stands here and picks its port as it binds, so that nobody can take it before.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if not torch.cuda.is_available():
        shared["OMP_NUM_THREADS"] = "1"
    commands = [
        ([sys.executable, "-m", WORKER, str(folder)], {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(ranks)
    ]
    _run(folder, [(command, shared | own) for command, own in commands], timeout)


def by_template(template: str) -> Launch:
    """Runs each layout by a command of the user's, for several nodes.

    Args:
        template: words in which {ranks}, {folder} and {worker} are filled in.

    Raises:
        ValueError: it names no worker.
    """
    if "{worker}" not in template and "{folder}" not in template:
        raise ValueError(
            f"--launch {template!r}: nothing in it starts the ranks; end it with {{worker}}, as in "
            f"'torchrun --standalone --nproc-per-node {{ranks}} {{worker}}'"
        )

    def launch(folder: Path, ranks: int, timeout: float) -> None:
        filled = {"ranks": str(ranks), "folder": shlex.quote(str(folder))}
        filled["worker"] = f"-m {WORKER} {filled['folder']}"
        words = template
        for name, value in filled.items():
            words = words.replace(f"{{{name}}}", value)
        _run(folder, [(shlex.split(words), {})], timeout)

    return launch


def machine_ranks() -> int | None:
    """Ranks that this machine can run at once; None where there is no such bound."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else None


def _run(folder: Path, commands: list[tuple[list[str], dict[str, str]]], timeout: float) -> None:
    environment = dict(os.environ)
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    )
    environment["PYTHONWARNINGS"] = "ignore"
    end = time.monotonic() + timeout
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for i, (command, own) in enumerate(commands):
            with (folder / f"rank{i}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment | own,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        while None in (codes := [p.poll() for p in processes]):
            if any(codes):
                end = min(end, time.monotonic() + GRACE)
            if time.monotonic() > end:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            _kill(process)
    failed = [i for i, code in enumerate(codes) if code]
    if failed:
        told = ", ".join(f"rank {i} with {codes[i]}" for i in failed)
        raise LaunchError(
            f"ended early: {told}\n{_tails(folder, failed)}", all(codes[i] == 2 for i in failed)
        )
    if None in codes:
        raise LaunchError(
            f"not over after {timeout:.0f} s (--timeout)\n{_tails(folder, range(len(codes)))}"
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tails(folder: Path, ranks: object) -> str:
    """The last lines of the ranks' logs; equal ones once."""
    shown: dict[str, list[int]] = {}
    for rank in ranks if isinstance(ranks, list | range) else ():
        lines = (folder / f"rank{rank}.log").read_text(errors="replace").splitlines()
        kept = [line for line in lines if "usage:" not in line][-TAIL:]
        shown.setdefault("\n".join(f"    {line}" for line in kept), []).append(rank)
    return "\n".join(f"  rank {', '.join(map(str, r))}:\n{text}" for text, r in shown.items())
