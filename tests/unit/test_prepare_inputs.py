"""What prepare reads: whole files, lines, paragraphs, JSON lines, each gzipped too; and flaws."""

import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_bp.tools import prepare as tool
from megatron_bp.tools.prepare import Options, encoding, reading
from megatron_bp.tools.prepare.command import input_size


def run(source: Path, prefix: Path, **options: Any) -> dict[str, Any]:
    return tool.prepare(Options([source], prefix, **options))


def read(prefix: Path) -> list[str]:
    data = IndexedDataset(str(prefix))
    return [bytes(data[i].tolist()).decode() for i in range(len(data))]


def put(path: Path, content: bytes) -> Path:
    """Writes a file, gzipped if its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


LINES = "".join(
    json.dumps({"id": i, "text": f"text {i} \u00e9\n"}) + "\n" for i in range(9)
).encode()
PROSE = b"one\ntwo\r\n\n \t\n\nthree\n\r\nfour\nfive\n"


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.ndjson.gz", "a.json.gz"])
def test_json_lines_by_suffix(tmp_path: Path, name: str) -> None:
    result = run(put(tmp_path / name, LINES), tmp_path / "p")
    assert sorted(read(tmp_path / "p")) == [f"text {i} \u00e9\n" for i in range(9)]
    assert result["bytes"] == result["tokens"] == 9 * 10
    assert result["skipped"] == {}


def test_plain_json_is_text_unless_told(tmp_path: Path) -> None:
    source = put(tmp_path / "tree/a.json", LINES)
    run(source, tmp_path / "p")
    assert read(tmp_path / "p") == [LINES.decode()]
    run(source, tmp_path / "q", format="jsonl")
    assert len(read(tmp_path / "q")) == 9
    run(put(tmp_path / "b.jsonl", LINES), tmp_path / "r", format="text")
    assert read(tmp_path / "r") == [LINES.decode()]


def test_json_key_crlf_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    lines = b'\xef\xbb\xbf{"body": "first", "text": 1}\r\n\r\n  \n{"body": "second"}'
    result = run(put(tmp_path / "a.jsonl", lines), tmp_path / "p", json_key="body")
    assert sorted(read(tmp_path / "p")) == ["first", "second"]
    assert result["skipped"] == {}


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(
    ("separator", "texts"),
    [
        ("file", [PROSE.decode()]),
        ("line", ["five", "four", "one", "three", "two"]),
        ("blank-line", ["four\nfive", "one\ntwo", "three"]),
    ],
)
def test_separators(tmp_path: Path, separator: str, texts: list[str], ending: str) -> None:
    source = put(tmp_path / f"a.txt{ending}", PROSE)
    run(source, tmp_path / "p", document_separator=separator)
    assert sorted(read(tmp_path / "p")) == texts


def test_a_suffix_fits_before_gz(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt.gz", "c.gz", "d.md.gz"):
        put(tmp_path / "tree" / name, name.encode())
    result = run(tmp_path / "tree", tmp_path / "p", suffix=[".txt"])
    assert sorted(read(tmp_path / "p")) == ["a.txt", "b.txt.gz"]
    assert result["skipped"] == {"other_suffix": 2}


FLAWED = [
    (b'{"text": "cut', "bad_json"),
    (b"[" * 99999, "bad_json"),
    (b'{"text": ' + b"9" * 9999 + b"}", "bad_json"),
    (b'["text"]', "not_an_object"),
    (b'{"texts": "x"}', "missing_key"),
    (b'{"text": 3}', "not_a_string"),
    (b'{"text": null}', "not_a_string"),
    (b'{"text": "a\\u0000b"}', "nul_byte"),
    (b'{"text": "\\ud800 half a pair"}', "not_utf8"),
    (b'{"text": "\xff\xfe"}', "not_utf8"),
    (b'{"text": ""}', "too_short"),
    (b'{"text": "text 3 \\u00e9\\n"}', "duplicate"),
]


@pytest.mark.parametrize(("line", "reason"), FLAWED)
def test_a_flawed_line_is_skipped_and_told(tmp_path: Path, line: bytes, reason: str) -> None:
    lines = LINES.splitlines(keepends=True)
    source = put(tmp_path / "a.jsonl", b"".join([*lines[:4], line + b"\n", *lines[4:]]))
    result = run(source, tmp_path / "p")
    assert result["skipped"] == {reason: 1}
    assert len(read(tmp_path / "p")) == 9
    if reason != "duplicate":  # which of two equal texts stays is the seed's choice
        assert result["skipped_places"] == {reason: ["0/a.jsonl:5"]}
    if reason in ("duplicate", "too_short"):
        run(source, tmp_path / "q", strict=True)
        return
    with pytest.raises(ValueError, match=rf"0/a\.jsonl:5: {reason}; mend it, or leave --strict"):
        run(source, tmp_path / "q", strict=True)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", *(f"p{x}" for x in sorted(tool.ENDINGS))]


def test_the_first_few_places_in_the_order_of_the_files(tmp_path: Path) -> None:
    for name in "dcba":
        put(tmp_path / f"tree/{name}.jsonl", LINES + b"{}\n{\n" + name.encode() * 5 + b"\n{}\n")
    for seed in range(4):  # which shuffles the files
        result = run(tmp_path / "tree", tmp_path / "p", seed=seed, overwrite=True)
        assert result["skipped"] == {"bad_json": 8, "duplicate": 27, "missing_key": 8}
        places = result["skipped_places"]
        assert places["bad_json"] == ["0/a.jsonl:11", "0/a.jsonl:12", "0/b.jsonl:11"]
        assert places["missing_key"] == ["0/a.jsonl:10", "0/a.jsonl:13", "0/b.jsonl:10"]


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.txt.gz"])
@pytest.mark.parametrize("damage", ["cut", "checksum", "no gzip"])
def test_nothing_is_taken_of_a_damaged_gzip(tmp_path: Path, name: str, damage: str) -> None:
    """A wrong checksum shows only at the end of a file, when its lines have been read."""
    packed = gzip.compress(b'{"text": "other"}\n' * 3000 + LINES, mtime=0)
    content = {
        "cut": packed[:-9],
        "checksum": packed[:-8] + zlib.crc32(b"else").to_bytes(4, "little") + packed[-4:],
        "no gzip": LINES,
    }[damage]
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a.jsonl").write_bytes(LINES)
    (tmp_path / "tree" / name).write_bytes(content)
    result = run(tmp_path / "tree", tmp_path / "p")
    assert result["skipped"] == {"bad_gzip": 1}
    assert sorted(read(tmp_path / "p")) == [f"text {i} \u00e9\n" for i in range(9)]
    with pytest.raises(ValueError, match=r"0/b\..*: bad_gzip; mend it"):
        run(tmp_path / "tree", tmp_path / "q", strict=True)


def test_an_unreadable_stream_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "tree/a.jsonl", LINES)
    put(tmp_path / "tree/b.jsonl", LINES.replace(b"text ", b"more "))
    real = reading._lines

    def failing(stream: Any) -> Any:
        for number, line in real(stream):
            if number == 5 and b"more" in line:
                raise OSError(5, "Input/output error")
            yield number, line

    monkeypatch.setattr(reading, "_lines", failing)
    result = run(tmp_path / "tree", tmp_path / "p")
    assert result["skipped"] == {"unreadable": 1}
    assert len(read(tmp_path / "p")) == 9


def test_a_document_too_long_for_an_index_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "LONGEST", 50)
    put(tmp_path / "tree/a.txt", b"x" * 51)
    put(tmp_path / "tree/b.txt", b"x" * 50)
    assert run(tmp_path / "tree", tmp_path / "p")["skipped"] == {"too_long": 1}
    assert read(tmp_path / "p") == ["x" * 50]


def test_documents_of_one_file_are_shuffled_by_the_seed(tmp_path: Path) -> None:
    texts = [f"document number {i}" for i in range(60)]
    source = put(tmp_path / "a.txt", "\n".join(texts).encode())
    for prefix, seed in [("p", 1), ("q", 1), ("r", 2)]:
        run(source, tmp_path / prefix, document_separator="line", seed=seed)
    one, two, three = (read(tmp_path / x) for x in "pqr")
    assert one == two
    assert len({str(x) for x in (one, three, texts)}) == 3
    assert sorted(one) == sorted(three) == sorted(texts)
    source.write_text("\n".join(texts[:40]))  # the order of two does not depend on the others
    run(source, tmp_path / "s", document_separator="line", seed=1)
    assert read(tmp_path / "s") == [x for x in one if x in texts[:40]]


@pytest.mark.parametrize("separator", ["file", "line"])
def test_max_bytes_is_a_prefix_and_counts_only_what_comes_before(
    tmp_path: Path, separator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the skipped, and when reading stops early (only whole files let it)."""
    monkeypatch.setattr(reading, "BATCH_ITEMS", 4)
    for i in range(40):
        put(tmp_path / f"tree/{i:02}.txt", b"\xff\xff" if i % 5 == 0 else b"%04d" % (i % 30))
    source = tmp_path / "tree"
    if separator == "line":
        source = put(
            tmp_path / "a.txt", b"\n".join(p.read_bytes() for p in sorted(source.iterdir()))
        )
    options = {"document_separator": separator}
    every = run(source, tmp_path / "all", **options)
    assert every["skipped"] == {"duplicate": 8, "not_utf8": 8}
    texts, before = read(tmp_path / "all"), Counter[str]()
    for n in range(1, 25):
        result = run(source, tmp_path / f"p{n}", max_bytes=4 * n, **options)
        assert read(tmp_path / f"p{n}") == texts[:n]
        assert Counter(result["skipped"]) >= before
        before = Counter(result["skipped"])
        assert sum(before.values()) < 4 or n > 1, "counted what comes after"
    assert every["documents"] == 24


def test_bytes_of_each_document_without_the_end(tmp_path: Path) -> None:
    result = run(put(tmp_path / "a.jsonl", LINES), tmp_path / "p", append_eod=True)
    sizes = np.load(tmp_path / "p.bytes.npy")
    assert sizes.dtype == np.int64
    data = IndexedDataset(str(tmp_path / "p"))
    assert sizes.tolist() == [len(data[i]) - 1 for i in range(9)] == [10] * 9
    assert (result["bytes"], result["tokens"], result["append_eod"]) == (90, 99, True)


@pytest.mark.parametrize("separator", ["file", "line", "blank-line"])
def test_progress_adds_up_to_the_size_of_the_input(tmp_path: Path, separator: str) -> None:
    for name in ("a.txt", "b.txt.gz", "c.jsonl", "d.jsonl.gz"):
        put(tmp_path / "tree" / name, (LINES if "json" in name else PROSE * 9) + b"\n\n")
    options = Options([tmp_path / "tree"], tmp_path / "p", document_separator=separator)
    told: list[int] = []
    tool.prepare(options, told.append)
    assert (
        sum(told) == input_size(options) == sum(p.stat().st_size for p in tmp_path.glob("tree/*"))
    )
    assert min(told) >= 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = put(tmp_path / "a.jsonl", LINES * 50)
    for kind, bar in ((Terminal, True), (io.StringIO, False)):
        stream = kind()
        monkeypatch.setattr("sys.stderr", stream)
        tool.main([f"--input={source}", f"--output-prefix={tmp_path}/p", "--overwrite"])
        assert ("100%" in stream.getvalue()) == bar
    assert source.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--format xml", "invalid choice"),
        ("--workers 0", "--workers is 0"),
        ("--tokenizer spm", "invalid choice"),
        ("--tokens 3", r"unrecognized arguments: --tokens 3 \(Megatron's need --tokenizer-type\)"),
        ("--tokenizer bytes --tokenizer-type NullTokenizer", "exclude each other"),
    ],
)
def test_wrong_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    put(tmp_path / "a.txt", b"text")
    with pytest.raises(SystemExit) as error:
        tool.main([f"--input={tmp_path}/a.txt", f"--output-prefix={tmp_path}/p", *line.split()])
    told = capsys.readouterr().err if error.value.code == 2 else str(error.value.code)
    (last,) = [x for x in told.splitlines() if "error: " in x]
    assert re.search(message, last)
    assert os.listdir(tmp_path) == ["a.txt"]


def test_the_command_line_tells_what_was_left_out_and_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = put(tmp_path / "a.jsonl", LINES + b"{\n")
    line = f"--input {source} --output-prefix {tmp_path}/p"
    tool.main(line.split())
    told = capsys.readouterr()
    assert "9 documents, 90 tokens" in told.out
    assert "left out: 1 bad_json" in told.out
    assert "bad_json: 0/a.jsonl:10\n" in told.err
    with pytest.raises(SystemExit, match=r"^prepare: error: 0/a\.jsonl:10: bad_json; [^\n]*$"):
        tool.main([*line.split(), "--overwrite", "--strict"])


@pytest.mark.parametrize("prefix", [".", "..", "/", "data/", "data/.."])
def test_an_output_prefix_without_a_name_is_refused(
    tmp_path: Path, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_bp.tools.prepare.command import main

    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(SystemExit) as end:
        main(["--input", str(tmp_path), "--output-prefix", prefix])
    assert "names no file" in f"{end.value.code}{capsys.readouterr().err}"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
