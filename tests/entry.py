"""pretrain_bdlm.py and tools inside the ranks of ranks.py: faster than new processes."""

import contextlib
import importlib
import io
import os
import runpy
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


def command(rank: int, world: int, words: list[str], environment: dict[str, str]) -> str:
    """One rank of `[torchrun] python WORDS`: a file or -m MODULE, and arguments.

    Returns:
        What it wrote to standard output.

    Raises:
        AssertionError: it ended with another code than 0.
    """
    os.chdir(ROOT)
    os.environ.update(environment)
    sys.path.insert(0, str(ROOT))
    written, code = io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(written):
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        print(written.getvalue())
    assert code == 0, f"{words} ended with {code}"
    return written.getvalue()


def tensors(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint: weights and the optimizer's."""
    checkpoints = importlib.import_module("megatron.core.dist_checkpointing")
    loaded = checkpoints.load_plain_tensors(path)
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, torch.Tensor)}
