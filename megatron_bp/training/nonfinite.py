"""A loss or a gradient that is NaN or infinite: named, written down, and stopped or skipped.

Nothing of such a step ever reaches the weights. The file tells what to look at: step, rank and the
documents of the micro-batch.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.sequence.packing import Sample
from megatron_bp.training import journal

OnNonFinite = Literal["stop", "skip"]


class NonFiniteLossError(FloatingPointError):
    """The loss of a micro-batch is NaN or infinite."""


class NonFinite:
    """Watches the losses of the micro-batches, and guards the optimizer."""

    def __init__(
        self, mode: OnNonFinite, folder: Path | None, iteration: Callable[[], int]
    ) -> None:
        """Set up the watch.

        Args:
            mode: "stop" the run at the first such loss, or "skip" the step's update on all ranks.
            folder: where the files go; None for the working directory.
            iteration: the step that runs now, counted from 1.
        """
        self.mode = mode
        self._folder = folder if folder is not None else Path()
        self._iteration = iteration
        self._seen = False

    def check(self, output: Tensor, sample: Sample, training: bool) -> None:
        """Look at a micro-batch's loss.

        Raises:
            NonFiniteLossError: it is NaN or infinite, and the run is to stop.
        """
        if bool(torch.isfinite(output.detach()).all()):
            return
        file = self._write(output, sample, training)
        what = f"step {self._iteration()}, rank {dist.get_rank()}: the loss is {output.item()}"
        keys = ", ".join(str(key) for key in sample.document_keys[:8].tolist())
        more = (
            "" if len(sample.document_keys) <= 8 else f" and {len(sample.document_keys) - 8} more"
        )
        place = f"written to {file}" if file is not None else "which could not be written down"
        message = f"{what} on documents with keys {keys}{more}; {place}"
        if self.mode == "stop" or not training:
            journal.note("warning", message=message)
            raise NonFiniteLossError(
                f"{message}. The weights are those of the step before and the last checkpoint is "
                f"whole; look at the data, lower --lr or --clip-grad, or go on with "
                f"--on-nonfinite skip"
            )
        journal.warn(f"{message}; this step's update is skipped on all ranks")
        self._seen = True

    def install(self) -> None:
        """With "skip", let no optimizer step happen whose loss or gradient is not finite."""
        if self.mode != "skip":
            return
        from megatron.training import training

        train_step = training.train_step

        def guarded(*args: Any, **kwargs: Any) -> Any:
            model, optimizer = args[2], args[3]
            if not hasattr(optimizer, "megatron_bp_guarded"):
                self._guard(optimizer, model)
            return train_step(*args, **kwargs)

        training.train_step = guarded

    def _guard(self, optimizer: Any, model: list[torch.nn.Module]) -> None:
        step = optimizer.step

        def guarded_step() -> tuple[bool, float | None, int | None]:
            grads = [getattr(p, "main_grad", None) for chunk in model for p in chunk.parameters()]
            bad = self._seen or any(
                not bool(torch.isfinite(g).all()) for g in grads if g is not None
            )
            self._seen = False
            device = next(model[0].parameters()).device
            flag = torch.tensor([int(bad)], device=device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            if flag.item():
                return False, None, None
            result: tuple[bool, float | None, int | None] = step()
            return result

        optimizer.step = guarded_step
        optimizer.megatron_bp_guarded = True

    def _write(self, output: Tensor, sample: Sample, training: bool) -> Path | None:
        """The file on this micro-batch; None from a full or read-only disk, so the loss is told."""
        rank, step = dist.get_rank(), self._iteration()
        path = self._folder / f"nonfinite-step{step}-rank{rank}.json"
        report = {
            "step": step,
            "rank": rank,
            "loss": str(output.item()),
            "training": training,
            "split": sample.split,
            "documents": [
                {
                    "key": key,
                    "epoch": int(sample.document_epochs[ordinal]),
                    "tokens": sample.tokens[sample.document == ordinal].tolist(),
                }
                for ordinal, key in enumerate(sample.document_keys.tolist())
            ],
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report) + "\n", encoding="utf-8")
        except OSError as error:
            journal.warn(f"{path} could not be written: {error}")
            return None
        return path
