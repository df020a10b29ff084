"""Time in which a rank stands still for attention's communication, and for nothing else.

Everything that attention sends is waited for through `parallel/collectives.Pending.wait`: K/V on
their way and their gradients. Megatron's own reductions do not pass there, and what others than
attention wait for is left out. What is timed is how long the call blocks, so what was hidden behind
computation does not count; waiting for a rank that is late counts, as it does for the step.

On CUDA the call returns before the data is there: this measures nothing on a GPU.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from torch import Tensor

from megatron_bp.parallel.collectives import Pending
from megatron_bp.tools.bench.callers import called_by_attention


@dataclass
class Waits:
    """What this rank has waited since the last `take`."""

    seconds: float = 0.0
    calls: int = 0

    def take(self) -> "Waits":
        """What was waited; begins anew."""
        taken = Waits(self.seconds, self.calls)
        self.seconds, self.calls = 0.0, 0
        return taken


@contextmanager
def watching() -> Iterator[Waits]:
    """Counts the waits of this process."""
    waits, original = Waits(), Pending.wait

    def wait(self: Pending) -> Tensor:
        if not self.works or not called_by_attention():  # no works: it is there already
            return original(self)
        begin = time.perf_counter()
        try:
            return original(self)
        finally:
            waits.seconds += time.perf_counter() - begin
            waits.calls += 1

    with mock.patch.object(Pending, "wait", wait):
        yield waits
