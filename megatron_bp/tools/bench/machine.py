"""What every benchmark measures with: the machine's name, time and peak memory of a call."""

import ctypes
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

PROCESS = Path("/proc/self")


class Cost(NamedTuple):
    """What a call took.

    Attributes:
        seconds: of wall time, the device's work included.
        cpu_seconds: of processor time of this process, all threads.
        peak_bytes: by which the peak exceeded what was held before; None if it cannot be told. On
            the CPU of the process's resident set, on CUDA of the memory that torch allocated.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int | None


def processor() -> str:
    """The processor's name and how many cores there are."""
    name = platform.processor() or platform.machine()
    try:
        told = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        told = None
    return f"{told[1] if told else name}, {os.cpu_count()} cores"


def name_of(device: torch.device) -> str:
    """The name of what a benchmark runs on."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return processor()


def cost(call: Callable[[], object], device: torch.device | None = None) -> Cost:
    """What a call takes; its work on `device` (None: the CPU) is waited for.

    The peak of the resident set is one that Linux lets a process reset. Freed memory is given back
    first, so that what an earlier call left does not hide this one's need.
    """
    on_cuda = device is not None and device.type == "cuda"
    before = None
    if on_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        try:
            ctypes.CDLL(None).malloc_trim(0)
            (PROCESS / "clear_refs").write_text("5")
            before = _of_status("VmRSS")
        except (OSError, AttributeError):
            pass
    begin, begin_cpu = time.perf_counter(), time.process_time()
    call()
    if on_cuda:
        torch.cuda.synchronize(device)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    if before is None:
        return Cost(seconds, cpu_seconds, None)
    peak = torch.cuda.max_memory_allocated(device) if on_cuda else _of_status("VmHWM")
    return Cost(seconds, cpu_seconds, peak - before)


def measure(call: Callable[[], object]) -> tuple[float, int | None]:
    """(seconds, peak bytes) of a call on the CPU; see `Cost`."""
    taken = cost(call)
    return taken.seconds, taken.peak_bytes


def _of_status(name: str) -> int:
    """Bytes that /proc/self/status tells under this name."""
    found = re.search(rf"{name}:\s*(\d+) kB", (PROCESS / "status").read_text())
    assert found is not None
    return int(found[1]) * 1024
