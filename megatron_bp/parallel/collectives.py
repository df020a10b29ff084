"""Raw collectives over rows, asynchronous, with the bytes that each sends.

Shapes: n ranks of the group, W words a row. No autograd here: see attention/exchange.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(eq=False)
class Pending:
    """A collective on its way: `wait()` gives its result."""

    result: Tensor
    works: Sequence[dist.Work | None]  # None if there was nothing to do
    sending: Tensor  # must live until it is sent

    def wait(self) -> Tensor:
        """The result, once it is there (on CUDA: ordered after the current stream)."""
        for work in self.works:
            if work is not None:
                work.wait()
        self.works = ()
        return self.result


def all_gather(rows: Tensor, group: dist.ProcessGroup) -> tuple[Pending, int]:
    """Every rank's rows [L, W] as [n, L, W], and the bytes this rank sends to the others."""
    n = group.size()
    out = rows.new_empty((n, *rows.shape))
    flat, rows = out.view(-1, *rows.shape[1:]), rows.contiguous()
    work = _all_gather()(flat, rows, group=group, async_op=True)
    return Pending(out, [work], rows), (n - 1) * rows.numel() * rows.element_size()


def all_to_all(rows: Tensor, group: dist.ProcessGroup) -> tuple[Pending, int]:
    """Slice r of [n, L, W] goes to rank r; the result's slice r came from rank r. And the bytes."""
    n = group.size()
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    work = dist.all_to_all_single(out, rows, group=group, async_op=True)
    return Pending(out, [work], rows), (n - 1) * rows[0].numel() * rows.element_size()


def all_to_all_uneven(
    rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> tuple[Pending, int]:
    """Of [s, W] the first send[0] rows go to rank 0, and so on; receive[r] come of rank r.

    What arrives stands rank after rank. And the bytes this rank sends to the others.
    """
    rows = rows.contiguous()
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    work = dist.all_to_all_single(out, rows, list(receive), list(send), group=group, async_op=True)
    away = sum(send) - send[group.rank()]
    return Pending(out, [work], rows), away * rows[:1].numel() * rows.element_size()


def pass_on(rows: Tensor, arriving: int, group: dist.ProcessGroup, tag: int) -> tuple[Pending, int]:
    """Rows [s, W] go to the next rank of the group, [arriving, W] come of the one before.

    `tag` tells passes apart that are under way at once. And the bytes sent.
    """
    rows = rows.contiguous()
    out = rows.new_empty((arriving, *rows.shape[1:]))
    here, ranks = group.rank(), group.size()
    peers = dist.get_process_group_ranks(group)
    to, of = peers[(here + 1) % ranks], peers[(here - 1) % ranks]
    both = []
    if len(rows):
        both.append(dist.P2POp(dist.isend, rows, to, group, tag))
    if arriving:
        both.append(dist.P2POp(dist.irecv, out, of, group, tag))
    works = dist.batch_isend_irecv(both) if both else []
    return Pending(out, works, rows), rows.numel() * rows.element_size()


def gather_numbers(numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's vector [k] as [n, k], for reports; waits."""
    every = numbers.new_empty((group.size(), len(numbers)))
    _all_gather()(every.view(-1), numbers, group=group)
    return every


def _all_gather() -> Callable[..., Any]:
    """Torch's gather into one tensor: torch 2.13 renamed it and warns of the old name."""
    renamed = getattr(dist, "all_gather_single", None)
    return renamed if renamed is not None else dist.all_gather_into_tensor
