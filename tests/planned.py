"""Intervals that rows see, of every shape that plans make and of shapes that none makes."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatron_bp.data.document import Document
from megatron_bp.sequence.packing import pack
from megatron_bp.sequence.plan import SequenceOptions, make_plan
from megatron_bp.sequence.visibility import visibility

Intervals = tuple[NDArray[np.int32], NDArray[np.int32]]
MODES = [(1, 1), (2, 2), (4, 4), (2, 1), (4, 2), (1, 2)]


def dense(lo: NDArray[np.int32], hi: NDArray[np.int32], keys: int) -> NDArray[np.bool_]:
    """bool[n, keys]: who sees whom."""
    key = np.arange(keys)
    return (key >= lo[:, None]) & (key < hi[:, None])


def random_intervals(seed: int, rows: int, keys: int) -> Intervals:
    """Rows without order, or ascending in runs; some intervals of one key, some of all."""
    rng = np.random.default_rng(seed)
    lo = rng.integers(0, keys, rows)
    hi = lo + 1 + rng.integers(0, keys - lo)
    kind = seed % 4
    if kind == 1:  # a staircase with random steps
        lo, hi = np.zeros(rows), np.sort(hi)
    elif kind == 2:  # both ends ascend
        lo = np.sort(lo)
        hi = np.maximum.accumulate(np.maximum(hi, lo + 1))
    elif kind == 3:  # one key each, or all
        every = rng.random(rows) < 0.5
        lo, hi = np.where(every, 0, lo), np.where(every, keys, lo + 1)
    return lo.astype(np.int32), hi.astype(np.int32)


def planned_intervals(
    lengths: list[int], block: int, window: int | None = None
) -> Iterator[tuple[str, Intervals]]:
    """What rows of every rank see in every mode, without the rows that see nothing.

    Over all clean positions, over one rank's clean positions (as attention has its parts: keys that
    a rank holds are counted in its own order), and over the sample's corrupted rows.
    """
    documents = [
        Document(np.zeros(length, np.int32), np.ones(length, bool), key)
        for key, length in enumerate(lengths)
    ]
    sample = pack(documents, sum(lengths))
    for bp, cp in MODES:
        plan = make_plan(sample, SequenceOptions(block, bp, cp))
        for rank in range(max(bp, cp)):
            held = plan.clean_positions(rank)
            rows = visibility(plan, held, plan.corrupted_places(rank), window)
            lo, hi = rows.clean_lo.numpy(), rows.clean_hi.numpy()
            name = f"bp{bp} cp{cp} rank {rank}"
            of_held = (np.searchsorted(held, x).astype(np.int32) for x in (lo, hi))
            own = rows.own_lo.numpy(), rows.own_hi.numpy()
            for keys, pair in {"clean": (lo, hi), "held": of_held, "own": own}.items():
                some = seeing(*pair)
                if len(some[0]):
                    yield f"{name} {keys}", some


def seeing(lo: NDArray[np.int32], hi: NDArray[np.int32]) -> Intervals:
    """The intervals that are not empty."""
    return lo[hi > lo], hi[hi > lo]
