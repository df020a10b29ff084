"""What a run needs and the machine may lack: a run refuses, a dry run notes it and goes on.

A dry run looks at a run from a machine that need not have its data, checkpoints, packages or GPUs.
"""

import io
import os
from argparse import Namespace
from collections.abc import Callable

from megatron_bp.arguments.attention import attention_options

Absent = Callable[[str], None]
"""Told of what is not there: `refused.no` in a run."""


class DryRun:
    """Collects what could not be looked at here.

    Attributes:
        notes: each once, in order.
        told: what Megatron and this project print on the way.
        fused: the run's layers are Transformer Engine's, for which local ones stand in.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.told = io.StringIO()
        self.fused = False

    def note(self, message: str) -> None:
        """Go on without something; the run checks it at its start."""
        if message not in self.notes:
            self.notes.append(message)

    def flags(self, flags: list[str]) -> list[str]:
        """The flags with what lets Megatron write nothing and need no GPU's packages."""
        self.fused = _given(flags)["--transformer-impl"] != "local"
        return [*quiet(flags), "--transformer-impl", "local"]

    def without(self, args: Namespace) -> None:
        """Go on without the checkpoints and the kernel that are not here."""
        for name in ("load", "pretrained_checkpoint"):
            folder = getattr(args, name)
            if folder and not os.path.isdir(folder):
                flag = f"--{name.replace('_', '-')}"
                self.note(f"checkpoint: not found at {folder} ({flag})")
                setattr(args, name, None)
        try:
            attention_options(args)
        except ValueError as error:
            self.note(f"attention kernel: {error}")
            args.attention_kernel = "auto"


def quiet(flags: list[str]) -> list[str]:
    """The flags with what lets Megatron write nothing."""
    more = ["--no-one-logger"]
    for name in ("--tensorboard-dir", "--wandb-project"):
        if name in _given(flags):
            more += [name, ""]
    return [*flags, *more]


def _given(flags: list[str]) -> dict[str, str]:
    """Option -> the word after it."""
    return {
        token.partition("=")[0]: token.partition("=")[2] if "=" in token else value
        for token, value in zip(flags, [*flags[1:], ""], strict=True)
        if token.startswith("--")
    }
