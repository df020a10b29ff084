"""Bytes that this rank hands to ranks of the other host, seen by a wrapped torch.distributed.

What a collective sends to whom is how gloo does it: rings for all_gather, all_reduce and
reduce_scatter (each rank sends to its neighbour in the group), all-to-all and sends directly. The
numbers are payload; the link's own counters add the headers of TCP, IP and Ethernet.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_bp.tools.bench.callers import called_by_attention

# name: (place of the input, of the group, how often a rank of n sends on what part of the input)
RINGS: dict[str, tuple[int, Callable[[int], float]]] = {
    "all_gather_single": (1, lambda n: n - 1),
    "all_gather_into_tensor": (1, lambda n: n - 1),
    "all_gather": (1, lambda n: n - 1),
    "all_reduce": (0, lambda n: 2 * (n - 1) / n),
    "reduce_scatter_single": (1, lambda n: (n - 1) / n),
    "reduce_scatter_tensor": (1, lambda n: (n - 1) / n),
}


@dataclass
class Crossing:
    """Bytes this rank handed to the other host since the last `take`; attention's among them."""

    bytes: float = 0.0
    attention: float = 0.0

    def add(self, size: float) -> None:
        """Count bytes, as attention's if attention called."""
        self.bytes += size
        if size and called_by_attention():
            self.attention += size

    def take(self) -> "Crossing":
        """What was counted; begins anew."""
        taken = Crossing(self.bytes, self.attention)
        self.bytes, self.attention = 0.0, 0.0
        return taken


def ring(ranks: Sequence[int], rank: int, hosts: Sequence[int]) -> bool:
    """Whether the next of a ring of `ranks` after `rank` is on another host.

    Args:
        ranks: of the group, in its order.
        rank: one of them.
        hosts: host of each rank of the job.
    """
    following = ranks[(ranks.index(rank) + 1) % len(ranks)]
    return hosts[rank] != hosts[following]


def direct(ranks: Sequence[int], rank: int, hosts: Sequence[int], sizes: Sequence[float]) -> float:
    """Bytes of those for each of `ranks`, sent directly, that go to another host."""
    return sum(size for to, size in zip(ranks, sizes, strict=True) if hosts[to] != hosts[rank])


@contextmanager
def counting(hosts: Sequence[int]) -> Iterator[Crossing]:
    """Counts what this process sends; the process group must stand before it is used.

    Args:
        hosts: host of each rank of the job.
    """
    crossing = Crossing()
    with ExitStack() as stack:
        for name, (place, part) in RINGS.items():
            if hasattr(dist, name):
                wrapped = _ring(getattr(dist, name), place, part, crossing, hosts)
                stack.enter_context(mock.patch.object(dist, name, wrapped))
        all_to_all = _all_to_all(dist.all_to_all_single, crossing, hosts)
        stack.enter_context(mock.patch.object(dist, "all_to_all_single", all_to_all))
        for name in ("send", "isend"):
            wrapped = _send(getattr(dist, name), crossing, hosts)
            # batch_isend_irecv compares with the function of this module
            for module in (dist, distributed_c10d):
                stack.enter_context(mock.patch.object(module, name, wrapped))
        yield crossing


def _ring(
    original: Any,
    place: int,
    part: Callable[[int], float],
    crossing: Crossing,
    hosts: Sequence[int],
) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        ranks, rank = _group(args, kwargs)
        given = (
            args[place] if len(args) > place else kwargs.get("input_tensor", kwargs.get("tensor"))
        )
        if len(ranks) > 1 and isinstance(given, Tensor) and ring(ranks, rank, hosts):
            crossing.add(part(len(ranks)) * _size(given))
        return original(*args, **kwargs)

    return wrapped


def _all_to_all(original: Any, crossing: Crossing, hosts: Sequence[int]) -> Any:
    def wrapped(
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        ranks, rank = _group((), {"group": group})
        if input_split_sizes:
            row = _size(input) / max(1, len(input))
            sizes = [row * rows for rows in input_split_sizes]
        else:
            sizes = [_size(input) / len(ranks)] * len(ranks)
        crossing.add(direct(ranks, rank, hosts, sizes))
        return original(output, input, output_split_sizes, input_split_sizes, group, async_op)

    return wrapped


def _send(original: Any, crossing: Crossing, hosts: Sequence[int]) -> Any:
    def wrapped(
        tensor: Tensor,
        dst: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Any:
        ranks, rank = _group((), {"group": group})
        to = dst if group_dst is None else ranks[group_dst]
        assert to is not None
        crossing.add(_size(tensor) if hosts[to] != hosts[rank] else 0.0)
        return original(tensor, dst, group, tag, group_dst)

    return wrapped


def _group(args: Any, kwargs: Any) -> tuple[list[int], int]:
    """The ranks of the group that a call names, and this rank."""
    group = kwargs.get("group") or next(
        (a for a in args if isinstance(a, dist.ProcessGroup)), dist.group.WORLD
    )
    return dist.get_process_group_ranks(group), dist.get_rank()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
