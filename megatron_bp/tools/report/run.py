"""A run's own part in its report: what it puts on record when it starts, and writing it at its end.

Neither may fail the run: whatever goes wrong here is printed.
"""

import os
import platform
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatron_bp import __version__, arguments
from megatron_bp.arguments.task import layout_of, task_of
from megatron_bp.planning.step import attention_bytes, counted, most_memory
from megatron_bp.tools.bench.machine import name_of
from megatron_bp.tools.dry_run.facts import parameters_of
from megatron_bp.tools.report.command import write
from megatron_bp.training import journal


@contextmanager
def reported(args: Namespace) -> Iterator[None]:
    """Keeps the journal of a run with --save, and writes its report when it ends, however it does.

    Args:
        args: Megatron's validated arguments.
    """
    if not args.save or args.skip_train:
        yield
        return
    folder = Path(args.save)
    journal.start(folder, args.rank, lambda: arguments.steps_done(args))
    writes = args.rank == args.world_size - 1  # as the metrics
    if writes:
        journal.note("start", **_facts(args))
    how = "it came to its end"
    try:
        yield
    except SystemExit as end:
        how = "it was told to stop" if not end.code else f"it ended with status {end.code}"
        raise
    except BaseException as error:
        first, *_ = [*str(error).strip().splitlines(), ""]  # torch's errors have a stack below
        how = f"it failed: {type(error).__name__}: {first}"
        raise
    finally:
        if writes:
            journal.note("end", how=how)
            # In a thread, where no exception is being handled: one that matplotlib catches and
            # keeps would keep the run's own as its context, and all that its frames hold.
            thread = threading.Thread(target=_write, args=(folder,))
            thread.start()
            thread.join()


def _facts(args: Namespace) -> dict[str, Any]:
    try:
        return started(args)
    except Exception as error:  # a run is worth more than what is said of it
        journal.warn(f"its start is not on record: {type(error).__name__}: {error}")
        return {}


def started(args: Namespace) -> dict[str, Any]:
    """What the journal tells of a start: the machine, and what was predicted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    facts = {
        "train_iters": args.train_iters,
        "ranks": args.world_size,
        "hosts": f"{args.world_size // local if local else 1} (this one: {platform.node()})",
        "machine": name_of(torch.device(device)),
        "device": device,
        "versions": {
            "megatron_bp": __version__,
            "megatron-core": version("megatron-core"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    if args.metrics_file is not None:
        facts["metrics"] = str(Path(args.metrics_file).resolve())
    try:
        facts["predicted"] = predicted(args)
    except Exception as error:  # a run is worth more than what is said of it
        journal.warn(f"its memory and traffic are not predicted: {type(error).__name__}: {error}")
    return facts


def predicted(args: Namespace) -> dict[str, int]:
    """Parameters, bytes of the GPU that holds most, and bytes of attention in a step, all ranks."""
    if args.objective == "ar":
        return {}
    task, layout = task_of(args), layout_of(args)
    counts = counted(task, layout)
    _, held = most_memory(task, layout, counts)
    return {
        "parameters": parameters_of(args, task),
        "memory_bytes": held.total - (held.parts["process"] if torch.cuda.is_available() else 0),
        "attention_bytes": attention_bytes(task, layout, counts),
    }


def _write(folder: Path) -> None:
    try:
        path = write(folder)
    except Exception as error:  # the run itself is done
        journal.warn(f"the report of the run could not be written: {type(error).__name__}: {error}")
    else:
        print(f"megatron_bp: the report of the run is {path}", flush=True)
