"""Rows and the keys [lo, hi) that they see: random ones, and those of plans."""

from collections.abc import Iterator

import numpy as np
from cases import CASES, Case, sample_of

from megatron_bp.sequence.plan import SequenceOptions, make_plan
from megatron_bp.sequence.visibility import visibility

Intervals = tuple[np.ndarray, np.ndarray]

KINDS = ("random", "growing", "blocks", "gaps", "window", "copies", "rectangle", "few keys")


def random_intervals(kind: str, seed: int) -> Intervals:
    """int32 lo and hi of up to some hundreds of rows, none empty."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    rows, keys = rng.integers(1, 400), rng.integers(1, 600)
    if kind in ("blocks", "gaps", "window", "copies"):
        return _of_documents(kind, rng)
    if kind == "rectangle":
        lo = np.zeros(rows)
        hi = np.full(rows, keys)
    elif kind == "few keys":
        lo = np.sort(rng.integers(0, keys, rows))
        hi = lo + rng.integers(1, 40, rows)
    else:
        lo = rng.integers(0, keys, rows)
        hi = lo + 1 + rng.integers(0, keys - lo)
        if kind == "growing":
            lo, hi = np.sort(lo), np.sort(hi)
    return lo.astype(np.int32), hi.astype(np.int32)


def _of_documents(kind: str, rng: np.random.Generator) -> Intervals:
    """Clean rows, then corrupted ones, of some packed documents, over clean keys."""
    block = int(rng.choice([1, 2, 5, 16, 32, 48, 100, 128, 200]))
    window = int(rng.integers(1, 400)) if kind == "window" else 1000
    lo, hi, before = [], [], 0
    clean_relation = rng.choice(["block", "token"])
    for length in rng.integers(1, 300, rng.integers(1, 4)):
        place = np.arange(length)
        start = place // block * block
        stop = np.minimum(start + block, length) if clean_relation == "block" else place + 1
        lo.append(before + np.maximum(0, place - (window - 1)))
        hi.append(before + stop)
        copies = int(rng.integers(1, 5)) if kind == "copies" else 1
        place = np.concatenate([np.tile(x, copies) for x in np.split(place, np.unique(start)[1:])])
        start = place // block * block
        lo.append(before + np.minimum(start, np.maximum(0, place - (window - 1))))
        hi.append(before + start)
        before += int(length)
    all_lo = np.concatenate(lo[::2] + lo[1::2])
    all_hi = np.concatenate(hi[::2] + hi[1::2])
    kept = all_hi > all_lo
    if kind == "gaps":
        kept &= np.repeat(rng.random(len(kept) // 7 + 1) < 0.7, 7)[: len(kept)]
    if not kept.any():
        return np.zeros(1, np.int32), np.ones(1, np.int32)
    return all_lo[kept].astype(np.int32), all_hi[kept].astype(np.int32)


LONG = {
    "long": Case((700,), 32),
    "long, ragged, packed": Case((333, 150, 61, 40), 16, padding=9),
    "long, token-causal": Case((500, 90), 32, clean_relation="token"),
    "long, window": Case((600,), 32, window=200),
    "long, window from blocks": Case((600,), 64, window=200, window_anchor="block"),
    "long, short blocks": Case((410, 300), 4),
    "long, large blocks": Case((400, 150), 128),
    "long, causal units": Case((300, 170), 48, own_relation="causal"),
    "long, responses": Case((600,), 32, responses=(((40, 170), (300, 420), (560, 600)),)),
    "long, grid of responses": Case(
        (600,), 32, responses=(((40, 170), (300, 420), (560, 600)),), grid="response"
    ),
}
MODES = ((1, 1), (2, 2), (4, 4), (4, 1), (4, 2), (1, 2), (1, 4))  # BP, CP


def plan_parts(case: Case, degrees: tuple[int, int], copies: int = 1) -> Iterator[Intervals]:
    """What rows of each rank see of the clean and the corrupted keys of each rank of its group."""
    options = SequenceOptions(
        case.block_size,
        *degrees,
        clean_relation=case.clean_relation,
        own_relation=case.own_relation,
        score_clean="supervised",
        grid=case.grid,
        window_anchor=case.window_anchor,
        copies=copies,
    )
    plan = make_plan(sample_of(case), options)
    for rank in range(options.slot):
        rows = plan.rows_of(rank)
        seen = visibility(plan, rows.clean, rows.corrupted, case.window, rows.filling)
        of_clean = (seen.clean_lo.numpy(), seen.clean_hi.numpy())
        of_own = (seen.own_lo.numpy(), seen.own_hi.numpy())
        for other in plan.shard_group(rank):
            held = plan.rows_of(other)
            for (lo, hi), keys in ((of_clean, held.clean), (of_own, held.corrupted)):
                start, stop = np.searchsorted(keys, lo), np.searchsorted(keys, hi)
                kept = stop > start
                if kept.any():
                    yield start[kept].astype(np.int32), stop[kept].astype(np.int32)


ALL_CASES = CASES | LONG
