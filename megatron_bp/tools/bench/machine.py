"""What every benchmark measures with: the machine's name, time and peak memory of a call."""

import ctypes
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path

PROCESS = Path("/proc/self")


def processor() -> str:
    """The processor's name and how many cores there are."""
    name = platform.processor() or platform.machine()
    try:
        told = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        told = None
    return f"{told[1] if told else name}, {os.cpu_count()} cores"


def measure(call: Callable[[], object]) -> tuple[float, int | None]:
    """(seconds, bytes by which the process's peak exceeded what it held before) of a call.

    The peak is the resident set's, which Linux lets a process reset; None where it does not. Freed
    memory is given back first, so that what an earlier call left does not hide this one's need.
    """
    before = None
    try:
        ctypes.CDLL(None).malloc_trim(0)
        (PROCESS / "clear_refs").write_text("5")
        before = _of_status("VmRSS")
    except (OSError, AttributeError):
        pass
    begin = time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    return seconds, None if before is None else _of_status("VmHWM") - before


def _of_status(name: str) -> int:
    """Bytes that /proc/self/status tells under this name."""
    found = re.search(rf"{name}:\s*(\d+) kB", (PROCESS / "status").read_text())
    assert found is not None
    return int(found[1]) * 1024
