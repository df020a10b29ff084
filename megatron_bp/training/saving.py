"""Saves that are whole or not there: failures named, the last complete checkpoint kept and named.

A checkpoint counts once `latest_checkpointed_iteration.txt`, the tracker, names it. Megatron writes
the tracker last, but in place, and may write over the checkpoint that it names; both are mended
here. A save that fails, and a signal that ends the run, are told in one line.
"""

import contextlib
import errno
import os
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from megatron_bp.training import journal, writers

TRACKER = "latest_checkpointed_iteration.txt"
FOLDERS = ("pretrained_checkpoint", "load", "save")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


class SaveError(RuntimeError):
    """A checkpoint could not be written."""


class LoadError(ValueError):
    """The checkpoint that --load names cannot be gone on from."""


def check_load(args: Namespace) -> None:
    """Check that the checkpoint to go on from, if there is one, is whole.

    Raises:
        LoadError: with what is wrong, and the checkpoints that are there; or --save holds a run
            that this one would write over; or one of the folders cannot be read.
    """
    try:
        _check_load(args)
    except OSError as error:
        names = [name for name in FOLDERS if _is_in(error.filename, getattr(args, name))]
        if not names:
            raise
        name = names[0]
        raise LoadError(
            f"--{name.replace('_', '-')} {getattr(args, name)}: {error.filename} cannot be read "
            f"({error.strerror}); ask its owner to open it to you, or choose another folder"
        ) from error


def _is_in(path: str | None, folder: str | None) -> bool:
    return bool(path) and bool(folder) and Path(str(path)).is_relative_to(str(folder))


def _check_load(args: Namespace) -> None:
    goes_on = bool(args.save) and _same_folder(args) and not args.finetune
    if args.save and not args.skip_train and not goes_on and (Path(args.save) / TRACKER).exists():
        raise LoadError(
            f"--save {args.save} holds the checkpoints of a run that this one does not go on from, "
            f"and would write over: give --load {args.save} to go on, or another --save"
        )
    start, step = args.pretrained_checkpoint, getattr(args, "ckpt_step", None)
    if start and not (Path(start) / TRACKER).is_file():
        raise LoadError(
            f"--pretrained-checkpoint {start}: holds no checkpoint ({TRACKER} is not there); name "
            f"the folder of a run, or one that `python -m megatron_bp.tools.convert import` made"
        )
    if start and step and not (args.load and (Path(args.load) / TRACKER).is_file()):
        steps = complete_steps(Path(start))
        if step not in steps:
            there = f"complete in {start}: {', '.join(map(str, steps)) or 'none'}"
            raise LoadError(f"--ckpt-step names step {step}, which is not complete; {there}")
        return
    if not args.load or args.ckpt_format != "torch_dist":
        return
    folder = Path(args.load)
    tracker = folder / TRACKER
    if not step and not tracker.is_file():
        if args.exit_on_missing_checkpoint or args.finetune or not _same_folder(args):
            raise LoadError(
                f"--load {args.load}: holds no checkpoint ({TRACKER} is not there), so nothing "
                f"would be gone on from; correct it, or leave it out to start anew"
            )
        return
    text = str(step) if step else tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":
        return
    steps = complete_steps(folder)
    there = f"complete in {folder}: {', '.join(map(str, steps)) or 'none'}"
    out = f"write one of these into {tracker}" if steps else f"remove {tracker} to start anew"
    if not text.isdecimal():
        raise LoadError(f"{tracker} holds {text!r}, and it must hold a step; {there}; {out}")
    if int(text) not in steps:
        named = "--ckpt-step" if step else str(tracker)
        out = "choose one of these" if step else out
        raise LoadError(f"{named} names step {text}, which is not complete; {there}; {out}")


def complete_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder` whose save came to its end."""
    names = [p.parent.name.removeprefix("iter_") for p in folder.glob("iter_*/metadata.json")]
    steps = sorted(int(name) for name in names if name.isdecimal())
    return [step for step in steps if (_of(folder, step) / ".metadata").is_file()]


def install(args: Namespace) -> None:
    """Mend Megatron's saving for the run of these arguments."""
    from megatron.training import checkpointing, dist_signal_handler, training

    if getattr(checkpointing, "megatron_bp_mended", False):
        return
    checkpointing.megatron_bp_mended = True
    if not args.enable_msc:
        checkpointing.maybe_msc = _AtomicTracker(checkpointing.maybe_msc)
    if not args.save:
        _tell_signal(args, training, dist_signal_handler)
        return
    writers.install(int(args.exit_signal), bool(args.async_save), lambda: left(args.save))
    save, finalize = training.save_checkpoint, training.maybe_finalize_async_save
    scheduled = 0

    def save_checkpoint(iteration: int, *more: Any, **kwargs: Any) -> Any:
        nonlocal scheduled
        scheduled = iteration
        done = iteration == checkpointing.get_loaded_iteration() and not args.finetune
        if done and _same_folder(args) and iteration in complete_steps(Path(args.save)):
            return None  # a run that was already done: nothing was trained since
        if args.ckpt_format == "torch_dist" and not kwargs.get("non_persistent_ckpt"):
            _prepare(args, iteration)
        with _naming(args.save, iteration):
            return save(iteration, *more, **kwargs)

    def maybe_finalize_async_save(*more: Any, **kwargs: Any) -> Any:
        with _naming(args.save, scheduled):
            return finalize(*more, **kwargs)

    training.save_checkpoint = save_checkpoint
    training.maybe_finalize_async_save = maybe_finalize_async_save
    _tell_signal(args, training, dist_signal_handler)


@contextlib.contextmanager
def errors_told(args: Namespace) -> Iterator[None]:
    """What a full or read-only disk does to a run ends it with one line and exit code 1."""
    try:
        yield
    except SaveError as error:
        message = str(error)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        message = f"{error.filename or 'a file'} could not be written ({error.strerror})"
        if args.save:
            message += f". {left(args.save)}"
    else:
        return
    print(f"pretrain_bdlm.py: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def left(save: str) -> str:
    """What is there to go on from, and how."""
    folder = Path(save)
    try:
        step = (folder / TRACKER).read_text(encoding="utf-8").strip()
    except OSError:
        return f"No checkpoint in {folder} is complete yet: the same command starts anew"
    return (
        f"The last complete checkpoint, step {step}, is untouched in {folder}: once the cause is "
        f"dealt with, the same command with --load {folder} goes on from there"
    )


def _of(folder: Path, step: int) -> Path:
    return folder / f"iter_{step:07d}"


def _same_folder(args: Namespace) -> bool:
    return bool(args.load and args.save) and Path(args.load).resolve() == Path(args.save).resolve()


def _prepare(args: Namespace, step: int) -> None:
    """An empty folder for the checkpoint of `step`; all ranks learn if there is none. Collective.

    Raises:
        SaveError: on all ranks.
    """
    error: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            _empty(args, step)
        except OSError as problem:
            error = [problem.strerror or str(problem)]
    dist.broadcast_object_list(error, src=0)
    if error[0] is not None:
        raise _failed(args.save, step, error[0] if dist.get_rank() == 0 else None)


def _empty(args: Namespace, step: int) -> None:
    """Files of an earlier run's save of this step go; a tracker that names it steps back before."""
    from megatron.training.checkpointing import get_loaded_iteration

    folder = Path(args.save)
    target, tracker = _of(folder, step), folder / TRACKER
    if tracker.is_file() and tracker.read_text(encoding="utf-8").strip() == str(step):
        loaded = get_loaded_iteration()
        if _same_folder(args) and not args.finetune and loaded in complete_steps(folder):
            with _replacing(tracker) as file:
                file.write(str(loaded))
        else:
            tracker.unlink()
    if target.is_dir() and not target.is_symlink() and any(target.iterdir()):
        journal.warn(f"{target} is of an earlier run and is written anew")
        shutil.rmtree(target)
    target.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _naming(save: str, step: int) -> Iterator[None]:
    """Turns what a failed write raises into a SaveError."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        reasons = [str(reason).removeprefix("Worker failure: ") for reason, _ in _causes(error)]
        raise _failed(save, step, "; ".join(reasons) or None) from error
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise _failed(save, step, error.strerror) from error


def _causes(error: Any) -> list[Any]:
    return list(error.failures.values())


def _failed(save: str, step: int, reason: str | None) -> SaveError:
    if reason is None:
        return SaveError(f"rank {dist.get_rank()}: step {step} could not be saved; rank 0 says why")
    room = ""
    with contextlib.suppress(OSError):
        room = f"; {shutil.disk_usage(save).free / 1e6:.1f} MB are free there"
    return SaveError(
        f"the checkpoint of step {step} could not be written to {save}: {reason}{room}. "
        f"{left(save)}. Make room (or copy {save} to where there is some, and give that), and see "
        f"that the folder can be written"
    )


class _AtomicTracker:
    """Megatron's file access, but the tracker is replaced at once: never empty, never half."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "w" and os.path.basename(path) == TRACKER:
            return _replacing(Path(path))
        return self._files.open(path, mode, *args, **kwargs)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """A file to write that takes the place of `path` when all of it is on the disk."""
    fresh = path.with_suffix(".tmp")
    with fresh.open("w", encoding="utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _tell_signal(args: Namespace, training: Any, handlers: Any) -> None:
    """A run that ends by a signal says which ranks got it and which step is saved."""
    received = handlers.DistributedSignalHandler.signals_received
    decide = training.checkpoint_and_decide_exit
    got: list[int] = []

    def signals_received(self: Any) -> list[int]:
        flags: list[int] = received(self)
        got[:] = [rank for rank, flag in enumerate(flags) if flag]
        return flags

    def checkpoint_and_decide_exit(
        model: Any, optimizer: Any, scheduler: Any, iteration: int, *more: Any, **kwargs: Any
    ) -> Any:
        leave = decide(model, optimizer, scheduler, iteration, *more, **kwargs)
        if leave and got:
            training.maybe_finalize_async_save(blocking=True)
            if dist.get_rank() == 0:
                name = signal.Signals(args.exit_signal).name
                saved = f"step {iteration} is saved in {args.save}"
                told = saved if args.save else "--save is not set, so nothing is saved"
                ranks = ", ".join(map(str, got))
                journal.warn(f"{name} to rank {ranks}: {told}; ending")
        return leave

    handlers.DistributedSignalHandler.signals_received = signals_received
    training.checkpoint_and_decide_exit = checkpoint_and_decide_exit
