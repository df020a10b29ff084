"""What is to be planned: a config of a run, or a file that holds a shape alone."""

import contextlib
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_bp import cpu
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.shape_file import is_shape_file, read_task
from megatron_bp.planning.task import Task

DATA = (
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "data_args_path",
    "per_split_data_args_path",
)


@dataclass(frozen=True)
class Source:
    """What a file asks for.

    Attributes:
        task: the model and a step.
        start: the layout that it names; None where it names none that these GPUs can take.
        notes: what the reader should know of how it was read.
    """

    task: Task
    start: Layout | None = None
    notes: tuple[str, ...] = ()


def read_source(
    path: Path, more: Sequence[str], gpus: int, global_batch: int | None = None
) -> Source:
    """The task of a file, and its layout on so many GPUs.

    Args:
        path: of a run config or a shape file.
        more: flags that override a run config.
        gpus: how many.
        global_batch: packed rows a step; None for the file's.

    Raises:
        ValueError: it cannot be read, or training would refuse it.
    """
    if path.is_dir() or not path.exists():
        raise ValueError(f"{path}: no such file; give a config of a run or a shape file")
    if is_shape_file(path):
        if more:
            raise ValueError(
                f"{' '.join(more)}: flags override the config of a run, and {path} is a shape "
                f"file; change it there"
            )
        task = read_task(path)
        return Source(replace(task, global_batch=global_batch or task.global_batch))
    batch = [] if global_batch is None else ["--global-batch-size", str(global_batch)]
    return _of_run([str(path), *more, *batch], gpus)


def _of_run(argv: list[str], gpus: int) -> Source:
    told = io.StringIO()  # Megatron and cpu.py tell what a run would need, and this is none
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        warnings.simplefilter("ignore")
        if cpu.needed():
            cpu.install()
        from megatron_bp.arguments.parse import parsed
        from megatron_bp.arguments.rules import refuse
        from megatron_bp.arguments.task import layout_of, task_of
    _, args, given = parsed(argv)
    if not any(getattr(args, name) for name in DATA):
        args.data_path = ["none"]  # a plan reads none
    refuse(args, given, lambda message: None)  # what this machine lacks is nothing to a plan
    task, notes = task_of(args), []
    if args.self_conditioning > 0:
        notes.append(
            f"--self-conditioning {args.self_conditioning}: its first pass and its module are not "
            f"counted"
        )
    try:
        return Source(task, layout_of(args, gpus), tuple(notes))
    except ValueError as error:
        return Source(task, None, (*notes, f"the config's own layout is left out: {error}"))
