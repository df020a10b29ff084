"""Seeded damage to data sets and to texts: found, or counted, or without any meaning.

Nothing may end in a traceback of another kind than DataError or ValueError, and no damage may be
taken in silence. What a file means is read here by code of this test, or by Megatron's own reader.
"""

import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_bp.data.checks import DataError, IndexedFacts, check_indexed, document_bytes
from megatron_bp.tools import prepare as tool
from megatron_bp.tools.prepare import Options

SEEDS = range(25)
N = 12  # documents of the base data set
SIZE, LENGTHS, POINTERS, BOUNDARIES = 34, 34, 34 + 4 * N, 34 + 12 * N
VOCABULARY = 258
Rng = np.random.Generator


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data sets p and q, of as many documents but other texts."""
    folder = tmp_path_factory.mktemp("base")
    rng = np.random.default_rng(7)
    for name in "pq":
        rows = ["".join(map(chr, rng.integers(97, 123, rng.integers(2, 30)))) for _ in range(N)]
        (folder / "text").write_text("\n".join(rows))
        tool.prepare(Options([folder / "text"], folder / name, document_separator="line"))
    return folder


# --- .bin and .idx --------------------------------------------------------------------------------


def cut(rng: Rng, files: dict[str, bytearray]) -> None:
    name = rng.choice(["bin", "idx"])
    del files[name][int(rng.integers(0, len(files[name]))) :]


def extend(rng: Rng, files: dict[str, bytearray]) -> None:
    name = rng.choice(["bin", "idx"])
    files[name] += rng.bytes(int(rng.integers(1, 40)))


def flip(start: int, stop: int | None, name: str = "idx") -> Callable[[Rng, dict], None]:
    def mutate(rng: Rng, files: dict[str, bytearray]) -> None:
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(start, stop or len(files[name])))
            files[name][at] ^= int(rng.integers(1, 256))

    return mutate


def swap(rng: Rng, files: dict[str, bytearray]) -> None:
    """Another data set's file, or each in the other's place."""
    kind = rng.integers(0, 3)
    if kind == 2:
        files["bin"], files["idx"] = files["idx"], files["bin"]
    else:
        name = ("bin", "idx")[kind]
        files[name] = files[f"other {name}"]


def zero(rng: Rng, files: dict[str, bytearray]) -> None:
    name = rng.choice(["bin", "idx"])
    start = int(rng.integers(0, len(files[name])))
    stop = int(rng.integers(start, len(files[name]))) + 1
    files[name][start:stop] = bytes(stop - start)


def dtype_code(rng: Rng, files: dict[str, bytearray]) -> None:
    files["idx"][17] = int(rng.choice([x for x in range(256) if x != 8]))


def lengths(rng: Rng, files: dict[str, bytearray]) -> None:
    """Two lengths changed so that their sum stays."""
    view = np.frombuffer(files["idx"], np.int32, N, LENGTHS)
    one, two = rng.choice(N, 2, replace=False)
    by = int(rng.integers(1, view[one] + 1))
    view[one] -= by
    view[two] += by


def boundary(rng: Rng, files: dict[str, bytearray]) -> None:
    """An inner boundary moved by one: a document of two texts beside an empty one."""
    view = np.frombuffer(files["idx"], np.int64, N + 1, BOUNDARIES)
    view[rng.integers(1, N)] += rng.choice([-1, 1])


MUTATIONS = {
    "cut": cut,
    "extend": extend,
    "header": flip(0, SIZE),
    "lengths": flip(LENGTHS, POINTERS),
    "lengths of equal sum": lengths,
    "pointers": flip(POINTERS, BOUNDARIES),
    "boundaries": flip(BOUNDARIES, None),
    "boundary moved": boundary,
    "swap": swap,
    "zeros": zero,
    "type": dtype_code,
    "tokens": flip(0, None, "bin"),
}


def damaged(base: Path, folder: Path, kind: str, seed: int) -> tuple[Path, bool]:
    """(prefix of a mutated copy of p, whether it differs)."""
    files = {x: bytearray((base / f"p.{x}").read_bytes()) for x in ("bin", "idx")}
    files |= {f"other {x}": bytearray((base / f"q.{x}").read_bytes()) for x in ("bin", "idx")}
    before = bytes(files["bin"]), bytes(files["idx"])
    MUTATIONS[kind](np.random.default_rng((seed, len(kind))), files)
    for name in ("bin", "idx"):
        (folder / f"p.{name}").write_bytes(files[name])
    return folder / "p", (bytes(files["bin"]), bytes(files["idx"])) != before


def outcome(prefix: Path) -> IndexedFacts | None:
    """The facts, None if it was refused; anything else is a failure."""
    try:
        return check_indexed(str(prefix), VOCABULARY)
    except DataError as error:
        told = str(error)
        assert "\n" not in told
        assert str(prefix) in told
        assert re.search(r"again|give|prepare", told), told
        return None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", MUTATIONS)
def test_any_change_of_a_prepared_pair_is_refused(
    base: Path, tmp_path: Path, kind: str, seed: int
) -> None:
    prefix, changed = damaged(base, tmp_path, kind, seed)
    shutil.copy(base / "p.json", tmp_path)
    facts = outcome(prefix)
    assert (facts is None) == changed
    assert facts is None or facts.checksum == "verified"


def structure(prefix: Path) -> tuple[list[int], list[int], list[list[int]]]:
    """Lengths, boundaries and ids as Megatron reads them."""
    data = IndexedDataset(str(prefix))
    ids = [data[i].tolist() for i in range(len(data))]
    return data.sequence_lengths.tolist(), data.document_indices.tolist(), ids


@pytest.mark.parametrize("kind", MUTATIONS)
def test_without_a_checksum_what_passes_is_sound(base: Path, tmp_path: Path, kind: str) -> None:
    """Damage that leaves a sound pair cannot be seen, and is told as "checksum none"."""
    lengths, boundaries, ids = structure(base / "p")
    passed = 0
    for seed in SEEDS:
        prefix, changed = damaged(base, tmp_path, kind, seed)
        facts = outcome(prefix)
        if facts is None:
            assert changed
            continue
        passed += 1
        assert facts.checksum == "none"
        got = structure(prefix)
        assert facts.tokens == sum(got[0])
        values = {i for ids in got[2] for i in ids}
        assert (facts.lowest_id, facts.highest_id) == (min(values), max(values))
        assert facts.highest_id < VOCABULARY
        assert facts.lowest_id >= 0
        if kind in ("tokens", "zeros"):  # other ids in the same documents
            assert got[:2] == (lengths, boundaries)
        elif "boundar" in kind:  # a document more that is empty, which is told
            assert (got[0], got[2]) == (lengths, ids)
            assert facts.empty_documents > 0
        else:  # the same ids, under another name of their type
            assert got == (lengths, boundaries, ids)
    if kind not in ("tokens", "zeros", "boundaries", "boundary moved", "type"):
        assert passed == 0
    assert passed == len(SEEDS) or kind != "boundary moved"
    if kind == "type":
        assert passed == sum(  # int16 reads the same: all ids are below 2**15
            damaged(base, tmp_path, kind, seed)[0].with_suffix(".idx").read_bytes()[17] == 3
            for seed in SEEDS
        )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("file", ["json", "bytes.npy"])
def test_the_files_beside_a_pair(base: Path, tmp_path: Path, file: str, seed: int) -> None:
    """Flipped or cut: refused, or what is read is what was prepared."""
    for name in ("p.bin", "p.idx", "p.json", "p.bytes.npy"):
        shutil.copy(base / name, tmp_path)
    rng = np.random.default_rng((seed, 99))
    content = {file: bytearray((base / f"p.{file}").read_bytes())}
    if seed % 5:
        flip(0, None, file)(rng, content)
    else:
        del content[file][int(rng.integers(0, len(content[file]))) :]
    (tmp_path / f"p.{file}").write_bytes(content[file])
    want = check_indexed(str(base / "p"), VOCABULARY)
    facts = outcome(tmp_path / "p")
    if file == "bytes.npy":
        assert facts is None
        (tmp_path / "p.json").unlink()  # its own checks alone
    if facts is not None:
        assert (facts.documents, facts.tokens) == (want.documents, want.tokens)
        assert facts.checksum in ("verified", "none")
    try:
        sizes = document_bytes(str(tmp_path / "p"))
    except DataError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert sizes is not None
        assert sizes.shape == (N,)
        assert (sizes >= 0).all()
        assert file == "bytes.npy" or sizes.sum() == want.tokens


# --- texts ----------------------------------------------------------------------------------------

WORDS = ["red", "green \u00e9t\u00e9", 'say "x"', "\U0001f600 tab\t", "\\u back", "end"]


def text(rng: Rng) -> str:
    return " ".join(rng.choice(WORDS, int(rng.integers(2, 12)))) + f" {rng.integers(1 << 40)}"


def jsonl(rng: Rng, n: int = 8) -> bytes:
    return b"".join(json.dumps({"text": text(rng)}).encode() + b"\n" for _ in range(n))


def bad_utf8(rng: Rng) -> tuple[str, bytes]:
    content = bytearray("\n".join(text(rng) for _ in range(5)).encode())
    for _ in range(int(rng.integers(1, 4))):
        content[int(rng.integers(0, len(content)))] = int(rng.integers(128, 256))
    return "b.txt", bytes(content)


def nul(rng: Rng) -> tuple[str, bytes]:
    content = bytearray("\n".join(text(rng) for _ in range(5)).encode())
    for _ in range(int(rng.integers(1, 4))):
        content[int(rng.integers(0, len(content)))] = 0
    return "b.txt", bytes(content)


def broken_json(rng: Rng) -> tuple[str, bytes]:
    """Bytes deleted, put in, or exchanged, anywhere in some lines."""
    content = bytearray(jsonl(rng))
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(0, len(content)))
        how = rng.integers(0, 3)
        if how == 0:
            del content[at : at + int(rng.integers(1, 30))]
        elif how == 1:
            content[at:at] = rng.choice([b'"', b"}", b"[", b"\\", b"\\ud800", b"\n", b"\0", b"{}"])
        else:
            content[at] = int(rng.integers(0, 256))
    return "b.jsonl", bytes(content)


def bad_gzip(rng: Rng) -> tuple[str, bytes]:
    content = bytearray(gzip.compress(jsonl(rng, 30), mtime=0))
    how = rng.integers(0, 3)
    if how == 0:
        del content[int(rng.integers(0, len(content))) :]
    elif how == 1:
        content += rng.bytes(int(rng.integers(1, 20)))
    else:
        content[int(rng.integers(10, len(content)))] ^= int(rng.integers(1, 256))
    return "b.jsonl.gz", bytes(content)


def truth(name: str, content: bytes, separator: str) -> tuple[list[bytes], int]:
    """(texts that are sound, number of others), read by other code than prepare's."""
    if name.endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except Exception:
            return [], int(len(content) > 0)  # an empty file is an empty gzip
    whole = separator == "file" and ".jsonl" not in name
    pieces = [content] if whole else [x.rstrip(b"\r\n") for x in content.split(b"\n")]
    texts, flawed = [], 0
    for piece in pieces:
        if not piece.strip():
            continue
        try:
            found = piece.decode()
            if ".jsonl" in name:
                found = json.loads(found)["text"]
                assert isinstance(found, str)
            assert "\0" not in found
            texts.append(found.encode())
        except Exception:
            flawed += 1
    return texts, flawed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", [bad_utf8, nul, broken_json, bad_gzip])
def test_damaged_texts_are_counted_and_the_others_kept(
    tmp_path: Path, make: Callable[[Rng], tuple[str, bytes]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    separator = ("file", "line")[seed % 2]
    name, content = make(rng)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / name).write_bytes(content)
    (tree / "a.txt").write_text("a sound one")
    texts, flawed = truth(name, content, separator)
    long = {x for x in texts if len(x) > 1}
    options = {"document_separator": separator}
    result = tool.prepare(Options([tree], tmp_path / "p", **options))
    data = IndexedDataset(str(tmp_path / "p"))
    got = [bytes(data[i].tolist()) for i in range(len(data))]
    assert sorted(got) == sorted({*long, b"a sound one"})
    skipped = dict(result["skipped"])
    assert skipped.pop("too_short", 0) + skipped.pop("duplicate", 0) == len(texts) - len(long)
    assert sum(skipped.values()) == flawed
    assert check_indexed(str(tmp_path / "p"), VOCABULARY).checksum == "verified"
    command = ["--input", str(tree), "--output-prefix", str(tmp_path / "q"), "--strict"]
    command += ["--document-separator", separator]
    if flawed:
        with pytest.raises(SystemExit, match=r"^prepare: error: 0/b[^\n]*; mend it[^\n]*$"):
            tool.main(command)
        assert not [x for x in os.listdir(tmp_path) if "q" in x]
    else:
        tool.main(command)
