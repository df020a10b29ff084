"""pretrain_bdlm.py inside the rank processes of ranks.py: faster than a start with torchrun."""

import contextlib
import importlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def pretrain(
    rank: int, world: int, arguments: list[str], before_step: Callable[..., None] | None = None
) -> tuple[int, str]:
    """One rank of a run: its exit code and what it wrote to standard error.

    Before each training step, `before_step(rank, step)` is called.
    """
    sys.path.insert(0, str(ROOT))
    import pretrain_bdlm

    if before_step is not None:
        from megatron.training import get_args, training

        train_step = training.train_step

        def step(*args: Any, **kwargs: Any) -> Any:
            before_step(rank, get_args().curr_iteration + 1)
            return train_step(*args, **kwargs)

        training.train_step = step
    sys.argv = ["pretrain_bdlm.py", *arguments]
    written, code = io.StringIO(), 0
    try:
        with contextlib.redirect_stderr(written):
            pretrain_bdlm.main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        print(written.getvalue())
    return code, written.getvalue()


def tensors(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint: weights and the optimizer's."""
    checkpoints = importlib.import_module("megatron.core.dist_checkpointing")
    loaded = checkpoints.load_plain_tensors(path)
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, torch.Tensor)}
