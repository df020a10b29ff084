"""megatron_bp.data.checks: what is refused before training, in words, and what is told."""

import json
import os
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_bp.data import checks, description, indexed
from megatron_bp.data.checks import DataError, check_indexed, document_bytes
from megatron_bp.tools.prepare import Options, prepare

LENGTHS = [5, 1, 0, 3, 1]
HEADER = 34


def write(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: type) -> str:
    """Writes documents of sequences of ids with Megatron's own builder."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for sequences in documents:
        lengths = [len(x) for x in sequences]
        builder.add_document([i for x in sequences for i in x], lengths)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture
def pair(tmp_path: Path) -> str:
    return write(tmp_path / "p", [[range(n)] for n in LENGTHS], np.uint16)


def change(path: str, at: int, values: bytes) -> None:
    content = bytearray(Path(path).read_bytes())
    content[at : at + len(values)] = values
    Path(path).write_bytes(content)


# --- what passes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_facts_of_what_megatron_writes(tmp_path: Path, dtype: type) -> None:
    documents = [[range(3), range(4)], [[9]], [], [range(0)], [[2], []]]
    facts = check_indexed(write(tmp_path / "p", documents, dtype), 10)
    assert (facts.documents, facts.sequences, facts.tokens) == (5, 6, 9)
    assert (facts.empty_documents, facts.single_token_documents) == (2, 2)
    assert (facts.lowest_id, facts.highest_id, facts.dtype) == (0, 9, np.dtype(dtype).name)
    assert (facts.scanned_tokens, facts.checksum, facts.description) == (9, "none", {})
    assert "in all tokens; checksum none; 2 documents of 0 and 2 of 1 token" in str(facts)
    with pytest.raises(DataError, match=r"p\.bin: token 7 has id 9, and the vocabulary ids 0 to 8"):
        check_indexed(str(tmp_path / "p"), 9)


def test_the_types_are_megatrons() -> None:
    for code, dtype in indexed.DTYPES.items():
        assert np.dtype(DType.dtype_from_code(code)) == dtype
    assert len(indexed.DTYPES) == len(DType)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_facts_do_not_depend_on_the_chunks(
    pair: str, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    want = check_indexed(pair, 5)
    assert (want.empty_documents, want.single_token_documents) == (1, 2)
    monkeypatch.setattr(indexed, "CHUNK", chunk)
    assert check_indexed(pair, 5) == want


def test_what_prepare_writes_is_verified(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\u00e9t\u00e9\nx\nyes")
    prefix = str(tmp_path / "p")
    source = [tmp_path / "a.txt"]
    said = prepare(Options(source, Path(prefix), document_separator="line", min_tokens=1))
    facts = check_indexed(prefix, 258)
    assert facts.checksum == "verified"
    assert facts.description == said
    sizes = document_bytes(prefix)
    assert sizes is not None
    assert sizes.dtype == np.int64
    assert sorted(sizes.tolist()) == [1, 3, 5]


# --- what does not --------------------------------------------------------------------------------


def at_length(i: int) -> int:
    return HEADER + 4 * i


def at_pointer(i: int) -> int:
    return HEADER + 4 * 5 + 8 * i


def at_boundary(i: int) -> int:
    return HEADER + 12 * 5 + 8 * i


def i32(value: int) -> bytes:
    return struct.pack("<i", value)


def i64(value: int) -> bytes:
    return struct.pack("<q", value)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("bin", lambda p: os.truncate(p, 18), r"bin: 18 bytes, and its \.idx says 20 .* truncated"),
        ("bin", lambda p: os.truncate(p, 22), r"bin: 22 bytes, and its \.idx says 20 .* too long"),
        ("bin", lambda p: os.truncate(p, 0), r"bin: 0 bytes, .* truncated"),
        ("bin", os.unlink, r"p\.bin: cannot be read \(No such file.*\): give the prefix"),
        ("idx", os.unlink, r"p\.idx: cannot be read \(No such file.*\): give the prefix"),
        ("idx", lambda p: (os.unlink(p), os.mkdir(p)), r"p\.idx: "),
        ("idx", lambda p: os.truncate(p, 33), r"33 bytes, and its header alone has 34"),
        ("idx", lambda p: os.truncate(p, 141), r"141 bytes, .* 5 sequences and 6 .* need 142"),
        ("idx", lambda p: os.truncate(p, 143), r"143 bytes, .* need 142; it is cut, too long"),
        ("idx", lambda p: os.truncate(p, 147), r"147 bytes, .* need 142 \(an index with modes"),
        ("idx", lambda p: change(p, 3, b"x"), r"starts with .*, and an \.idx with .*MMIDIDX"),
        ("idx", lambda p: change(p, 9, b"\2"), r"version 2, and Megatron reads version 1"),
        ("idx", lambda p: change(p, 17, b"\0"), r"type 0 of its ids is no integer type"),
        ("idx", lambda p: change(p, 17, b"\7"), r"type 7 of its ids is no integer type"),
        ("idx", lambda p: change(p, 17, b"\4"), r"bin: 20 bytes, and its \.idx says 40 "),
        ("idx", lambda p: change(p, 18, b"\xff" * 8), r"142 bytes, and its 18446744073709551615 s"),
        ("idx", lambda p: change(p, at_length(1), i32(-1)), r"length -1 of sequence 1 is negative"),
        ("idx", lambda p: change(p, at_length(1), i32(2)), r"\.idx says 22 \(11 ids of 2\): it is"),
        (
            "idx",
            lambda p: change(p, at_length(0), i32(4) + i32(2)),
            r"pointer 10 of sequence 1 is not the end of the one before, 8",
        ),
        ("idx", lambda p: change(p, at_pointer(0), i64(2)), r"pointer 2 of sequence 0 .*before, 0"),
        ("idx", lambda p: change(p, at_pointer(4), i64(-2)), r"pointer -2 of sequence 4 .*, 18"),
        ("idx", lambda p: change(p, at_boundary(0), i64(1)), r"from sequence 1 to 5, not from 0"),
        ("idx", lambda p: change(p, at_boundary(5), i64(4)), r"from sequence 0 to 4, not .* to 5"),
        (
            "idx",
            lambda p: change(p, at_boundary(2), i64(4)),
            r"document 2 goes from sequence 4 back to 3",
        ),
        ("bin", lambda p: change(p, 8, b"\5"), r"token 4 has id 5, and the vocabulary ids 0 to 4"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_damage(
    pair: str,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    damage: Callable[[str], object],
    message: str,
    chunk: int,
) -> None:
    monkeypatch.setattr(indexed, "CHUNK", chunk)
    check_indexed(pair, 5)
    damage(f"{pair}.{file}")
    with pytest.raises(DataError, match=message) as error:
        check_indexed(pair, 5)
    told = str(error.value)
    assert "\n" not in told
    assert re.search(r"again|give|prepare", told), "no way out"
    assert pair in told


def test_negative_ids(tmp_path: Path) -> None:
    prefix = write(tmp_path / "p", [[[3, -7, 2]]], np.int32)
    with pytest.raises(DataError, match="token 1 has id -7"):
        check_indexed(prefix, 5)


def test_empty_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 sequences, 1 boundaries: no document; prepare some"):
        check_indexed(write(tmp_path / "p", [], np.uint16), 5)
    with pytest.raises(DataError, match=r"q\.bin: holds no token; prepare some data"):
        check_indexed(write(tmp_path / "q", [[[]], [[]]], np.uint16), 5)


def test_a_sample_is_spread_over_the_data_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "FULL_SCAN", 1000)
    monkeypatch.setattr(checks, "WINDOWS", 10)
    monkeypatch.setattr(checks, "WINDOW", 8)
    ids = np.full(999, 1)
    facts = check_indexed(write(tmp_path / "p", [[ids]], np.uint16), 5)
    assert facts.scanned_tokens == 999
    ids = np.full(1000, 1)
    facts = check_indexed(write(tmp_path / "q", [[ids]], np.uint16), 5)
    assert facts.scanned_tokens == 80
    assert "in a sample of 80 tokens" in str(facts)
    seen = []
    for place in range(1000):
        Path(f"{tmp_path}/q.bin").write_bytes(ids.astype(np.uint16).tobytes())
        change(f"{tmp_path}/q.bin", 2 * place, b"\7")
        try:
            check_indexed(str(tmp_path / "q"), 5)
        except DataError as error:
            assert f"token {place} has id 7" in str(error)  # noqa: PT017 (most do not raise)
            seen.append(place)
    assert len(seen) == 80
    assert (seen[0], seen[-1]) == (0, 999)
    assert np.diff(seen).max() < 1000 / 9


# --- P.json and P.bytes.npy -----------------------------------------------------------------------


@pytest.fixture
def prepared(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree")
    prepare(Options([tmp_path / "a.txt"], tmp_path / "p", document_separator="line"))
    return str(tmp_path / "p")


@pytest.mark.parametrize("file", ["bin", "idx", "bytes.npy"])
def test_a_changed_file_is_found_by_its_checksum(prepared: str, file: str) -> None:
    path = Path(f"{prepared}.{file}")
    content = path.read_bytes()
    if file == "idx":  # boundaries 0 1 2 3 become 0 1 1 3: sound, but not what was prepared
        change(str(path), len(content) - 16, i64(1))
    else:
        change(str(path), len(content) - 8, bytes([content[-8] ^ 1]))
    match = rf"p\.{re.escape(file)}: its sha256 is .*\.json says .* changed after it was prepared"
    with pytest.raises(DataError, match=match):
        check_indexed(prepared, 258)


def test_checksums_of_large_data_are_skipped_and_told(
    prepared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(description, "CHECKSUM_BYTES", 22)
    assert check_indexed(prepared, 258).checksum == "skipped"
    monkeypatch.setattr(description, "CHECKSUM_BYTES", 23)
    assert check_indexed(prepared, 258).checksum == "verified"


def test_a_description_of_something_else(prepared: str) -> None:
    path = Path(f"{prepared}.json")
    ours = path.read_text()
    for foreign in ("", "{}", '{"text": "a"}\n{"text": "b"}\n', "[1, 2]", "\xff"):
        path.write_text(foreign, encoding="latin-1")
        assert check_indexed(prepared, 258).checksum == "none"
    path.write_text(ours.replace('"documents": 3', '"documents": 4'))
    with pytest.raises(DataError, match=r"json: says 4 documents, and there are 3: it belongs to"):
        check_indexed(prepared, 258)
    path.write_text(ours[:-20])
    with pytest.raises(DataError, match=r"json: is damaged"):
        check_indexed(prepared, 258)
    path.write_text(json.dumps(json.loads(ours) | {"sha256": "none"}))
    with pytest.raises(DataError, match=r"json: its sha256 is 'none', with no bin and idx"):
        check_indexed(prepared, 258)
    os.unlink(path)
    assert check_indexed(prepared, 258).checksum == "none"


def test_bytes_that_do_not_belong_to_the_index(prepared: str) -> None:
    path = Path(f"{prepared}.bytes.npy")
    sizes = document_bytes(prepared)
    assert sizes is not None
    assert sorted(sizes.tolist()) == [3, 3, 5]
    sizes = sizes.copy()  # it is a map of the file that is now changed
    for wrong, message in [
        (sizes[:2], r"is int64\[2\], and P\.idx has 3 documents \(int64\)"),
        (sizes.astype(np.int32), r"is int32\[3\], and"),
        (sizes + 1, r"14 bytes in all, 11 by P\.json"),
        (sizes * [1, 1, 0] + [0, 0, -9], r"bytes in all"),
    ]:
        np.save(path, wrong)
        with pytest.raises(DataError, match=message):
            document_bytes(prepared)
    for content in (b"", b"x" * 300, b"\x93NUMPY\1\0v\0{'descr'"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"bytes\.npy: no array of NumPy can be read from it"):
            document_bytes(prepared)
    os.unlink(path)
    assert document_bytes(prepared) is None


def test_a_mask_token_in_the_text_is_found_before_training(tmp_path: Path) -> None:
    write(tmp_path / "p", [[[0, 1, 2]], [[4, 3]]], np.uint16)
    for mask in (None, 5):
        check_indexed(str(tmp_path / "p"), 9, mask)
    with pytest.raises(DataError, match=r"p\.bin: token 3 is the mask token 4 \(--mask-token-id\)"):
        check_indexed(str(tmp_path / "p"), 9, 4)
