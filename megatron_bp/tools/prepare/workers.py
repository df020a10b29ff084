"""Batches through an encoder, in order, in this process or in several."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from megatron_bp.tools.prepare.encoding import Encoded, Encoder
from megatron_bp.tools.prepare.options import Options
from megatron_bp.tools.prepare.reading import Batch
from megatron_bp.tools.prepare.tokenizing import build


def encoded_in_order(
    encoder: Encoder, batches: Iterable[Batch], options: Options
) -> Generator[tuple[Batch, Encoded]]:
    """Yield each batch with what became of it, in order, whatever the number of workers."""
    if options.workers == 1:
        for batch in batches:
            yield batch, encoder(batch.items)
        return
    context = multiprocessing.get_context("spawn")  # Megatron and tokenizers start threads
    pool = ProcessPoolExecutor(options.workers, context, _start_worker, (options,))
    waiting: deque[tuple[Batch, Future[Encoded]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_work, batch.items)))
            if len(waiting) >= 4 * options.workers:  # memory stays bounded
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
    except BrokenProcessPool as error:
        raise ValueError(
            f"one of --workers {options.workers} died, most likely for want of memory: use fewer."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_encoder: Encoder | None = None  # a worker's own


def _start_worker(options: Options) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too and ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(build(options.tokenizer_flags), options)


def _end_with_parent() -> None:
    """A parent that was killed leaves no workers behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(items: list[tuple[int, bytes]]) -> Encoded:
    assert _encoder is not None
    return _encoder(items)
