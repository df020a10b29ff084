"""Visibility cut into parts: for each rank's clean or corrupted keys, which rows see which.

Made once a micro-batch on the host, used by every layer. What a rank holds stands in its memory in
ascending order, so the keys that it holds of any interval are one interval of its memory: one part
covers all its clean keys, and one its corrupted keys. Knows no model and no process group.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_bp.attention.kernels.contract import Intervals, row_tiles
from megatron_bp.attention.merge import Rows
from megatron_bp.sequence.plan import RankRows
from megatron_bp.sequence.visibility import Visibility


@dataclass(frozen=True)
class Run:
    """Keys [start, stop) among the rows of rank `rank` of the clean shard group."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Part:
    """Some local rows and the run of keys that they see part of: `pairs` (row, key) in all.

    The number is kept from the host: asking `spec` for it would wait for the device.
    """

    rows: Rows
    run: Run
    spec: Intervals
    pairs: int


@dataclass(frozen=True, eq=False)
class View:
    """All that attention needs of one Visibility on one rank.

    Attributes:
        corrupted: over this rank's own corrupted rows. Needs no exchange, as the next.
        clean: over this rank's own clean rows.
        remote: over rows of other ranks, as the exchange brings them.
        num_sent: of this rank's rows the first `num_sent` are sent to the others.
        num_rows: all of this rank's rows.
    """

    corrupted: tuple[Part, ...]
    clean: tuple[Part, ...]
    remote: tuple[Part, ...]
    num_sent: int
    num_rows: int


def make_view(
    visible: Visibility,
    shards: tuple[RankRows, ...],
    rank: int,
    tile_rows: int,
    device: torch.device,
) -> View:
    """The parts of `visible` on rank `rank` of the clean shard group.

    Args:
        visible: what this rank's rows see.
        shards: the rows of each rank of the group. Of another rank only what it sends is seen.
        rank: this rank.
        tile_rows: rows of a tile of the kernel.
        device: where the kernel works.
    """
    clean = (visible.clean_lo.numpy(), visible.clean_hi.numpy())
    own = (visible.own_lo.numpy(), visible.own_hi.numpy())
    corrupted: list[Part] = []
    local: list[Part] = []
    remote: list[Part] = []
    for holder, shard in enumerate(shards):
        mine = holder == rank
        part = _part(*clean, Run(holder, 0, len(shard.clean)), shard.clean, tile_rows, device)
        (local if mine else remote).extend(part)
        if mine or shard.num_sent > shard.num_clean:
            run = Run(holder, shard.num_clean, shard.num_rows)
            part = _part(*own, run, shard.corrupted, tile_rows, device)
            (corrupted if mine else remote).extend(part)
    here = shards[rank]
    held = sum(part.pairs for part in (*corrupted, *local, *remote))
    assert held == visible.pairs(), "a row sees keys that no rank of its clean shard group holds"
    return View(tuple(corrupted), tuple(local), tuple(remote), here.num_sent, here.num_rows)


def _part(
    lo: NDArray[np.int32],
    hi: NDArray[np.int32],
    run: Run,
    held: NDArray[Any],
    tile_rows: int,
    device: torch.device,
) -> list[Part]:
    """The part of the rows that see some key of `held`, if any does.

    Args:
        lo: what each row sees, [lo, hi).
        hi: see lo.
        run: where the held keys stand.
        held: ascending, in the numbers of lo and hi.
        tile_rows: see `make_view`, as is device.
        device: see there.
    """
    start, stop = np.searchsorted(held, lo), np.searchsorted(held, hi)
    seeing = np.flatnonzero(stop > start)
    if len(seeing) == 0:
        return []
    first, last = int(start[seeing].min()), int(stop[seeing].max())
    lo = (start[seeing] - first).astype(np.int32)
    hi = (stop[seeing] - first).astype(np.int32)
    spec = Intervals(
        lo=torch.from_numpy(lo).to(device),
        hi=torch.from_numpy(hi).to(device),
        tiles=row_tiles(lo, hi, tile_rows),
    )
    rows: Rows
    if seeing[-1] - seeing[0] + 1 == len(seeing):
        rows = slice(int(seeing[0]), int(seeing[-1]) + 1)
    else:
        rows = torch.from_numpy(seeing).to(device)
    pairs = int((hi - lo).sum(dtype=np.int64))
    return [Part(rows, Run(run.rank, run.start + first, run.start + last), spec, pairs)]
