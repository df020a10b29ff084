"""A rank that fails ends, whatever its data loaders make of SIGTERM."""

import subprocess
import sys

FAILS = """
import atexit, multiprocessing, signal, time
from megatron_bp.training.host import end_loaders

signal.signal(signal.SIGTERM, lambda *_: None)  # as Megatron's, which a loader inherits

def load():
    while True:
        time.sleep(1)

loader = multiprocessing.get_context("fork").Process(target=load, daemon=True)
loader.start()
atexit.register(end_loaders)
raise ValueError("a step failed")
"""


def test_loaders_that_catch_sigterm_end_with_their_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FAILS], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "ValueError: a step failed" in done.stderr
