"""Writes what steps and evaluations did: metrics.jsonl, Megatron's log line, TensorBoard and W&B.

Wraps `training_log` and `evaluate_and_print_results`, the two places that Megatron's loop passes
once a step and once an evaluation on every rank. What is added to the loss dictionary there,
Megatron itself prints and hands to TensorBoard and W&B.
"""

import inspect
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_bp.training import evaluate, journal, metrics
from megatron_bp.training.auxiliary import Auxiliary
from megatron_bp.training.metrics import BINS, Metrics, Step


class Recorder:
    """Ends each step and evaluation of `metrics`, and writes them."""

    def __init__(
        self,
        metrics: Metrics,
        path: Path | None,
        is_bound: bool,
        draws: int = 1,
        samples: int | None = None,
        auxiliary: Auxiliary | None = None,
    ) -> None:
        """Write to `path`, if any, from the last rank.

        Args:
            metrics: collects the micro-batches.
            path: the metrics file; rows of steps that are run again after a resume are replaced.
            is_bound: the validation loss is a bound on the negative log-likelihood.
            draws: noise draws of each validation sample.
            samples: samples of a whole evaluation, each draw counted; None if not known.
            auxiliary: the losses of a mixture of experts; None without one.
        """
        self._auxiliary = auxiliary
        self._metrics = metrics
        self._path = path
        self._is_bound = is_bound
        self._draws = draws
        self._samples = samples
        self._opened = False

    def install(self, group: Callable[[], dist.ProcessGroup], slot: int) -> None:
        """Wrap Megatron's two logging functions.

        Args:
            group: gives the ranks that share a step's samples and rows, those of a slot side by
                side, once Megatron's parallel state stands.
            slot: ranks of a slot.
        """
        from megatron.training import training

        log, evaluation = training.training_log, training.evaluate_and_print_results
        log_signature = inspect.signature(log)
        evaluation_signature = inspect.signature(evaluation)

        def training_log(*args: Any, **kwargs: Any) -> Any:
            given = log_signature.bind(*args, **kwargs)
            values = given.arguments
            journal.reached(int(values["iteration"]))
            step = self._metrics.finish(group(), slot, dist.group.WORLD)
            auxiliary = self._auxiliary.finish() if self._auxiliary is not None else {}
            if step is not None:
                self._train(step, values, auxiliary)
                if values["loss_dict"]:
                    values["loss_dict"] = values["loss_dict"] | _shown(step)
            return log(*given.args, **given.kwargs)

        def evaluate_and_print_results(*args: Any, **kwargs: Any) -> Any:
            values = evaluation_signature.bind(*args, **kwargs).arguments
            self._metrics.drop()
            result = evaluation(*args, **kwargs)
            step = self._metrics.finish(group(), slot, dist.group.WORLD)
            if step is not None and not self._whole(len(step.samples)):
                print(" evaluation cut short (time limit): no row is written", flush=True)
                if _writes():
                    journal.note("warning", message="evaluation cut short (time limit)")
            elif step is not None:
                kind = "test" if "test set" in values["prefix"] else "validation"
                row = metrics.as_row(step) | evaluate.as_row(
                    step.samples, self._draws, self._is_bound
                )
                self._write({"kind": kind, "iteration": values["iteration"]} | row)
                if _writes():
                    print(f" {kind} at iteration {values['iteration']} | {_told(row)}", flush=True)
            return result

        training.training_log = training_log
        training.evaluate_and_print_results = evaluate_and_print_results

    def _whole(self, samples: int) -> bool:
        """Whether an evaluation that read so many samples was one."""
        return samples % self._draws == 0 and self._samples in (None, samples)

    def _train(self, step: Step, values: dict[str, Any], auxiliary: dict[str, float]) -> None:
        extra = {
            "learning_rate": _number(values["learning_rate"]),
            "grad_norm": _number(values["grad_norm"]),
            "skipped": int(values["skipped_iter"]),
        }
        iteration = int(values["iteration"])
        self._write(
            {"kind": "train", "iteration": iteration} | metrics.as_row(step) | auxiliary | extra
        )
        _bins_to_tensorboard(step, iteration)
        if not any(step.count.values()) and _writes():
            journal.warn(
                f"step {iteration}: nothing at all was supervised, so nothing was learned; check "
                f"the data's supervised spans and --never-corrupt-ids"
            )

    def _write(self, row: dict[str, Any]) -> None:
        if self._path is None or not _writes():
            return
        if not self._opened:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            again = _drop_from(self._path, row)
            seconds = sum(old.get("seconds") or 0.0 for old in again)
            journal.note("began", iteration=row["iteration"], again=len(again), seconds=seconds)
            self._opened = True
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(row), allow_nan=False) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a last line that a killed run left half-written is left out.

    Lines that are no rows (a disk that lost power leaves such) are left out with a warning.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    rows = [row for row in map(_row, lines) if row is not None]
    if len(rows) < len(lines):
        warnings.warn(
            f"{path}: {len(lines) - len(rows)} lines are no rows of metrics; left out", stacklevel=2
        )
    return rows


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(row, dict) and {"kind", "iteration"} <= row.keys()
    return row if whole and isinstance(row["iteration"], int) else None


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinite numbers, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _writes() -> bool:
    """Whether this rank is the one that writes: the last, as for Megatron's own log."""
    return dist.get_rank() == dist.get_world_size() - 1


def _shown(step: Step) -> dict[str, torch.Tensor]:
    """What joins the losses in Megatron's log line, TensorBoard and W&B."""
    shown = {
        "masked fraction": metrics.masked_fraction(step),
        "clean tokens/s": step.clean_tokens / step.seconds,
        "bytes exchanged": float(step.bytes_sent),
        "balance": step.balance,
        "peak memory (GB)": step.memory / 1e9,
    }
    if len(step.loss) > 1:
        shown["loss"] = step.total
    return {name: torch.tensor(value) for name, value in shown.items()}


def _told(row: dict[str, Any]) -> str:
    """An evaluation in words."""
    parts = [f"loss {row['loss']:.6f}"]
    for unit in ("token", "byte"):
        name = f"bound_bits_per_{unit}"
        if name in row:
            error = row[f"{name}_error"]
            spread = "" if error is None else f" +- {error:.4f}"
            parts.append(f"bound {row[name]:.4f}{spread} bits/{unit}")
    return " | ".join([*parts, f"{row['samples']} samples x {row['draws']} draws"])


def _bins_to_tensorboard(step: Step, iteration: int) -> None:
    from megatron.training import get_tensorboard_writer

    writer = get_tensorboard_writer()
    if writer is None:
        return
    for place, value in enumerate(step.bins):
        if value is not None:
            name = f"loss by corruption/{place / BINS:.1f}-{(place + 1) / BINS:.1f}"
            writer.add_scalar(name, value, iteration)


def _drop_from(path: Path, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Drop the rows that a resumed run is about to write again; these."""
    if not path.exists():
        return []
    later = row["iteration"]

    def kept(old: dict[str, Any]) -> bool:
        if row["kind"] == "train":
            return bool(old["iteration"] < later)
        return old["kind"] == "train" or bool(old["iteration"] != later)

    with warnings.catch_warnings(record=True) as damaged:
        warnings.simplefilter("always")
        before = read_metrics(path)
    rows = [old for old in before if kept(old)]
    if damaged:
        copy = path.with_suffix(".damaged")
        shutil.copy2(path, copy)
        journal.warn(f"{damaged[0].message}; the file as it was is {copy}")
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(json.dumps(old) + "\n" for old in rows), encoding="utf-8")
    os.replace(fresh, path)
    return [old for old in before if not kept(old)]


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
