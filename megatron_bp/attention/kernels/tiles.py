"""Batches of small masked tiles on a device: taken out of rows and keys, computed, put back.

The arithmetic of a batch comes from outside: `Batched` is any attention over a batch of sequences,
such as PyTorch's own on the CPU, or plain matrix products (`dense.py`).
"""

# Shapes: n rows, K keys, Q query heads, H key heads, D head dimension, T tiles of t rows x W keys.

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.attention.kernels.pieces import Tiles


class Batched(Protocol):
    """Attention of T sequences at once, under the contract of FlashAttention.

    `bias` [T or 1, 1, t, W] is added to the scores, None for nothing; no row of it is all -inf.
    """

    def forward(
        self, q_TQtD: Tensor, k_THWD: Tensor, v_THWD: Tensor, bias: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(out [T, Q, t, D], lse [T, Q, t])."""
        ...

    def backward(
        self,
        dout_TQtD: Tensor,
        q_TQtD: Tensor,
        k_THWD: Tensor,
        v_THWD: Tensor,
        out_TQtD: Tensor,
        lse_TQt: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) given the final out and lse; a row whose lse is inf adds nothing."""
        ...


@dataclass(frozen=True, eq=False)
class Spans:
    """T spans of `size` consecutive rows.

    Attributes:
        first: the first row of all.
        size: rows of a span.
        step: rows from one span to the next, where they are evenly spaced; else 0.
        index: int64[T * size], all of their rows.
    """

    first: int
    size: int
    step: int
    index: Tensor

    def take(self, x: Tensor) -> Tensor:
        """[n, ...] as [T, size, ...]: a view where spans are evenly spaced."""
        if not self.step:
            taken = x.index_select(0, self.index)
            return taken.view(-1, self.size, *x.shape[1:])
        number = len(self.index) // self.size
        stop = self.first + (number - 1) * self.step + self.size
        return x[self.first : stop].unfold(0, self.size, self.step).movedim(-1, 1)

    def add(self, x: Tensor, shares: Tensor) -> None:
        """Add shares [T, size, ...] to x [n, ...], in place; spans may overlap."""
        if self.step >= self.size:
            self.take(x).add_(shares)
        else:
            x.index_add_(0, self.index, shares.to(x.dtype).flatten(0, 1))


@dataclass(frozen=True, eq=False)
class TileBatch:
    """One batch on its device.

    Attributes:
        rows, keys: where the tiles stand.
        lo, hi: int32[T, t], or [1, t] where all tiles are alike: the keys each row sees, of the
            tile's W; None where all see all. A row that is none of the tile's sees all.
        seen: bool[T, t], which rows are the tile's; None where all are.
        seen_index: int64, their place among the T * t; None where all are.
    """

    rows: Spans
    keys: Spans
    lo: Tensor | None
    hi: Tensor | None
    seen: Tensor | None
    seen_index: Tensor | None

    def forward(
        self,
        math: Batched,
        q_nQD: Tensor,
        k_KHD: Tensor,
        v_KHD: Tensor,
        scale: float,
        out_nQD: Tensor,
        lse_nQ: Tensor,
    ) -> None:
        """Merge this batch into out_nQD and lse_nQ; see contract.Kernel."""
        q, k, v = self.rows.take(q_nQD), self.keys.take(k_KHD), self.keys.take(v_KHD)
        bias = self._bias(q.dtype)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = math.forward(q, k, v, bias, scale)
        part_TtQD, part_lse_TtQ = out.transpose(1, 2), lse.transpose(1, 2).to(lse_nQ.dtype)
        if self.seen is not None:
            part_lse_TtQ = part_lse_TtQ.masked_fill(~self.seen[..., None], -torch.inf)
        out_TtQD, lse_TtQ = self.rows.take(out_nQD), self.rows.take(lse_nQ)
        new_lse_TtQ = torch.logaddexp(lse_TtQ, part_lse_TtQ)
        weight_TtQ = torch.exp(part_lse_TtQ - new_lse_TtQ)
        if self.seen is not None:  # where both are -inf
            weight_TtQ.masked_fill_(~self.seen[..., None], 0.0)
        out_TtQD.lerp_(part_TtQD.to(out_nQD.dtype), weight_TtQ[..., None])
        if self.rows.step:  # out_TtQD is a view
            lse_TtQ.copy_(new_lse_TtQ)
            return
        for whole, tiles in ((out_nQD, out_TtQD), (lse_nQ, new_lse_TtQ)):
            # A row may stand in several tiles, but is one's.
            index, flat = self.rows.index, tiles.flatten(0, 1)
            if self.seen_index is not None:
                index, flat = index[self.seen_index], flat[self.seen_index]
            whole.index_copy_(0, index, flat)

    def backward(
        self,
        math: Batched,
        dout_nQD: Tensor,
        q_nQD: Tensor,
        k_KHD: Tensor,
        v_KHD: Tensor,
        out_nQD: Tensor,
        lse_nQ: Tensor,
        scale: float,
        dq_nQD: Tensor,
        dk_KHD: Tensor,
        dv_KHD: Tensor,
    ) -> None:
        """Add this batch's share to dq_nQD, dk_KHD and dv_KHD; see contract.Kernel."""
        dout, q, out, lse = (self.rows.take(x) for x in (dout_nQD, q_nQD, out_nQD, lse_nQ))
        k, v = self.keys.take(k_KHD), self.keys.take(v_KHD)
        if self.seen is not None:
            lse = lse.masked_fill(~self.seen[..., None], torch.inf)
        dout, q, k, v, out, lse = (x.transpose(1, 2) for x in (dout, q, k, v, out, lse))
        grads = math.backward(dout, q, k, v, out, lse, self._bias(q.dtype), scale)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        self.rows.add(dq_nQD, dq)
        self.keys.add(dk_KHD, dk)
        self.keys.add(dv_KHD, dv)

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        """[T or 1, 1, t, W]: 0 where a row sees a key, else -inf."""
        if self.lo is None or self.hi is None:
            return None
        key_W = torch.arange(self.keys.size, dtype=self.lo.dtype, device=self.lo.device)
        hidden = (key_W < self.lo[..., None]) | (key_W >= self.hi[..., None])
        bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return bias.masked_fill_(hidden, -torch.inf)[:, None]


EVEN_TILES = 16


def to_device(tiles: Tiles, device: torch.device) -> list[TileBatch]:
    """The batch, divided where spacing changes if that leaves long evenly spaced ones."""
    row, key = tiles.row.astype(np.int64), tiles.key.astype(np.int64)
    move = np.stack([np.diff(row), np.diff(key)])
    turns = np.flatnonzero((np.diff(move) != 0).any(0)) + 2 if len(row) > 2 else np.zeros(0, int)
    # Where one even run of tiles ends, two moves change.
    turns = turns[np.diff(turns, prepend=-1) > 1]
    if len(row) < EVEN_TILES * (len(turns) + 1):
        turns = turns[:0]
    batches = []
    for first, stop in pairwise([0, *turns.tolist(), len(row)]):
        batches.append(_batch(tiles, slice(first, stop), device))
    return batches


def _batch(tiles: Tiles, part: slice, device: torch.device) -> TileBatch:
    lo, hi = tiles.lo[part], tiles.hi[part]
    seen = hi > lo
    lo, hi = np.where(seen, lo, 0), np.where(seen, hi, tiles.keys)
    if (lo == lo[0]).all() and (hi == hi[0]).all():
        lo, hi = lo[:1], hi[:1]
    masked, partial = not tiles.full, not seen.all()

    def there(x: NDArray[Any], wanted: bool = True) -> Tensor | None:
        return torch.from_numpy(x).to(device) if wanted else None

    return TileBatch(
        rows=_spans(tiles.row[part], tiles.rows, tiles.rows, device),
        keys=_spans(tiles.key[part], tiles.keys, 1, device),
        lo=there(lo, masked),
        hi=there(hi, masked),
        seen=there(seen, partial),
        seen_index=there(np.flatnonzero(seen), partial),
    )


def _spans(first: NDArray[np.int32], size: int, least_step: int, device: torch.device) -> Spans:
    """Evenly spaced ones are told as such from a step of `least_step` on."""
    index = (first.astype(np.int64)[:, None] + np.arange(size)).ravel()
    moves = np.diff(first) if len(first) > 1 else np.array([size])
    even = (moves == moves[0]).all() and moves[0] >= least_step
    return Spans(
        first=int(first[0]),
        size=size,
        step=int(moves[0]) if even else 0,
        index=torch.from_numpy(index).to(device),
    )
