"""Records what torch.distributed is asked to send."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# Where the input of each collective stands among its arguments, and how many copies of which share
# of it leave the rank: "all" of it to each of the others, or a "share" of 1/n to each.
COLLECTIVES = {
    "all_gather_single": (1, "all"),  # torch 2.13's name for the next
    "all_gather_into_tensor": (1, "all"),
    "all_to_all_single": (1, "share"),
    "reduce_scatter_tensor": (1, "share"),
    "all_gather": (1, "all"),
    "all_to_all": (1, "all"),
    "all_reduce": (0, "all"),
    "broadcast": (0, "all"),
    "send": (0, "all"),
}
CALLED = {"all_gather_single": "all_gather_into_tensor"}
UNEXPECTED = (
    "gather",
    "scatter",
    "reduce",
    "reduce_scatter",
    "all_gather_object",
    "broadcast_object_list",
    "all_gather_coalesced",
)


@dataclass(frozen=True)
class Sent:
    """One collective among `ranks` ranks: bytes that leave this rank, and whether any is NaN."""

    name: str
    ranks: int
    bytes: int
    nan: bool


@contextlib.contextmanager
def recording(sent: list[Sent]) -> Iterator[None]:
    """Append every collective on more than one rank to `sent`; unknown ones raise."""
    with contextlib.ExitStack() as stack:
        for name, (place, how) in COLLECTIVES.items():
            if not hasattr(dist, name):
                continue
            stack.enter_context(mock.patch.object(dist, name, _wrap(name, place, how, sent)))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", _wrap_ring(sent)))
        for name in UNEXPECTED:
            stack.enter_context(mock.patch.object(dist, name, side_effect=AssertionError(name)))
        yield


def _wrap(name: str, place: int, how: str, sent: list[Sent]) -> Any:
    original = getattr(dist, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group") or next(
            (a for a in args if isinstance(a, dist.ProcessGroup)), dist.group.WORLD
        )
        ranks = group.size()
        given = args[place]
        tensors = given if isinstance(given, list | tuple) else [given]
        size = sum(t.numel() * t.element_size() for t in tensors)
        leaving = (ranks - 1) * size // (ranks if how == "share" else 1)
        if name == "all_to_all_single" and len(args) > 3:  # of uneven sizes: rows to each rank
            to = args[3]
            leaving = size // max(1, sum(to)) * (sum(to) - to[group.rank()])
        nan = any(t.is_floating_point() and bool(torch.isnan(t).any()) for t in tensors)
        if ranks > 1:
            sent.append(Sent(CALLED.get(name, name), ranks, leaving, nan))
        return original(*args, **kwargs)

    return wrapped


def _wrap_ring(sent: list[Sent]) -> Any:
    original, isend = dist.batch_isend_irecv, dist.isend

    def wrapped(ops: Any) -> Any:
        for op in ops:
            if op.op is isend:
                size = op.tensor.numel() * op.tensor.element_size()
                nan = bool(torch.isnan(op.tensor).any())
                sent.append(Sent("isend", op.group.size(), size, nan))
        return original(ops)

    return wrapped


def clean_shard(degrees: tuple[int, int], rank: int) -> dist.ProcessGroup:
    """This rank's clean shard group where (BP, CP) make one slot; all ranks make all groups."""
    bp, cp = degrees
    groups = [dist.new_group([*range(i, i + cp)]) for i in range(0, max(bp, cp), cp)]
    return groups[rank // cp]
