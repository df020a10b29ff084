"""Which data sets the flags name, and whether their files are there."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any


class AbsentError(ValueError):
    """A file that names the data cannot be read."""


def data_prefixes(args: Namespace) -> list[str]:
    """The prefixes of .bin/.idx pairs that the flags name, without the weights of a blend.

    Raises:
        AbsentError: a file of prefixes cannot be read.
        ValueError: flags that exclude each other, or what that file holds is no list of prefixes.
    """
    whole = [name for name in ("data_path", "data_args_path") if getattr(args, name)]
    split = [
        name
        for name in (
            "train_data_path",
            "valid_data_path",
            "test_data_path",
            "per_split_data_args_path",
        )
        if getattr(args, name)
    ]
    named = [f"--{name.replace('_', '-')}" for name in (*whole, *split)]
    if (
        len(whole) > 1
        or (whole and split)
        or (len(split) > 1 and "per_split_data_args_path" in split)
    ):
        raise ValueError(
            f"{' and '.join(named)}: each says where all of the data is, and only one would be "
            f"read; give one"
        )
    words: list[str] = []
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words += getattr(args, name) or ()
    if args.data_args_path:
        words += _read("--data-args-path", args.data_args_path).split()
    if args.per_split_data_args_path:
        words += _per_split(args.per_split_data_args_path)
    return [word for word in words if not _is_weight(word)]


def prefixes_here(args: Namespace) -> list[str]:
    """Those of them whose files are there: all, once a run's flags are checked."""
    try:
        return [prefix for prefix in data_prefixes(args) if missing_files([prefix]) is None]
    except AbsentError:
        return []


def lacking(args: Namespace) -> str | None:
    """What of the data is not there, with the way out; None if all is.

    Raises:
        ValueError: as `data_prefixes`.
    """
    try:
        missing = missing_files(data_prefixes(args))
    except AbsentError as error:
        return str(error)
    if missing is None:
        return None
    return (
        f"{missing}: no such file; --data-path takes the prefix of a .bin/.idx pair "
        f"(`python -m megatron_bp.tools.prepare` makes one)"
    )


def missing_files(prefixes: list[str]) -> str | None:
    """The first file that is not there."""
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            if not Path(prefix + suffix).is_file():
                return prefix + suffix
    return None


def _per_split(path: str) -> list[str]:
    flag = "--per-split-data-args-path"
    try:
        content: Any = json.loads(_read(flag, path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{flag} {path}: is not JSON ({error})") from error
    if not isinstance(content, dict) or not {"train", "valid", "test"} <= content.keys():
        raise ValueError(f"{flag} {path}: must be an object with train, valid and test")
    words: list[str] = []
    for name in ("train", "valid", "test"):
        part = content[name]
        part = part.split() if isinstance(part, str) else part
        if not isinstance(part, list) or not all(isinstance(word, str) for word in part):
            raise ValueError(f"{flag} {path}: `{name}` must be prefixes, as text or a list of text")
        words += part
    return words


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AbsentError(f"{flag} {path}: cannot be read ({error})") from error


def _is_weight(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
