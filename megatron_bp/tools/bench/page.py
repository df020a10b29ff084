"""Puts what a benchmark printed into its place on a page of the documentation.

The place lies between the lines `<!-- NAME -->` and `<!-- end of NAME -->`.
"""

import datetime
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch


def put(page: Path, name: str, command: Sequence[str], lines: Sequence[str]) -> None:
    """Replace what stands there by the command, the date and the lines.

    Args:
        page: a Markdown file.
        name: of the place.
        command: words after `python -m megatron_bp.tools.bench`.
        lines: what was printed.

    Raises:
        ValueError: the page is not there, or has no such place.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--page {page}: {error.strerror}; give a page that is there") from error
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"--page {page} {name}: it has no lines {begin.strip()} and {end.strip()}")
    told = [
        f"    .venv/bin/python -m megatron_bp.tools.bench {shlex.join(command)}",
        "",
        f"{datetime.date.today()}, Python {platform.python_version()}, torch {torch.__version__}.",
        *lines,
    ]
    page.write_text(before + begin + "\n".join(told) + "\n" + end + after, encoding="utf-8")
