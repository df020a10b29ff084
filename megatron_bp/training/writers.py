"""Processes that write checkpoints end with their rank, and a rank does not wait for a dead one.

Megatron 0.19.2 starts a process for the results of its saves, and one more that writes where they
are asynchronous. Both outlive a rank that is killed: half a gigabyte each, and the writer may still
write into a checkpoint that the next run saves anew. A rank in turn waits forever for a writer that
died, without a word.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.managers import SyncManager
from typing import Any

import torch

from megatron_bp import cpu

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_closing = threading.Event()  # the writer of this rank is being ended on purpose


def install(exit_signal: int, asynchronous: bool, told: Callable[[], str]) -> None:
    """Mend how checkpoints are written, before Megatron starts anything.

    Args:
        exit_signal: asks the ranks to save and end; the writers must not end before.
        asynchronous: saves are written by a process of their own.
        told: what of a run is left when its writer died, for the message.
    """
    files: Any = importlib.import_module(f"{_STRATEGIES}.filesystem_async")
    writer = files.FileSystemWriterAsync
    plan = writer.get_save_function_and_args

    def save_function_and_args(self: Any) -> tuple[Any, Any, list[Any]]:
        save, preload, arguments = plan(self)
        return (save and functools.partial(write, *save.args)), preload, arguments

    writer.get_save_function_and_args = save_function_and_args
    files.get_write_results_queue = _ResultsQueue(exit_signal, asynchronous)
    if not asynchronous:
        return
    processes: Any = importlib.import_module(f"{_STRATEGIES}.async_utils")
    caller = processes.PersistentAsyncCaller
    caller.async_loop = staticmethod(write_until_done)
    start, close = caller._get_process.__func__, caller.close

    def started(cls: Any, *args: Any, **kwargs: Any) -> Any:
        fresh = cls._persistent_process is None
        with _blocked(exit_signal):
            process = start(cls, *args, **kwargs)
        if fresh:
            _closing.clear()
            threading.Thread(target=_watch, args=(process, told), daemon=True).start()
        return process

    def closed(self: Any, *args: Any, **kwargs: Any) -> None:
        _closing.set()
        close(self, *args, **kwargs)

    caller._get_process = classmethod(started)
    caller.close = closed
    atexit.register(_end_writer, processes)


def write(
    transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: Any
) -> None:
    """Write each bucket to its file, and put into `results` what was written, or the error.

    Megatron's own loses the error's text, and with several buckets puts nothing at all.
    """
    files: Any = importlib.import_module(f"{_STRATEGIES}.filesystem_async")
    more = {"use_msc": True} if use_msc else {}

    def one(number: int) -> Any:
        _, done = files.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, buckets[number], None, None, True, **more
        )
        if isinstance(done, Exception):
            raise done
        return done

    try:
        with files._disable_gc(), ThreadPoolExecutor(len(buckets)) as pool:
            written = dict(enumerate(pool.map(one, range(len(buckets)))))
    except Exception as error:
        # The file that broke off is part of a cycle. Torch's writer of it, freed by the collector
        # after what it writes to, ends the process with a fault, so it is never collected.
        gc.freeze()
        results.put(RuntimeError(f"rank {rank}: {_reason(error)}"))
    else:
        results.put(written)


def _reason(error: BaseException) -> str:
    """What the system said, if it did: torch tells of a full disk as an unexpected position."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__cause__ or link.__context__
    return str(error) if link is None else link.strerror or str(link)


def write_until_done(*args: Any) -> None:
    """What a rank's writer process does, until the rank closes it or is gone."""
    _stay_with_rank()
    if cpu.needed():  # all that the loop asks of CUDA; cpu.install would import Megatron's training
        here = {"device_count": lambda: 1, "set_device": lambda device: None}
        for name, function in (here | {"synchronize": lambda: None}).items():
            setattr(torch.cuda, name, function)
    processes: Any = importlib.import_module(f"{_STRATEGIES}.async_utils")
    processes.PersistentAsyncCaller.async_loop(*args)  # here Megatron's own


class _ResultsQueue:
    """Megatron's get_write_results_queue: a plain queue where the rank itself writes."""

    def __init__(self, exit_signal: int, asynchronous: bool) -> None:
        self._exit_signal = exit_signal
        self._asynchronous = asynchronous
        self._queue: Any = None

    def __call__(self, mp_mode: str = "fork") -> Any:
        if self._queue is None and self._asynchronous:
            manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
            with _blocked(self._exit_signal):
                manager.start(_stay_with_rank)
            self._queue = manager.Queue()
        elif self._queue is None:
            self._queue = queue.Queue()
        return self._queue


@contextlib.contextmanager
def _blocked(exit_signal: int) -> Iterator[None]:
    """Processes started here never get the signal (torchrun sends it to all); the rank does."""
    multiprocessing.resource_tracker.ensure_running()  # its start would unblock SIGTERM
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {exit_signal})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stay_with_rank() -> None:
    """In a process of a rank: end when the rank does, and not by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank, daemon=True).start()


def _end_with_rank() -> None:
    rank = multiprocessing.parent_process()
    assert rank is not None
    multiprocessing.connection.wait([rank.sentinel])
    os._exit(1)


def _watch(process: Any, told: Callable[[], str]) -> None:
    """End this rank when its writer ends unasked: nothing in Megatron's loop would notice."""
    multiprocessing.connection.wait([process.sentinel])
    if _closing.wait(0.5):
        return
    print(
        f"pretrain_bdlm.py: error: rank {os.environ.get('RANK', '0')}: the process that writes its "
        f"checkpoints (pid {process.pid}) is gone; it may have been killed, for want of memory as "
        f"a rule. {told()}",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(1)


def _end_writer(processes: Any) -> None:
    """At the end of a rank that failed, so did not close its writer: waiting could last forever."""
    _closing.set()
    process = processes.PersistentAsyncCaller._persistent_process
    if process is not None:
        process.kill()
    caller = processes.AsyncCallsQueue._persistent_caller
    if caller is not None:
        caller.process = None
