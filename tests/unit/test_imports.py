"""Imports look back: the order of the folders, and what stands outside of it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_bp"
ORDER = [
    *("parallel", "data", "sequence", "diffusion", "batch", "attention", "model", "planning"),
    "training",
]
OUTSIDE = ["arguments", "tools"]  # import everything; no folder imports them
ALONE = ["cpu", "picture", "__init__"]  # import nothing of ours
ENTRY = "pretrain_bdlm"  # imported by tools alone


def imported(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every import; `from x import y` gives x.y, as y may be a module."""
    here = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) + 1 - node.level] if node.level else ()
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{name.name}") for name in node.names)


def rule_broken(importer: str, target: str) -> str | None:
    """Why the module or folder `importer` must not import `target`; both stand in the package."""
    if importer in ALONE:
        return f"{importer} imports nothing of {PACKAGE}"
    if importer in OUTSIDE or target in ["__version__", "cpu", "picture", importer]:
        return None
    if importer not in ORDER:
        return f"{importer} has no place in the order: give it one in this test"
    if target in OUTSIDE:
        return f"no folder imports {target}"
    if target not in ORDER:
        return f"{target} has no place in the order: give it one in this test"
    if ORDER.index(target) > ORDER.index(importer):
        return f"{target} comes after {importer}"
    return None


def violations(root: Path) -> list[str]:
    """All imports under root/megatron_bp that look forward, each with file, line and reason."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        importer = path.relative_to(root / PACKAGE).with_suffix("").parts[0]
        for line, name in imported(path, root):
            first, *rest = name.split(".")
            reason = None
            if first == PACKAGE:
                reason = rule_broken(importer, rest[0] if rest else "__init__")
            elif first == ENTRY and importer != "tools":
                reason = f"only tools import {ENTRY}"
            if reason is not None:
                found.append(f"{path.relative_to(root)}:{line}: {reason}")
    return found


def test_imports_look_back() -> None:
    assert violations(ROOT) == []


def plant(root: Path, file: str, text: str) -> list[str]:
    path = root / PACKAGE / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return violations(root)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("data/sft.py", "from megatron_bp.batch import shard", "batch comes after data"),
        ("data/sft.py", "from megatron_bp.batch.shard import f", "batch comes after data"),
        ("data/sft.py", "import megatron_bp.training.step as s", "training comes after data"),
        ("data/sft.py", "from megatron_bp import model", "model comes after data"),
        ("data/sft.py", "from ..model import rotary", "model comes after data"),
        ("attention/kernels/sdpa.py", "from ...model import x", "model comes after attention"),
        ("attention/__init__.py", "from ..model import x", "model comes after attention"),
        ("data/sft.py", "def f():\n    import megatron_bp.batch", "batch comes after data"),
        ("data/sft.py", "if T:\n    from megatron_bp.batch import x", "batch comes after data"),
        ("training/step.py", "from megatron_bp import arguments", "no folder imports arguments"),
        ("training/step.py", "from megatron_bp.tools.plan import x", "no folder imports tools"),
        ("training/step.py", "import pretrain_bdlm", "only tools import pretrain_bdlm"),
        ("cpu.py", "from megatron_bp.parallel import state", "cpu imports nothing"),
        ("picture.py", "from megatron_bp.sequence import plan", "picture imports nothing"),
        ("__init__.py", "from megatron_bp.parallel import state", "__init__ imports nothing"),
        ("__init__.py", "from . import data", "__init__ imports nothing"),
        ("extra.py", "from megatron_bp.data import sft", "extra has no place"),
        ("training/step.py", "from megatron_bp.extra import x", "extra has no place"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, file: str, text: str, reason: str) -> None:
    (found,) = plant(tmp_path, file, text)
    assert reason in found
    assert found.startswith(f"{PACKAGE}/{file}:{1 + text.count(chr(10))}: ")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("batch/shard.py", "from megatron_bp.sequence.plan import x\nfrom . import dataset"),
        ("batch/shard.py", "from megatron_bp.batch.dataset import x"),
        ("attention/kernels/sdpa.py", "from ..merge import x\nfrom ...parallel import state"),
        ("training/step.py", "import torch\nfrom megatron.core import parallel_state"),
        ("training/step.py", "from megatron_bp import __version__, cpu"),
        ("tools/plan.py", "from megatron_bp import arguments, training"),
        ("arguments.py", "from megatron_bp.model.config import x"),
    ],
)
def test_an_allowed_import_is_not(tmp_path: Path, file: str, text: str) -> None:
    assert plant(tmp_path, file, text) == []
