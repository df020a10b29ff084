"""pretrain_bdlm.py as scripts/slurm/ starts it, which notes where it runs and can be slow or die.

In the folder SEEN every rank leaves a file with its place and torchrun's command line. SLOW is
STEP:SECONDS, a step that takes longer, and DIE is RANK:STEP, killed before that step; both in the
first start alone.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from entry import pretrain

from megatron_bp import cpu

if cpu.needed():
    cpu.install()

SEEN = Path(os.environ["SEEN"])
FIRST = "SLURM_RESTART_COUNT" not in os.environ


def pair(name: str) -> tuple[int, float]:
    """Two numbers of a variable; none that ever come up if it is not set, or not for this start."""
    first, second = (os.environ.get(name, "-1:0") if FIRST else "-1:0").split(":")
    return int(first), float(second)


def before_step(rank: int, step: int) -> None:
    slow, seconds = pair("SLOW")
    if step == slow:
        (SEEN / f"slow{rank}").touch()
        time.sleep(seconds)
    if (rank, step) == pair("DIE"):
        os.kill(os.getpid(), signal.SIGKILL)


def note(rank: int, world: int) -> None:
    launcher = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
    endpoint = launcher[launcher.index("--rdzv-endpoint") + 1]
    names = ("SLURMD_NODENAME", "SLURM_NODEID", "LOCAL_RANK", "MASTER_ADDR", "SET_UP")
    seen = {name: os.environ.get(name) for name in names}
    start = os.environ.get("SLURM_RESTART_COUNT", "0")
    seen |= {"rank": rank, "world": world, "endpoint": endpoint, "start": start}
    (SEEN / f"rank{rank}_of_start{start}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    note(rank, world)
    sys.exit(pretrain(rank, world, sys.argv[1:], before_step)[0])
