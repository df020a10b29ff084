"""Whether a rank's estimated peak fits what its device has."""

import os
import re
from argparse import Namespace
from pathlib import Path

import torch

from megatron_bp.arguments.task import layout_of, task_of
from megatron_bp.planning import rates
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.memory import memory
from megatron_bp.planning.step import counted

SPARE = 0.1  # of a device's memory has to stay free
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def fits(needed: int, free: int, total: int, of: str) -> str:
    """What is worth telling of a peak that fits.

    Args:
        needed: bytes, estimated.
        free: bytes that are free now.
        total: bytes that the device has.
        of: the device, in words.

    Raises:
        ValueError: it does not.
    """
    usable = free - SPARE * total
    text = (
        f"{gib(needed)} at the peak by estimate, {gib(free)} free of {gib(total)} of {of}, of "
        f"which {SPARE:.0%} is to stay free"
    )
    if needed > usable:
        raise ValueError(
            f"{text}: {gib(needed - usable)} too much; `python -m megatron_bp.tools.plan` looks "
            f"for a layout that fits"
        )
    return text


def gib(size: float) -> str:
    """Bytes in words."""
    return f"{size / 2**30:,.2f} GiB"


def place(rank: int, world: int, layout: Layout) -> tuple[int, int]:
    """(pipeline stage, slot rank) of a rank: tensor-parallel ranks are nearest, stages farthest."""
    return rank // (world // layout.pp), rank // layout.tp % layout.slot


def needed(args: Namespace) -> int:
    """Bytes of this rank at its peak, as estimated; on a GPU what torch allocates."""
    task, layout = task_of(args), layout_of(args)
    _, uncounted = rates.read()
    at = place(args.rank, args.world_size, layout)
    held = memory(task, layout, counted(task, layout), *at, uncounted)
    return held.total - (held.parts["process"] if torch.cuda.is_available() else 0)


def there(local_ranks: int) -> tuple[int, int, str]:
    """Bytes free and in all, and of what: this rank's GPU, or its part of the machine."""
    if torch.cuda.is_available():
        local, shown = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= shown:
            raise ValueError(
                f"LOCAL_RANK {local}, and {shown} GPUs are shown to this process: start as many "
                f"ranks a node as it has GPUs (torchrun --nproc-per-node), or show it more"
            )
        free, total = torch.cuda.mem_get_info(local)
        return free, total, f"GPU {local}, {torch.cuda.get_device_name(local)}"
    total = machine_bytes() // local_ranks
    return total, total, f"this machine (no GPU) for each of its {local_ranks} ranks"


def machine_bytes() -> int:
    """Bytes of memory of this machine, or of the container that this process is in."""
    found = re.search(r"MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    sizes = [int(found[1]) * 1024]
    for limit in LIMITS:
        try:
            sizes.append(int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(sizes)


def check_memory(args: Namespace) -> str:
    """What is worth telling of this rank.

    Raises:
        ValueError: too little is there.
    """
    free, total, of = there(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if args.objective == "ar":
        return f"mode ar is not estimated; {gib(free)} free of {gib(total)} of {of}"
    return fits(needed(args), free, total, of)
