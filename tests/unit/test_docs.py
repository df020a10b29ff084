"""The documentation tells what the code is: links, flags, defaults, tools, examples, metrics."""

import argparse
import ast
import inspect
import re
import shutil
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ranks import run_ranks

from megatron_bp.arguments.config_file import ConfigError, read_config, to_flags
from megatron_bp.arguments.flags import add_block_diffusion_flags, full_parser
from megatron_bp.training import evaluate, metrics, record
from megatron_bp.training.metrics import Step

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def pages(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])


def prose(text: str) -> str:
    """The page without its fenced code and without code spans."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(path: Path) -> set[str]:
    """Names that `#name` can point at, as GitHub makes them of headings."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+)$", FENCE.sub("", path.read_text()), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return set(found)


def broken_links(root: Path) -> list[str]:
    """Links of all pages to a file or heading that is not there, or out of the repository."""
    broken = []
    for page in pages(root):
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            there = file.exists() and file.is_relative_to(root.resolve())
            if not there or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(root)}: {target}")
    return broken


def table(text: str, heading: str) -> dict[str, list[str]]:
    """Code span in the first cell -> the other cells, for the table under a heading."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^\| `([^`]+)` \|(.*)\|$", section, re.MULTILINE)
    names = [name for name, _ in lines]
    assert len(names) == len(set(names)), "a row twice"
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in lines}


def flag_errors(text: str) -> list[str]:
    """What the table of flags says other than arguments/flags.py does."""
    parser = add_block_diffusion_flags(argparse.ArgumentParser(add_help=False))
    told = table(text, "Flags")
    actions = {action.option_strings[0]: action for action in parser._actions}
    errors = [f"{name}: no such flag" for name in told.keys() - actions.keys()]
    for name, action in actions.items():
        if name not in told:
            errors.append(f"{name}: not in the table")
            continue
        value = action.default
        value = (" ".join(map(str, value)) or None) if isinstance(value, list) else value
        default, meaning = told[name]
        if default != ("unset" if value is None else f"`{value}`"):
            errors.append(f"{name}: default {value}, not {default}")
        errors += [f"{name}: choice {c}" for c in action.choices or () if f"`{c}`" not in meaning]
    return errors


def row_fields() -> dict[str, set[str]]:
    """Keys of training rows and of evaluation rows, by the functions that make them."""
    nothing = torch.zeros(2, dtype=torch.float64)
    step = Step(
        **{name: {"diffusion": 1, "ar": 1} for name in ("loss", "loss_sum", "count")},
        **dict.fromkeys(("total", "corruptible", "corrupted", "scored", "rows", "clean_tokens"), 1),
        **dict.fromkeys(("bytes_sent", "balance", "seconds", "memory"), 1),
        bins=[],
        samples=nothing,
    )
    common = set(metrics.as_row(step))
    bound = set(evaluate.as_row(torch.ones(2, 3, dtype=torch.float64), 1, True))
    source = inspect.getsource(record)
    return {
        "train": common | added_fields(source, "_train"),
        "evaluation": common | bound | added_fields(source, "evaluate_and_print_results"),
    }


def added_fields(source: str, function: str) -> set[str]:
    """Keys of dict literals in a function of training/record.py, which it adds to its rows."""
    (found,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    dicts = [node for node in ast.walk(found) if isinstance(node, ast.Dict)]
    return {ast.literal_eval(key) for node in dicts for key in node.keys if key is not None}


def metrics_errors(text: str) -> list[str]:
    """What the table of metrics fields says other than the code does."""
    told = table(text, "Metrics")
    fields = row_fields()
    errors = []
    for name in sorted(told.keys() | fields["train"] | fields["evaluation"]):
        kinds = [kind for kind, of_kind in fields.items() if name in of_kind]
        want = {2: "all", 1: {"train": "train"}.get("".join(kinds), "validation, test"), 0: ""}
        if name not in told:
            errors.append(f"{name}: not in the table")
        elif not kinds:
            errors.append(f"{name}: no such field")
        elif told[name][1] != want[len(kinds)]:
            errors.append(f"{name}: in {want[len(kinds)]}, not {told[name][1]}")
    return errors


def missing_tools(root: Path, tools: Path) -> list[str]:
    """Tools that a page names and that do not exist."""
    text = "\n".join(page.read_text() for page in pages(root))
    named = set(re.findall(r"-m megatron_bp\.tools\.(\w+)", text))
    places = ("{}.py", "{}/__main__.py")
    return sorted(
        name for name in named if not any((tools / place.format(name)).exists() for place in places)
    )


def examples(root: Path) -> list[tuple[str, str]]:
    """(page, text) of every YAML block."""
    return [
        (str(page.relative_to(root)), textwrap.dedent(body))
        for page in pages(root)
        for _, language, body in FENCE.findall(page.read_text())
        if language in ("yaml", "yml")
    ]


def example_errors(rank: int, world: int, found: list[tuple[str, str]], folder: str) -> list[str]:
    """What the real parser says against YAML blocks; on a rank, where Megatron can be imported."""
    parser, errors = full_parser(), []
    for page, text in found:
        path = Path(folder, "example.yaml")
        path.write_text(text)
        try:
            parser.parse_args(to_flags(read_config(path), parser, page))
        except ConfigError as error:
            errors.append(f"{page}: {error}")
        except SystemExit:
            errors.append(f"{page}: a value does not suit its flag")
    return errors


@pytest.fixture
def beside_configs(tmp_path: Path) -> str:
    """A folder with the configs, for examples that include one."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return str(tmp_path / "configs")


# --- the pages -----------------------------------------------------------------------------------


def test_links_resolve() -> None:
    assert broken_links(ROOT) == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    names = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    assert [n for n in names if n != "index.md" and f"]({n})" not in index] == []


def test_design_notes_are_short_and_whole() -> None:
    notes = sorted((ROOT / "docs" / "design").glob("*.md"))
    assert [note.name[:4] for note in notes] == [f"{i:04}" for i in range(1, len(notes) + 1)]
    for note in notes:
        lines = note.read_text().splitlines()
        assert len(lines) <= 60, note.name
        headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
        want = ["Context", "Choice", "What we gave up", "How to tell that it was wrong"]
        assert headings == want, note.name


def test_pages_are_ascii() -> None:
    assert [page.name for page in pages(ROOT) if not page.read_text().isascii()] == []


def test_flags_and_defaults() -> None:
    assert flag_errors((ROOT / "docs" / "running.md").read_text()) == []


def test_metrics_fields() -> None:
    assert metrics_errors((ROOT / "docs" / "running.md").read_text()) == []


def test_tools_exist() -> None:
    assert missing_tools(ROOT, ROOT / "megatron_bp" / "tools") == []


@pytest.mark.ranks
def test_yaml_examples_hold_known_flags(beside_configs: str) -> None:
    found = examples(ROOT)
    assert len(found) >= 3
    assert run_ranks(1, example_errors, found, beside_configs)[0] == []


# --- the checks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "good"),
    [
        ("b.md", True),
        ("b.md#two-words-0001", True),
        ("#top", True),
        ("https://nowhere.invalid/", True),
        ("c.md", False),
        ("b.md#three", False),
        ("#bottom", False),
        ("b.md#not-a-heading", False),
        ("../../../../../../../../../etc", False),
    ],
)
def test_a_broken_link_is_found(tmp_path: Path, link: str, good: bool) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(f"# Top\n[here]({link}), `[code](x.md)`\n")
    (tmp_path / "docs" / "b.md").write_text("## Two words: `0001`\n```\n# Not a heading\n```\n")
    assert broken_links(tmp_path) == ([] if good else [f"docs/a.md: {link}"])


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("| `--noise` ", "| `--nois` ", "--noise: not in the table"),
        ("| `--noise` ", "| `--nois` ", "--nois: no such flag"),
        ("| `32` |", "| `16` |", "--diffusion-block-size: default 32, not `16`"),
        ("| `0.001 1.0` |", "| unset |", "--noise-interval: default 0.001 1.0, not unset"),
        (", or `one` |", " |", "--loss-weighting: choice one"),
        ("or `skip` its step", "or not", "--on-nonfinite: choice skip"),
        (
            "| `--antithetic` | `False` |",
            "| `--antithetic` | unset |",
            "--antithetic: default False, not unset",
        ),
    ],
)
def test_a_wrong_table_of_flags_is_found(old: str, new: str, error: str) -> None:
    text = (ROOT / "docs" / "running.md").read_text()
    assert text.count(old) == 1
    assert error in flag_errors(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "errors"),
    [
        ("| `skipped` |", "| `skip` |", ["skip: no such field", "skipped: not in the table"]),
        (
            "| `grad_norm` | - | train |",
            "| `grad_norm` | - | all |",
            ["grad_norm: in train, not all"],
        ),
        ("| `rows` | rows | all |", "| `rows` | rows | train |", ["rows: in all, not train"]),
        (
            "| `draws` | - | validation, test |",
            "| `draws` | - | all |",
            ["draws: in validation, test, not all"],
        ),
    ],
)
def test_a_wrong_table_of_metrics_is_found(old: str, new: str, errors: list[str]) -> None:
    text = (ROOT / "docs" / "running.md").read_text()
    assert text.count(old) == 1
    assert metrics_errors(text.replace(old, new)) == errors


@pytest.mark.parametrize(
    ("module", "kinds"), [(metrics, ("train", "evaluation")), (evaluate, ("evaluation",))]
)
def test_a_new_metrics_field_is_found(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, kinds: tuple[str, ...]
) -> None:
    before, as_row = row_fields(), module.as_row
    monkeypatch.setattr(module, "as_row", lambda *args: as_row(*args) | {"fresh": 1})
    for kind, fields in row_fields().items():
        assert fields == before[kind] | ({"fresh"} if kind in kinds else set())
    text = (ROOT / "docs" / "running.md").read_text()
    assert metrics_errors(text) == ["fresh: not in the table"]


def test_a_field_that_the_recorder_adds_is_found() -> None:
    source = inspect.getsource(record)
    for old, new, function in (
        ('"skipped": int', '"fresh": 0, "skipped": int', "_train"),
        ('{"kind": kind,', '{"kind": kind, "fresh": 0,', "evaluate_and_print_results"),
    ):
        assert source.count(old) == 1
        fresh = added_fields(source.replace(old, new), function)
        assert fresh == added_fields(source, function) | {"fresh"}


def test_a_missing_tool_is_found(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("python -m megatron_bp.tools.prepare\n")
    assert missing_tools(tmp_path, tmp_path) == ["prepare"]


@pytest.mark.ranks
def test_a_bad_example_is_found(tmp_path: Path, beside_configs: str) -> None:
    blocks = ("model:\n  num_layer: 4", "model:\n  num_layers: four", "a: [", "include: no.yaml")
    text = "\n".join(f"```yaml\n{block}\n```" for block in (*blocks, "model:\n  num_layers: 4"))
    (tmp_path / "README.md").write_text(text + "\n")
    errors = run_ranks(1, example_errors, examples(tmp_path), beside_configs)[0]
    words = ("num_layer", "does not suit", "not valid YAML", "cannot be read")
    assert len(errors) == len(words)
    assert all(word in error for word, error in zip(words, errors, strict=True))
