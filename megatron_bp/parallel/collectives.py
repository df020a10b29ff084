"""Raw collectives over rows, asynchronous, with the bytes that each sends.

Shapes: n ranks of the group, W words a row. No autograd here: see attention/exchange.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(eq=False)
class Pending:
    """A collective on its way: `wait()` gives its result."""

    result: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """The result, once it is there (on CUDA: ordered after the current stream)."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.result


def all_gather(rows: Tensor, group: dist.ProcessGroup) -> tuple[Pending, int]:
    """Every rank's rows [L, W] as [n, L, W], and the bytes this rank sends to the others."""
    n = group.size()
    out = rows.new_empty((n, *rows.shape))
    flat = out.view(-1, *rows.shape[1:])
    work = _all_gather()(flat, rows.contiguous(), group=group, async_op=True)
    return Pending(out, work), (n - 1) * rows.numel() * rows.element_size()


def all_to_all(rows: Tensor, group: dist.ProcessGroup) -> tuple[Pending, int]:
    """Slice r of [n, L, W] goes to rank r; the result's slice r came from rank r. And the bytes."""
    n = group.size()
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    work = dist.all_to_all_single(out, rows, group=group, async_op=True)
    return Pending(out, work), (n - 1) * rows[0].numel() * rows.element_size()


def gather_numbers(numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's vector [k] as [n, k], for reports; waits."""
    every = numbers.new_empty((group.size(), len(numbers)))
    _all_gather()(every.view(-1), numbers, group=group)
    return every


def _all_gather() -> Callable[..., Any]:
    """Torch's gather into one tensor: torch 2.13 renamed it and warns of the old name."""
    renamed = getattr(dist, "all_gather_single", None)
    return renamed if renamed is not None else dist.all_gather_into_tensor
