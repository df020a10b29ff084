"""docs/troubleshooting.md quotes what is really printed."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import torch.distributed.elastic

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
HOLE = "..."  # stands for a value, in the page and in what is compared
# Said by others: where, or None for the C++ libraries and the system.
OTHERS = {
    "Root Cause (first observed failure)": "multiprocessing/errors/__init__.py",
    "exitcode  : -9": None,
    "The connection to the C10d store has failed": "rendezvous/c10d_rendezvous_backend.py",
    "SignalException": "multiprocessing/api.py",
    "Connection reset by peer": None,
    "Connection closed by peer": None,
    "CUDA out of memory": None,
    "Watchdog caught collective operation timeout": None,
    "balance": None,
    "bytes_sent": None,
}


def texts(tree: ast.AST) -> Iterator[str]:
    """All text that a program can print, with holes for values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else HOLE for p in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@functools.cache
def printed() -> str:
    """What this project prints, in one line; variables of scripts are holes too."""
    found = [
        text
        for path in sorted((ROOT / "megatron_bp").rglob("*.py"))
        for text in texts(ast.parse(path.read_text()))
    ]
    for path in sorted((ROOT / "scripts" / "slurm").iterdir()):
        found.append(re.sub(r"\$\{?\w+\}?", HOLE, path.read_text()))
    return " ".join("\n".join(found).split())


def quoted() -> list[str]:
    """Code in the first cell of each row of the tables."""
    rows = re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row)]


def missing(quotes: list[str], said: str) -> list[str]:
    """Quotes that are not said, up to values."""
    return [
        quote
        for quote in quotes
        if not re.search(".{0,80}?".join(map(re.escape, quote.split(HOLE))), said)
    ]


def test_messages_of_this_project_are_quoted_as_they_are() -> None:
    ours = [quote for quote in quoted() if quote not in OTHERS]
    assert len(ours) > 25
    assert missing(ours, printed()) == []


def test_a_message_that_is_said_otherwise_is_found() -> None:
    said = printed()
    assert missing(["is given twice; keep none"], said) == ["is given twice; keep none"]
    assert missing(["was trained with ... contract"], said) == []


def test_messages_of_torchrun_are_quoted_as_they_are() -> None:
    elastic = Path(torch.distributed.elastic.__file__).parent
    assert set(OTHERS) <= set(quoted()), "a row is gone"
    for quote, file in OTHERS.items():
        if file is not None:
            assert quote in (elastic / file).read_text(), quote
