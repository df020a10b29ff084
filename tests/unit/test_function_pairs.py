"""Pairs of signature with docstring and body, cut from small trees."""

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_bp.tools.function_pairs import Pair, collect, main, pairs_of, read_source


def cut(text: str, max_bytes: int = 1500) -> tuple[list[Pair], Counter[str]]:
    count: Counter[str] = Counter()
    return pairs_of(text, "a.py", max_bytes, count), count


def test_prompt_and_answer_are_the_source() -> None:
    text = (
        "import os\n\n"
        "@cache\n@other(\n    1,\n)\n"
        "def f(a,\n      b):\n"
        '    """Add.\n\n    Both."""  # why\n'
        "\n    # how\n    c = a\n    return (c +\n            b)  # end\n"
        "# after\nx = 1\n"
    )
    ((pair,), count) = cut(text)
    start, end = text.index("@cache"), text.index("# after")
    assert pair.prompt + pair.answer == text[start:end]
    assert pair.prompt.endswith('    Both."""  # why\n')
    assert pair.answer.startswith("\n    # how\n    c = a\n")
    assert pair.name == "a.py:7 f"
    assert count == {"functions": 1}


def test_methods_keep_their_indentation_and_async_is_a_function() -> None:
    text = (
        "class A:\n"
        "    class B:\n"
        "        async def f(self):\n"
        "            'Doc.'\n"
        "            await self.g()\n"
        "    @property\n"
        "    def h(self):\n"
        "        'Doc.'\n"
        "        return 1\n"
    )
    first, second = cut(text)[0]
    assert first.prompt == "        async def f(self):\n            'Doc.'\n"
    assert first.answer == "            await self.g()\n"
    assert second.prompt == "    @property\n    def h(self):\n        'Doc.'\n"
    assert [pair.name for pair in (first, second)] == ["a.py:3 A.B.f", "a.py:7 A.h"]


NESTED = (
    "def outer():\n"
    "    'Doc.'\n"
    "    def inner():\n"
    "        'Doc too.'\n"
    "        return 2\n"
    "    return inner\n"
)


def test_a_nested_function_is_no_second_pair() -> None:
    (pair,) = cut(NESTED)[0]
    assert pair.answer == "".join(NESTED.splitlines(keepends=True)[2:])


def test_a_nested_function_is_a_pair_where_the_outer_is_none() -> None:
    inner = sum(len(line) for line in NESTED.splitlines(keepends=True)[2:5])
    (pair,), count = cut(NESTED, max_bytes=inner)
    assert pair.name == "a.py:3 outer.inner"
    assert pair.size == inner
    assert count == {"functions": 2, f"over {inner} bytes": 1}
    assert cut(NESTED, max_bytes=inner - 1)[0] == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    return 1\n", "without docstring"),
        ("    f'no {1} doc'\n    return 1\n", "without docstring"),
        ("    'Doc.'\n", "docstring alone"),
        ("    'Doc.'\n    pass\n", "docstring alone"),
        ("    'Doc.'\n    ...\n", "docstring alone"),
        ("    'Doc.'\n    raise NotImplementedError\n", "docstring alone"),
        ("    'Doc.'\n    raise NotImplementedError('in C')\n", "docstring alone"),
        ("    'Doc.'; return 1\n", "body begins on the docstring's line"),
        ("    'Doc.' ; x = 1\n    return x\n", "body begins on the docstring's line"),
    ],
)
def test_what_is_left_out_is_counted(body: str, reason: str) -> None:
    assert cut(f"def f():\n{body}") == ([], {"functions": 1, reason: 1})


def test_bodies_of_one_line() -> None:
    assert cut("def f(): 'Doc.'; return 1\n")[0] == []
    (pair,) = cut("def f():\n    'Doc.'\n    return 1")[0]  # and no line end
    assert pair.answer == "    return 1"
    (pair,) = cut("def f():\n    'Doc.'\n    raise KeyError(1)\n")[0]
    assert pair.answer == "    raise KeyError(1)\n"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_tabs_and_form_feeds_stay(end: str) -> None:
    lines = [
        "x = '\x0c'",
        "\x0c",
        "def f():",
        "\t'Doc \u2028 \x0b.'",
        "\treturn '\u00e9\u4e2d'",
        "y",
    ]
    (pair,) = cut(end.join(lines))[0]
    assert pair.prompt == end.join(lines[2:4]) + end
    assert pair.answer == lines[4] + end
    assert pair.size == len((pair.prompt + pair.answer).encode()) > len(pair.prompt + pair.answer)


def test_the_encoding_is_the_files_own(tmp_path: Path) -> None:
    text = "# -*- coding: latin-1 -*-\r\ndef f():\r\n    'D\u00e9.'\r\n    return 1\r\n"
    (tmp_path / "a.py").write_bytes(text.encode("latin-1"))
    (tmp_path / "b.py").write_bytes(b"\xef\xbb\xbfx = 1\n")
    assert read_source(tmp_path / "a.py") == text
    assert read_source(tmp_path / "b.py") == "x = 1\n"


def tree(folder: Path) -> Path:
    """Six functions in a tree, of which one is a copy, and files that are none of ours."""
    for name, number in (
        ("a.py", 1),
        ("b/c.py", 2),
        ("b/copy.py", 2),
        ("site-packages/d.py", 3),
        ("b/test/e.py", 4),
        ("b/test_f.py", 5),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def f{number}():\n    'Doc.'\n    return {number}\n")
    (folder / "bad.py").write_text("def f(:\n")
    (folder / "null.py").write_bytes(b"x = '\0'\n")
    (folder / "latin.py").write_bytes(b"x = '\xe9'\n")
    (folder / "encoding.py").write_bytes(b"# coding: no-such\n")
    (folder / "text.txt").write_text("def f():\n    'Doc.'\n    return 9\n")
    return folder


def numbers(pairs: list[Pair]) -> set[int]:
    return {int(pair.answer.split()[1]) for pair in pairs}


def test_a_tree(tmp_path: Path) -> None:
    root = tree(tmp_path)
    pairs, count = collect([root], ["site-packages"], False, 1500)
    assert numbers(pairs) == {1, 2}
    assert count["files"] == 7
    assert count["the same as another"] == 1
    assert count["files that are no Python source"] == 4
    assert "b/c.py:1 f2" in {pair.name for pair in pairs}  # the first by name stays
    assert numbers(collect([root], [], True, 1500)[0]) == {1, 2, 3, 4, 5}
    assert numbers(collect([root / "b" / "test_f.py"], [], False, 1500)[0]) == {5}
    with pytest.raises(ValueError, match="no such file or folder"):
        collect([root / "nowhere"], [], False, 1500)


def test_the_order_is_of_the_names_alone(tmp_path: Path) -> None:
    """Not that of the files, and the same wherever the tree is and whatever else is in it."""
    names = []
    for place, more in (("here", ""), ("there", "def g():\n    'Doc.'\n    return 0\n")):
        folder = tmp_path / place
        folder.mkdir()
        for i in range(20):
            (folder / f"{i:02}.py").write_text(f"def f():\n    'Doc.'\n    return {i}\n")
        (folder / "more.py").write_text(more)
        pairs, _ = collect([folder], [], False, 1500)
        names.append([pair.name for pair in pairs if "more" not in pair.name])
    assert names[0] == names[1] != sorted(names[0])
    assert len(names[0]) == 20


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, output = tree(tmp_path / "tree"), tmp_path / "out" / "p.jsonl"
    main(["--input", str(root), "--output", str(output)])
    told = capsys.readouterr().out
    assert "2 pairs" in told
    assert "files that are no Python source: 4" in told
    chats = [json.loads(line) for line in output.read_text().splitlines()]
    for chat in chats:
        user, assistant = chat["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        ast.parse(user["content"] + assistant["content"])
    (root / "only").mkdir()
    with pytest.raises(SystemExit, match="no function with a docstring"):
        main(["--input", str(root / "only"), "--output", str(output)])
    assert len(output.read_text().splitlines()) == 2  # an error leaves what was there


def test_the_standard_library_is_there_by_default(tmp_path: Path) -> None:
    """A module of it: its pairs are its functions' own source, by ast's own account."""
    text = read_source(Path(ast.__file__))
    pairs, _ = cut(text, 10**6)
    assert len(pairs) > 20
    sources = {
        ast.get_source_segment(text, node, padded=True)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and not node.decorator_list
    }
    plain = [p for p in pairs if "@" not in p.prompt.split("def ")[0]]
    assert {(p.prompt + p.answer).rstrip("\n") for p in plain} <= sources
