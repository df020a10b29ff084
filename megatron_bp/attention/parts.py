"""Visibility cut into parts: for each run of keys, which rows see it and where.

Made once a micro-batch on the host, used by every layer. A run of keys is contiguous both in the
packed row and in the memory that holds it: this rank's corrupted rows, one of this rank's clean
chunks, or a clean chunk that the exchange brings. Knows no model and no process group.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_bp.attention.kernels.contract import Intervals, row_tiles
from megatron_bp.attention.merge import Rows
from megatron_bp.sequence.partition import Chunk
from megatron_bp.sequence.visibility import Visibility


@dataclass(frozen=True)
class Run:
    """Keys [start, stop) among the clean rows of CP rank `rank`, or among this rank's own rows."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Part:
    """Some local rows and the run of keys that they see part of."""

    rows: Rows
    run: Run
    spec: Intervals


@dataclass(frozen=True, eq=False)
class View:
    """All that attention needs of one Visibility on one rank.

    Attributes:
        own: over this rank's rows: its corrupted rows, then its clean chunks. Needs no exchange.
        remote: over clean rows of other ranks, as the exchange brings them.
        num_clean, num_rows: this rank's clean rows and all of its rows.
    """

    own: tuple[Part, ...]
    remote: tuple[Part, ...]
    num_clean: int
    num_rows: int


def shard_sizes(chunks: tuple[Chunk, ...], ranks: int) -> tuple[int, ...]:
    """Clean rows of each CP rank (rows that only fill up are not counted)."""
    return tuple(sum(c.stop - c.start for c in chunks if c.rank == r) for r in range(ranks))


def make_view(
    visible: Visibility,
    chunks: tuple[Chunk, ...],
    rank: int,
    tile_rows: int,
    device: torch.device,
) -> View:
    """The parts of `visible` on CP rank `rank`; its clean rows stand in the order of its chunks."""
    clean_lo, clean_hi = visible.clean_lo.numpy(), visible.clean_hi.numpy()
    own: list[Part] = []
    remote: list[Part] = []
    corrupted = _corrupted_part(visible, rank, tile_rows, device)
    if corrupted is not None:
        own.append(corrupted)
    for position, run in _runs(chunks):
        lo = np.clip(clean_lo - position, 0, run.stop - run.start)
        hi = np.clip(clean_hi - position, 0, run.stop - run.start)
        part = _part(lo, hi, 0, run, tile_rows, device)
        if part is not None:
            (own if run.rank == rank else remote).append(part)
    return View(tuple(own), tuple(remote), visible.num_clean, len(clean_lo))


def _runs(chunks: tuple[Chunk, ...]) -> list[tuple[int, Run]]:
    """(first position, run) of each chunk; neighbours of one rank are joined."""
    filled: dict[int, int] = {}
    runs: list[tuple[int, Run]] = []
    for chunk in chunks:
        start = filled.get(chunk.rank, 0)
        stop = start + chunk.stop - chunk.start
        filled[chunk.rank] = stop
        position, last = runs[-1] if runs else (0, None)
        touching = last is not None and position + last.stop - last.start == chunk.start
        if last is not None and touching and last.rank == chunk.rank and last.stop == start:
            runs[-1] = (position, Run(chunk.rank, last.start, stop))
        else:
            runs.append((chunk.start, Run(chunk.rank, start, stop)))
    return runs


def _corrupted_part(
    visible: Visibility, rank: int, tile_rows: int, device: torch.device
) -> Part | None:
    """The part over this rank's corrupted rows.

    A unit is whole on its rank, so the shift from place in the corrupted order to place in this
    rank's rows is one number a unit.
    """
    first = visible.num_clean
    index = visible.index.numpy()[first:]
    shift = index - np.arange(len(index), dtype=np.int32)
    lo = visible.own_lo.numpy()[first:] - shift
    hi = visible.own_hi.numpy()[first:] - shift
    run = Run(rank, first, first + len(index))
    return _part(lo, hi, first, run, tile_rows, device)


def _part(
    lo: NDArray[np.int32],
    hi: NDArray[np.int32],
    first_row: int,
    run: Run,
    tile_rows: int,
    device: torch.device,
) -> Part | None:
    """The part of the rows that see some key of the run; None if none does."""
    seeing = np.flatnonzero(hi > lo)
    if len(seeing) == 0:
        return None
    lo, hi = lo[seeing].astype(np.int32), hi[seeing].astype(np.int32)
    spec = Intervals(
        lo=torch.from_numpy(lo).to(device),
        hi=torch.from_numpy(hi).to(device),
        tiles=row_tiles(lo, hi, tile_rows),
    )
    rows: Rows
    if seeing[-1] - seeing[0] + 1 == len(seeing):
        rows = slice(first_row + int(seeing[0]), first_row + int(seeing[-1]) + 1)
    else:
        rows = torch.from_numpy(first_row + seeing).to(device)
    return Part(rows, run, spec)
