"""Visibility cut into parts: which rows see which keys of each buffer that keys stand in.

Made once a layout on the host, used by every layer. Keys stand in a buffer in ascending order, so
those that a row sees of any interval are one interval of the buffer: one part covers all clean keys
of a buffer, and one its corrupted keys. Knows no model and no process group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.attention.kernels.contract import Kernel
from megatron_bp.sequence.plan import RankRows
from megatron_bp.sequence.visibility import Visibility

Rows = slice | Tensor


@dataclass(frozen=True, eq=False)
class Held:
    """The rows whose keys stand in one buffer: clean ones, `gap` that nobody sees, corrupted ones.

    Attributes:
        clean: int32, positions, ascending.
        corrupted: int64, places in the corrupted order, ascending.
        gap: see above.
    """

    clean: NDArray[np.int32]
    corrupted: NDArray[np.int64]
    gap: int = 0

    @classmethod
    def of_rank(cls, rows: RankRows) -> "Held":
        """The rows of a rank as they stand in its memory."""
        return cls(rows.clean, rows.corrupted, rows.filling)

    @classmethod
    def sent_by(cls, rows: RankRows) -> "Held":
        """Those of its first rows that a rank sends: the clean ones, or all."""
        if rows.num_sent == len(rows.clean):
            return cls(rows.clean, rows.corrupted[:0])
        return cls.of_rank(rows)


@dataclass(frozen=True, eq=False)
class Part:
    """Some of this rank's rows and the keys of a buffer that they see part of.

    Attributes:
        rows: which rows.
        keys: which keys of the buffer.
        spec: what the kernel prepared for them.
        pairs: visible (row, key) pairs, kept from the host.
    """

    rows: Rows
    keys: slice
    spec: Any
    pairs: int


@dataclass(frozen=True, eq=False)
class View:
    """All that attention needs of one Visibility on one rank.

    Attributes:
        corrupted: over this rank's own corrupted rows. Needs no exchange, as the next.
        clean: over this rank's own clean rows.
        arrivals: over rows of other ranks, for each buffer in which the exchange brings them.
    """

    corrupted: tuple[Part, ...]
    clean: tuple[Part, ...]
    arrivals: tuple[tuple[Part, ...], ...]

    @property
    def pairs(self) -> int:
        """Visible pairs of all parts."""
        remote = (part for parts in self.arrivals for part in parts)
        return sum(part.pairs for part in (*self.corrupted, *self.clean, *remote))


def make_view(
    visible: Visibility,
    mine: Held,
    arrivals: Sequence[Held],
    kernel: Kernel,
    device: torch.device,
) -> View:
    """The parts of `visible`.

    Args:
        visible: what this rank's rows see.
        mine: the rows of this rank.
        arrivals: the rows in each buffer that arrives.
        kernel: prepares the parts.
        device: where it works.
    """
    clean = (visible.clean_lo.numpy(), visible.clean_hi.numpy())
    own = (visible.own_lo.numpy(), visible.own_hi.numpy())

    def of_clean(held: Held) -> tuple[Part, ...]:
        return _part(*clean, held.clean, 0, kernel, device)

    def of_corrupted(held: Held) -> tuple[Part, ...]:
        return _part(*own, held.corrupted, len(held.clean) + held.gap, kernel, device)

    view = View(
        of_corrupted(mine),
        of_clean(mine),
        tuple((*of_clean(held), *of_corrupted(held)) for held in arrivals),
    )
    held = view.pairs
    assert held == visible.pairs(), "a row sees keys that no rank of its clean shard group holds"
    return view


def _part(
    lo: NDArray[np.int32],
    hi: NDArray[np.int32],
    held: NDArray[Any],
    first_key: int,
    kernel: Kernel,
    device: torch.device,
) -> tuple[Part, ...]:
    """The part of the rows that see some key of `held`, if any does.

    Args:
        lo: what each row sees, [lo, hi).
        hi: see lo.
        held: ascending, in the numbers of lo and hi.
        first_key: where in the buffer they begin.
        kernel: see `make_view`, as is device.
        device: see there.
    """
    start, stop = np.searchsorted(held, lo), np.searchsorted(held, hi)
    seeing = np.flatnonzero(stop > start)
    if len(seeing) == 0:
        return ()
    first, last = int(start[seeing].min()), int(stop[seeing].max())
    lo = (start[seeing] - first).astype(np.int32)
    hi = (stop[seeing] - first).astype(np.int32)
    rows: Rows
    if seeing[-1] - seeing[0] + 1 == len(seeing):
        rows = slice(int(seeing[0]), int(seeing[-1]) + 1)
    else:
        rows = torch.from_numpy(seeing).to(device)
    keys = slice(first_key + first, first_key + last)
    pairs = int((hi - lo).sum(dtype=np.int64))
    return (Part(rows, keys, kernel.prepare(lo, hi, device), pairs),)
