"""Chats from source code: a function's signature and docstring, answered by its body.

`python -m megatron_bp.tools.function_pairs --output P.jsonl` cuts them from Python's own standard
library, so that fine-tuning has real data without a download. Prompt and answer are the file's own
text, character by character: together they are the function's source, from its first decorator to
the end of its last line. Knows nothing of tokenizers: `tools.prepare --format chats` reads it.
"""

import argparse
import ast
import hashlib
import io
import json
import os
import re
import sys
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef

# As Python counts lines; str.splitlines would end one at a form feed too.
LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
TESTS = re.compile(r"(?:^|/)(?:tests?|idle_test)/|(?:^|/)test_[^/]*$")


@dataclass(frozen=True)
class Pair:
    """A function cut in two.

    Attributes:
        name: file, line and qualified name: "json/decoder.py:343 JSONDecoder.decode".
        prompt: decorators, signature and docstring, whole lines.
        answer: the rest of the function, whole lines.
    """

    name: str
    prompt: str
    answer: str

    @property
    def size(self) -> int:
        """UTF-8 bytes of both."""
        return len((self.prompt + self.answer).encode())


def source_files(roots: Sequence[Path], exclude: Sequence[str], tests: bool) -> Iterator[Path]:
    """Python files under the roots (or the files that they are), in order of their names.

    Args:
        roots: folders and files.
        exclude: names of folders and files that are left out, wherever they are under a root.
        tests: take folders and files of tests too.

    Raises:
        ValueError: a root is not there.
    """
    for root in roots:
        if root.is_file():
            yield root
            continue
        if not root.is_dir():
            raise ValueError(f"--input {root}: no such file or folder")
        found = []
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name not in exclude]
            found += [Path(folder, n) for n in files if n.endswith(".py") and n not in exclude]
        for path in sorted(found):
            if tests or not TESTS.search(path.relative_to(root).as_posix()):
                yield path


def read_source(path: Path) -> str:
    """The text of a file, in the encoding that it declares, with its own line ends.

    Raises:
        SyntaxError: no such encoding.
        UnicodeDecodeError: the file is not in it.
    """
    content = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    return content.decode(encoding)


def pairs_of(text: str, file: str, max_bytes: int, count: Counter[str]) -> list[Pair]:
    """The pairs of a source text, in its order.

    A function inside of one that is taken is part of that one's answer, and no pair of its own.

    Args:
        text: source.
        file: for the names.
        max_bytes: longest pair.
        count: reasons and functions are counted here.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it cannot be parsed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    lines = LINE.findall(text)
    found: list[Pair] = []

    def walk(node: ast.AST, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, Function):
                count["functions"] += 1
                inner = f"{scope}{child.name}."
                pair = _cut(child, lines, f"{file}:{child.lineno} {inner[:-1]}")
                if isinstance(pair, Pair) and pair.size > max_bytes:
                    pair = f"over {max_bytes} bytes"
                if isinstance(pair, Pair):
                    found.append(pair)
                    continue
                count[pair] += 1
            elif isinstance(child, ast.ClassDef):
                inner = f"{scope}{child.name}."
            walk(child, inner)

    walk(tree, "")
    return found


def _cut(node: Function, lines: list[str], name: str) -> Pair | str:
    """The pair of a function, or why it makes none."""
    doc, *rest = node.body
    if ast.get_docstring(node, clean=False) is None:
        return "without docstring"
    if all(_says_nothing(statement) for statement in rest):
        return "docstring alone"
    assert doc.end_lineno is not None
    assert node.end_lineno is not None
    if rest[0].lineno <= doc.end_lineno:
        return "body begins on the docstring's line"
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    middle, last = doc.end_lineno, node.end_lineno
    return Pair(name, "".join(lines[first:middle]), "".join(lines[middle:last]))


def _says_nothing(statement: ast.stmt) -> bool:
    """Whether a statement only stands where a body has to: pass, ..., NotImplementedError."""
    if isinstance(statement, ast.Raise):
        raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
        return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
    of_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return of_constant or isinstance(statement, ast.Pass)


def collect(
    roots: Sequence[Path], exclude: Sequence[str], tests: bool, max_bytes: int
) -> tuple[list[Pair], Counter[str]]:
    """All pairs of the files, each text once, shuffled by a hash of their names; and counts."""
    count: Counter[str] = Counter()
    by_text: dict[tuple[str, str], Pair] = {}
    for path in source_files(roots, exclude, tests):
        count["files"] += 1
        root = next(root for root in roots if path == root or root in path.parents)
        name = path.name if path == root else path.relative_to(root).as_posix()
        try:
            found = pairs_of(read_source(path), name, max_bytes, count)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            count["files that are no Python source"] += 1
            continue
        for pair in found:
            if by_text.setdefault((pair.prompt, pair.answer), pair) is not pair:
                count["the same as another"] += 1
    digest = {pair.name: hashlib.sha256(pair.name.encode()).digest() for pair in by_text.values()}
    pairs = sorted(by_text.values(), key=lambda pair: (digest[pair.name], pair.name))
    return pairs, count


def write(pairs: Sequence[Pair], path: Path) -> None:
    """Write chats, a line each, in place of the file that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w", encoding="utf-8", newline="\n") as file:
        for pair in pairs:
            messages = [
                {"role": "user", "content": pair.prompt},
                {"role": "assistant", "content": pair.answer},
            ]
            file.write(json.dumps({"messages": messages, "name": pair.name}) + "\n")
    unfinished.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the chats and print what was counted; exit with 1 where there are none."""
    parser = argparse.ArgumentParser(
        "python -m megatron_bp.tools.function_pairs", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="P.jsonl", help="file to write")
    add(
        "--input",
        type=Path,
        nargs="+",
        metavar="TREE",
        help="folders and files of Python source; default: the standard library",
    )
    add(
        "--exclude",
        nargs="+",
        default=["site-packages"],
        metavar="NAME",
        help="folders and files to leave out; default: site-packages",
    )
    add("--tests", action="store_true", help="take folders and files of tests too")
    add(
        "--max-bytes",
        type=int,
        default=1500,
        metavar="N",
        help="longest pair, prompt and answer together; default: 1500",
    )
    options = parser.parse_args(argv)
    roots = options.input or [Path(sysconfig.get_path("stdlib"))]
    try:
        pairs, count = collect(roots, options.exclude, options.tests, options.max_bytes)
        if not pairs:
            raise ValueError(
                f"{', '.join(map(str, roots))}: no function with a docstring and a body of at most "
                f"{options.max_bytes} bytes in {count['files']} files; give other --input, or more "
                f"--max-bytes"
            )
        write(pairs, options.output)
    except (OSError, ValueError) as error:
        sys.exit(f"function_pairs: error: {error}")
    asked = sum(len(pair.prompt.encode()) for pair in pairs)
    answered = sum(len(pair.answer.encode()) for pair in pairs)
    print(f"{options.output}: {len(pairs)} pairs, {asked} bytes of prompts, {answered} of answers")
    print("; ".join(f"{reason}: {number}" for reason, number in count.items()))


if __name__ == "__main__":
    main()
