"""In place of python under scripts/slurm/: a torchrun whose ranks take no time. Only plain Python.

Nodes meet as torchrun's do: who is told that it hosts listens at the endpoint, which must be its
own address, the others connect, and all must mean the same meeting. In two seconds, or it fails.

A rank of a run waits for SIGUSR1 and leaves files in SEEN: `ready` when it waits, `stopped` with
how many signals came. Variables of a test: from start number LONG on ranks end at once; LATE ranks
have their handler 1.5 s later; BAD is the exit code of rank 3; PREFLIGHT is that of a preflight's
ranks, and SLOW its seconds; VERDICT is what it prints last.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

PATIENCE = 2.0
NAMES = ("SET_UP", "WRAPPED", "SLURM_CPUS_PER_TASK", "SLURM_CPU_BIND")  # are printed
NAMES += ("CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF")
NAMES += ("NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
SEEN = Path(os.environ["SEEN"])


def meet(options: dict[str, str]) -> str | None:
    """What is wrong with the meeting of nodes; None if all came."""
    conf = dict(pair.split("=") for pair in options["--rdzv-conf"].split(","))
    host, _, port = options["--rdzv-endpoint"].partition(":")
    others = int(options["--nnodes"]) - 1
    end = time.monotonic() + PATIENCE
    if conf["is_host"] == "true":
        if host != options["--local-addr"]:
            return f"told to host at {host}, and is {options['--local-addr']}"
        with socket.create_server((host, int(port))) as server:
            server.settimeout(PATIENCE)
            for came in range(others):
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    return f"{came} of {others} other nodes came"
                with connection:
                    if connection.recv(100).decode() != options["--rdzv-id"]:
                        return "a node of another meeting came"
                    connection.send(b"welcome")
        return None
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.socket() as connection:
            connection.settimeout(PATIENCE)
            connection.connect((host, int(port)))
            connection.send(options["--rdzv-id"].encode())
            return None if connection.recv(100) == b"welcome" else "not wanted"
        time.sleep(0.02)
    return f"nobody hosts at {host}:{port}"


def rank(number: int, first: bool) -> int:
    """A rank of a run; its exit code."""
    got: list[int] = []
    if first and number == 3 and "BAD" in os.environ:
        return int(os.environ["BAD"])
    if not first:
        return 0
    if "LATE" in os.environ:
        (SEEN / f"ready{number}").touch()
        time.sleep(1.5)
    signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    (SEEN / f"ready{number}").touch()
    while not got:
        time.sleep(0.02)
    time.sleep(0.7)
    (SEEN / f"stopped{number}").write_text(str(len(got)))
    return 0


def preflight(number: int) -> int:
    """A rank of a preflight; its exit code."""
    told = SEEN / f"told{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    code = int(os.environ.get("PREFLIGHT", "0"))
    if number == 0:
        print("Preflight of run.yaml on 4 ranks", flush=True)
        (SEEN / "preflight").touch()
        time.sleep(float(os.environ.get("SLOW", "0")))
        usual = "1 of 10 checks failed" if code else "all 10 checks passed"
        print("preflight:", os.environ.get("VERDICT", usual), flush=True)
        told.touch()
    while not told.exists():  # all ranks end with rank 0's verdict
        time.sleep(0.02)
    return code


def main(words: list[str]) -> int:
    """torchrun: the ranks of this node; 1 if one failed."""
    print("line:", *words, flush=True)
    print("set:", *(os.environ.get(name, "-") for name in NAMES))
    sys.stdout.flush()
    assert words[:2] == ["-m", "torch.distributed.run"]
    at = words.index("--max-restarts") + 2
    options = dict(zip(words[2:at:2], words[3:at:2], strict=True))
    wrong = meet(options)
    if wrong:
        print(wrong, flush=True)
        return 1
    count, node = int(options["--nproc-per-node"]), int(os.environ["SLURM_NODEID"])
    first = int(os.environ.get("SLURM_RESTART_COUNT", "0")) < int(os.environ.get("LONG", "1"))
    children = {}
    for local in range(count):
        number = node * count + local
        child = os.fork()
        if child == 0:
            os._exit(preflight(number) if "--preflight" in words else rank(number, first))
        children[child] = number
    while children:
        child, status = os.wait()
        number = children.pop(child)
        if status:
            code = os.waitstatus_to_exitcode(status)
            print("Root Cause (first observed failure):\n[0]:\n  time      : 2026-01-01_00:00:01")
            print(f"  host      : h\n  rank      : {number} (local_rank: 1)", flush=True)
            print(f"  exitcode  : {code} (pid: {child})", flush=True)
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
