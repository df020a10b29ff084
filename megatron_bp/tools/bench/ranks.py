"""Alternatives measured turn by turn on ranks that a benchmark starts itself."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from megatron_bp.tools.bench.machine import cost
from megatron_bp.tools.bench.waits import Waits, watching

FIELDS = ("seconds", "cpu_seconds", "exposed_seconds", "peak_bytes", "bytes_sent")

OnRank = Callable[[int, Any, Waits], Any]
"""What each rank does: (rank, options, waits) -> a JSON value."""


def on_ranks(function: OnRank, options: Any) -> Any:
    """What `function` gave on rank 0 of `options.ranks` gloo ranks, processes of their own.

    They are forked from this process, which has imported what they need and computed nothing yet.
    """
    from megatron_bp import cpu

    cpu.install()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            _rank, (function, options, folder), nprocs=options.ranks, start_method="fork"
        )
        return json.loads((Path(folder) / "result.json").read_text())


def _rank(rank: int, function: OnRank, options: Any, folder: str) -> None:
    from megatron_bp.tools.bench.model import one_of_ranks

    with one_of_ranks(rank, options.ranks, folder, options.threads), watching() as waits:
        result = function(rank, options, waits)
        if rank == 0:
            (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")
        dist.barrier()


def take_turns(
    calls: dict[str, Callable[[], int]], turns: int, waits: Waits
) -> dict[str, dict[str, list[Any]]]:
    """Of each call FIELDS, an entry a turn that holds the values of all ranks.

    Collective. Every second turn goes backwards.

    Args:
        calls: each gives the bytes that this rank sent.
        turns: how many.
        waits: of this rank.
    """
    told: dict[str, dict[str, list[Any]]] = {name: {f: [] for f in FIELDS} for name in calls}
    for turn in range(turns):
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            sent: list[int] = []

            def call(name: str = name, sent: list[int] = sent) -> None:
                sent.append(calls[name]())

            dist.barrier()
            waits.take()
            taken = cost(call)
            exposed = waits.take().seconds
            values = (taken.seconds, taken.cpu_seconds, exposed, taken.peak_bytes, sent[0])
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, values)
            for field, of_ranks in zip(FIELDS, zip(*every, strict=True), strict=True):
                told[name][field].append(of_ranks)
    return told


def slowest(turns: list[list[float]]) -> list[float]:
    """Of each turn the value of the rank that has most."""
    return [max(turn) for turn in turns]
