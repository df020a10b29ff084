"""megatron_bp.tools.prepare: what gets in, what does not, and that all is there or nothing."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron_bp.tools import prepare as tool
from megatron_bp.tools.prepare import EOD_ID, Found, Options, Tally

TEXTS = {
    "b.py": "print(1)\n",
    "a.py": "x = 1\n",
    "sub/c.py": "\u00e9t\u00e9\n",
    "sub/d.md": "# d\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name, text in TEXTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def run(tree: Path, prefix: Path, **options: Any) -> dict[str, Any]:
    return tool.prepare(Options([tree], prefix, **options))


def read(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(str(prefix))  # its arrays are views of a map that goes with it: a crash
    return [data[i].tolist() for i in range(len(data))]


def test_round_trip(tree: Path, tmp_path: Path) -> None:
    result = run(tree, tmp_path / "p")
    texts = sorted(bytes(ids).decode() for ids in read(tmp_path / "p"))
    assert texts == sorted(TEXTS.values())
    data = IndexedDataset(str(tmp_path / "p"))
    assert data.index.dtype is np.uint16
    assert data.document_indices.tolist() == [0, 1, 2, 3, 4]
    total = sum(len(text.encode()) for text in TEXTS.values())
    assert (result["documents"], result["tokens"], result["bytes"]) == (4, total, total)
    assert json.loads((tmp_path / "p.json").read_text()) == result
    assert sorted(os.listdir(tmp_path)) == ["p.bin", "p.bytes.npy", "p.idx", "p.json", "tree"]


def test_append_eod(tree: Path, tmp_path: Path) -> None:
    result = run(tree, tmp_path / "p", append_eod=True)
    assert all(ids[-1] == EOD_ID and EOD_ID not in ids[:-1] for ids in read(tmp_path / "p"))
    assert result["tokens"] == result["bytes"] + 4


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("nul.py", b"a\0b", "nul_byte"),
        ("latin.py", b"\xe9t\xe9", "not_utf8"),
        ("copy.py", TEXTS["a.py"].encode(), "duplicate"),
        ("empty.py", b"", "too_short"),
        ("one.py", b"x", "too_short"),
        ("other.txt", b"text", "other_suffix"),
        ("no.py", b"text", "excluded"),
    ],
)
def test_skipped(tree: Path, tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tree / name).write_bytes(content)
    result = run(tree, tmp_path / "p", suffix=[".py", ".md"], exclude=["no.*"])
    assert result["skipped"] == {reason: 1}
    assert result["documents"] == 4


def test_skips_what_is_no_regular_file(tree: Path, tmp_path: Path) -> None:
    (tree / "link.py").symlink_to(tree / "a.py")
    (tree / "folder").symlink_to(tmp_path)
    os.mkfifo(tree / "pipe.py")
    assert run(tree, tmp_path / "p")["skipped"] == {"not_a_regular_file": 1, "symlink": 2}


def test_skips_what_cannot_be_read(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "a.py":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert run(tree, tmp_path / "p")["skipped"] == {"unreadable": 1}


def test_exclude_fits_paths_and_names(tree: Path) -> None:
    for pattern, left in [("sub", 2), ("sub/*", 2), ("*.md", 3), ("c.py", 3), ("ub", 4)]:
        assert len(list(tool.walk([tree], [], [pattern], Tally().skipped))) == left


def test_walk_is_sorted_and_takes_files_and_links_that_are_named(
    tree: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tree)
    names = [x.name for x in tool.walk([tree / "a.py", link], [], [], Tally().skipped)]
    assert names == ["0/a.py", "1/a.py", "1/b.py", "1/sub/c.py", "1/sub/d.md"]


def test_two_runs_give_the_same_bytes_wherever_the_tree_lies(tree: Path, tmp_path: Path) -> None:
    run(tree, tmp_path / "p")
    moved = tree.rename(tmp_path / "elsewhere")
    run(moved, tmp_path / "q")
    run(moved, tmp_path / "r", seed=5)
    for ending in tool.ENDINGS:
        one, two = ((tmp_path / f"{x}{ending}").read_bytes() for x in "pq")
        assert one == two
    assert (tmp_path / "p.bin").read_bytes() != (tmp_path / "r.bin").read_bytes()
    assert sorted(read(tmp_path / "p")) == sorted(read(tmp_path / "r"))


def test_order_of_two_files_does_not_depend_on_the_others() -> None:
    files = [Found(f"0/{i}", Path(str(i))) for i in range(50)]
    order = tool.shuffled(files, 1)
    assert order != files
    assert [x for x in order if x in files[:20]] == tool.shuffled(reversed(files[:20]), 1)


def test_max_bytes_takes_whole_documents_from_the_front(tree: Path, tmp_path: Path) -> None:
    run(tree, tmp_path / "all")
    every = read(tmp_path / "all")
    run(tree, tmp_path / "p", max_bytes=len(every[0]) + 1)
    assert read(tmp_path / "p") == every[:2]


class Stop(BaseException):
    """Like KeyboardInterrupt, but pytest takes no notice."""


@pytest.mark.parametrize("method", ["add_document", "finalize"])
@pytest.mark.parametrize("error", [Stop, OSError])
def test_interruption_leaves_nothing_behind(
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    error: type[BaseException],
) -> None:
    real = getattr(IndexedDatasetBuilder, method)

    def stop(*args: Any) -> None:
        real(*args)
        raise error

    monkeypatch.setattr(IndexedDatasetBuilder, method, stop)
    with pytest.raises(error):
        run(tree, tmp_path / "p")
    assert os.listdir(tmp_path) == ["tree"]


def test_interruption_of_an_overwrite_leaves_no_mixed_pair(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tree, tmp_path / "p")
    real, moved = os.replace, []

    def replace(source: str, target: str) -> None:
        if moved:
            raise Stop
        moved.append(target)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Stop):
        run(tree, tmp_path / "p", overwrite=True, seed=5)
    assert os.listdir(tmp_path) == ["tree"]


@pytest.mark.parametrize("ending", tool.ENDINGS)
def test_refuses_to_overwrite(tree: Path, tmp_path: Path, ending: str) -> None:
    (tmp_path / f"p{ending}").write_text("mine")
    with pytest.raises(ValueError, match=r"exists: give another --output-prefix, or --overwrite"):
        run(tree, tmp_path / "p")
    assert (tmp_path / f"p{ending}").read_text() == "mine"
    run(tree, tmp_path / "p", overwrite=True)
    assert len(read(tmp_path / "p")) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suffix": [".rs"]}, r"No file found in --input .*4 other_suffix.*check"),
        ({"min_tokens": 99}, r"None of 4 files .*4 too_short.*--min-tokens"),
        ({"min_tokens": 0}, r"--min-tokens is 0"),
        ({"max_bytes": 0}, r"--max-bytes is 0"),
    ],
)
def test_errors(tree: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(tree, tmp_path / "p", **options)
    assert os.listdir(tmp_path) == ["tree"]


def test_errors_of_paths(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--input .*nowhere does not exist"):
        run(tmp_path / "nowhere", tmp_path / "p")
    with pytest.raises(ValueError, match=r"Cannot write in .*a\.py \(.*choose another"):
        run(tree, tree / "a.py" / "p")


def test_entropy_of_known_texts(tmp_path: Path) -> None:
    assert tool.entropy(np.array([4, 4, 0, 4, 4])) == 2.0
    assert math.copysign(1, tool.entropy(np.array([7, 0]))) == 1.0
    (tmp_path / "t").write_text("aabc")  # 1/2, 1/4, 1/4: 1.5 bits
    result = run(tmp_path / "t", tmp_path / "p")
    assert result["unigram_bits_per_token"] == result["unigram_bits_per_byte"] == 1.5
    (tmp_path / "t").write_text("abc")  # and the end: 4 tokens of 2 bits over 3 bytes
    result = run(tmp_path / "t", tmp_path / "q", append_eod=True)
    assert result["unigram_bits_per_token"] == 2.0
    assert result["unigram_bits_per_byte"] == round(8 / 3, 6)


def test_command_line(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"--input {tree} --output-prefix {tmp_path}/deep/er/p --suffix .py --suffix .md"
    tool.main([*line.split(), "--exclude", "a.*", "b.*", "--min-tokens", "1"])
    assert "2 documents, 10 tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"prepare: error: .* exists"):
        tool.main(line.split())
