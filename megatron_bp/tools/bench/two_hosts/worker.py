"""One rank: imports all once, then forks for each run and trains with the real pretrain_bdlm.py.

    python -m megatron_bp.tools.bench.two_hosts.worker PLACE

Orders come as lines on stdin; for each there go out the run's process id and then its exit status.
A start without the imports, which take most of a minute for several ranks on few cores, is what
lets many short runs take turns.
"""

import functools
import inspect
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_bp import cpu
from megatron_bp.tools.bench.crossing import Crossing, counting
from megatron_bp.tools.bench.two_hosts.link import sent_bytes
from megatron_bp.tools.bench.two_hosts.orders import GO, Order, Place
from megatron_bp.tools.bench.waits import Waits, watching


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until stdin ends."""
    (line,) = sys.argv[1:] if argv is None else argv
    place = Place.read(line)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    cpu.install()
    import megatron.core.tokenizers.text  # noqa: F401  # and with it transformers

    import pretrain_bdlm  # noqa: F401
    from megatron_bp.arguments.flags import full_parser
    from megatron_bp.training import step  # noqa: F401

    full_parser()
    print("ready", file=answers)
    for order in map(Order.read, sys.stdin):
        child = os.fork()
        if child == 0:
            os._exit(_run(order, place))
        print(child, file=answers)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers)


def _run(order: Order, place: Place) -> int:
    """Train as ordered, in this process alone; the exit status."""
    log = os.open(order.log(place.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ["MASTER_PORT"] = str(order.port)
    warnings.simplefilter("ignore")
    try:
        import pretrain_bdlm

        with watching() as waits, counting(place.hosts) as crossing:
            record(order, place, waits, crossing)
            pretrain_bdlm.main(list(order.flags))
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def record(order: Order, place: Place, waits: Waits, crossing: Crossing) -> None:
    """Write a row at the end of each step, and pause after the one that is ordered.

    A row has the seconds in which this rank waited for K/V and their gradients, the bytes that it
    handed to the other host (all, and attention's), and what the host's end of the link sent, on
    the first rank of each host; null on the others. What an evaluation does counts for the step
    after it.
    """
    from megatron.training import training

    log = training.training_log
    signature = inspect.signature(log)
    file = order.steps(place.rank).open("w", encoding="utf-8")
    first = place.local_rank == 0
    before = sent_bytes(place.interface) if first else 0

    @functools.wraps(log)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        nonlocal before
        iteration = int(signature.bind(*args, **kwargs).arguments["iteration"])
        now = sent_bytes(place.interface) if first else 0
        waited, handed = waits.take(), crossing.take()
        row = {
            "iteration": iteration,
            "wait_seconds": waited.seconds,
            "waits": waited.calls,
            "handed_bytes": handed.bytes,
            "handed_by_attention": handed.attention,
            "link_bytes": now - before if first else None,
        }
        before = now
        print(json.dumps(row), file=file, flush=True)
        result = log(*args, **kwargs)
        if iteration == order.pause_after:
            go = Path(order.folder) / GO
            while not go.exists():
                time.sleep(0.01)
        return result

    training.training_log = training_log


if __name__ == "__main__":
    main()
