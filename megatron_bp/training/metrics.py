"""What a step did, exactly: one JSON row a step and one an evaluation, in metrics.jsonl.

Megatron's printed line averages the first two steps after a start, in float32; these rows do not.
Sums are added in float64 over all ranks and divided once. Hooks into Megatron's loop by wrapping
`training_log` and `evaluate_and_print_results`, the two places it passes once a step and once an
evaluation on every rank.
"""

import inspect
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.attention.exchange import CleanExchange
from megatron_bp.parallel.collectives import gather_numbers


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch's numbers on this rank.

    Attributes:
        loss: scalar, sum of weight x cross-entropy.
        count: this rank's share of the loss count.
        masked: rows that carry a loss.
        clean_tokens: clean rows that are tokens of the sample.
        rows: rows computed.
        cost: planned work in visible pairs.
        exchange: knows the bytes sent once the backward is done.
    """

    loss: Tensor
    count: int
    masked: int
    clean_tokens: int
    rows: int
    cost: int
    exchange: CleanExchange


class Metrics:
    """Collects micro-batches and writes a row for each step and each evaluation."""

    def __init__(self, path: Path | None, is_bound: bool) -> None:
        """Write to `path`, if any, from the last rank.

        Args:
            path: the metrics file; rows of steps that are run again after a resume are replaced.
            is_bound: the validation loss is a bound on the negative log-likelihood.
        """
        self.path = path
        self.is_bound = is_bound
        self._batches: list[MicroBatch] = []
        self._began = 0.0
        self._opened = False

    def begin(self) -> None:
        """A micro-batch begins; the first one of a step starts its clock."""
        if not self._batches:
            self._began = time.perf_counter()

    def add(self, batch: MicroBatch) -> None:
        """A micro-batch's forward is done."""
        self._batches.append(batch)

    def install(self, group: Callable[[], dist.ProcessGroup]) -> None:
        """Wrap Megatron's two logging functions.

        Args:
            group: gives the ranks that share a step's samples and rows (data and slot), once
                Megatron's parallel state stands.
        """
        from megatron.training import training

        log, evaluate = training.training_log, training.evaluate_and_print_results
        signature = inspect.signature(log)
        evaluation = inspect.signature(evaluate)

        def training_log(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            extra = {
                "learning_rate": _number(given["learning_rate"]),
                "grad_norm": _number(given["grad_norm"]),
                "skipped": int(given["skipped_iter"]),
            }
            self.write("train", given["iteration"], extra, group())
            return log(*args, **kwargs)

        def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
            given = evaluation.bind(*args, **kwargs).arguments
            self._batches.clear()
            result = evaluate(*args, **kwargs)
            name = "test" if "test set" in given["prefix"] else "validation"
            self.write(name, given["iteration"], {}, group())
            return result

        training.training_log = training_log
        training.evaluate_and_print_results = evaluate_and_print_results

    def write(
        self, kind: str, iteration: int, extra: dict[str, Any], group: dist.ProcessGroup
    ) -> None:
        """Add up the micro-batches over the group, write one row, and start afresh. Collective."""
        seconds = time.perf_counter() - self._began
        batches, self._batches = self._batches, []
        if not batches:
            return
        loss = torch.stack([b.loss for b in batches]).sum(dtype=torch.float64).item()
        mine = [
            loss,
            sum(b.count for b in batches),
            sum(b.masked for b in batches),
            sum(b.clean_tokens for b in batches),
            sum(b.rows for b in batches),
            sum(b.exchange.bytes_sent for b in batches),
            sum(b.cost for b in batches),
        ]
        device = batches[0].loss.device
        local = torch.tensor(mine, dtype=torch.float64, device=device)
        every = gather_numbers(local, group)
        if self.path is None or dist.get_rank() != dist.get_world_size() - 1:
            return
        total = every.sum(0).tolist()
        count, clean = int(total[1]), int(total[3])
        cost = every[:, 6]
        row: dict[str, Any] = {
            "kind": kind,
            "iteration": iteration,
            "loss": total[0] / max(1, count),
            "loss_sum": total[0],
            "count": count,
            "masked": int(total[2]),
            "clean_tokens": clean,
            "rows": int(total[4]),
            "bytes_sent": int(total[5]),
            "balance": (cost.max() / cost.mean()).item() if total[6] else 1.0,
            "seconds": seconds,
            "clean_tokens_per_second": clean / seconds,
            **extra,
        }
        if kind != "train" and self.is_bound:
            row["bound_bits_per_token"] = row["loss"] / 0.6931471805599453
        self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        assert self.path is not None
        if not self._opened:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _drop_from(self.path, row)
            self._opened = True
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _drop_from(path: Path, row: dict[str, Any]) -> None:
    """Drop the rows that a resumed run is about to write again."""
    if not path.exists():
        return
    later = row["iteration"]

    def kept(old: dict[str, Any]) -> bool:
        if row["kind"] == "train":
            return bool(old["iteration"] < later)
        return old["kind"] == "train" or bool(old["iteration"] != later)

    rows = [old for old in read_metrics(path) if kept(old)]
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(json.dumps(old) + "\n" for old in rows))
    os.replace(fresh, path)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
