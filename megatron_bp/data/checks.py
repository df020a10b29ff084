"""Whether a .bin/.idx pair is sound, before training starts.

Megatron maps both files and trusts them: a truncated .bin ends a run hours later, and a wrong .idx
trains on something else. The layout of an .idx (sizes in bytes): magic 9, version 8, code of the
type of an id 1, sequences n 8, boundaries m 8; lengths 4 n (in ids), pointers 8 n (in bytes, into
the .bin), boundaries 8 m (in sequences; document i is sequences boundary i to boundary i + 1).
NumPy only; knows nothing of ranks, blocks or models.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    code: np.dtype(name)
    for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1)
}
CHUNK = 1 << 22  # entries looked at at once
FULL_SCAN = 200_000_000  # more ids than this are sampled
WINDOWS, WINDOW = 1024, 1 << 15  # that many windows of so many ids
CHECKSUM_BYTES = 2 << 30  # checksums of more are not verified
DESCRIPTION_BYTES = 1 << 20  # a P.json above this is none of prepare's
AGAIN = "copy or prepare the data again"


class DataError(ValueError):
    """A data set that cannot be trained with; one line, with the way out."""


@dataclass(frozen=True)
class IndexedFacts:
    """What is known of a data set that passed.

    Attributes:
        documents, sequences, tokens: how many.
        dtype: type of an id in the .bin, such as "uint16".
        empty_documents, single_token_documents: documents of 0 and of 1 token.
        lowest_id, highest_id: among the ids that were looked at.
        scanned_tokens: how many were looked at: all, or an evenly spread sample.
        checksum: "verified", "none" (no P.json of prepare with one), or "skipped" (too large).
        description: what P.json says, empty if there is none of prepare's.
    """

    documents: int
    sequences: int
    tokens: int
    dtype: str
    empty_documents: int
    single_token_documents: int
    lowest_id: int
    highest_id: int
    scanned_tokens: int
    checksum: str
    description: Mapping[str, Any]

    def __str__(self) -> str:
        scan = "all" if self.scanned_tokens == self.tokens else f"a sample of {self.scanned_tokens}"
        return (
            f"{self.documents} documents, {self.tokens} tokens of {self.dtype}; ids "
            f"{self.lowest_id} to {self.highest_id} in {scan} tokens; checksum {self.checksum}; "
            f"{self.empty_documents} documents of 0 and {self.single_token_documents} of 1 token"
        )


@dataclass(frozen=True, eq=False)
class _Index:
    path: str
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]  # [n]
    pointers: NDArray[np.int64]  # [n]
    boundaries: NDArray[np.int64]  # [m]


def check_indexed(prefix: str, vocabulary: int) -> IndexedFacts:
    """Return the facts of P.bin and P.idx if they are sound and their ids are in the vocabulary.

    Args:
        prefix: P, the common part of the names, as for --data-path.
        vocabulary: the tokenizer's true size: ids are 0 to vocabulary - 1.

    Raises:
        DataError: they are not, or cannot be read.
    """
    try:
        index = _read_index(f"{prefix}.idx")
        size = os.path.getsize(f"{prefix}.bin")
        tokens = _check_lengths(index, f"{prefix}.bin", size)
        empty, single = _check_boundaries(index, tokens)
        description = _description(prefix)
        checksum = _check_description(prefix, description, len(index.boundaries) - 1, tokens)
        low, high, scanned = _check_ids(f"{prefix}.bin", index.dtype, tokens, vocabulary)
    except OSError as error:
        raise _unreadable(prefix, error) from error
    return IndexedFacts(
        documents=len(index.boundaries) - 1,
        sequences=len(index.lengths),
        tokens=tokens,
        dtype=index.dtype.name,
        empty_documents=empty,
        single_token_documents=single,
        lowest_id=low,
        highest_id=high,
        scanned_tokens=scanned,
        checksum=checksum,
        description=description,
    )


def document_bytes(prefix: str) -> NDArray[np.int64] | None:
    """Return the UTF-8 bytes of each document's text, [documents]; None without a P.bytes.npy.

    Raises:
        DataError: it does not belong to P.idx.
    """
    path = f"{prefix}.bytes.npy"
    if not os.path.lexists(path):
        return None
    try:
        sizes = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # np.load raises all kinds for a broken header
        raise DataError(f"{path}: no array of NumPy can be read from it; {AGAIN}") from error
    try:
        documents = len(_read_index(f"{prefix}.idx").boundaries) - 1
        said = _description(prefix)
    except OSError as error:
        raise _unreadable(prefix, error) from error
    got = f"{sizes.dtype.name}{list(sizes.shape)}" if isinstance(sizes, np.ndarray) else "no array"
    if got != f"int64[{documents}]":
        raise DataError(f"{path}: is {got}, and P.idx has {documents} documents (int64); {AGAIN}")
    total = said.get("bytes", int(sizes.sum()))
    if (sizes < 0).any() or sizes.sum() != total:
        raise DataError(f"{path}: {sizes.sum()} bytes in all, {total} by P.json; {AGAIN}")
    out: NDArray[np.int64] = sizes
    return out


def _unreadable(prefix: str, error: OSError) -> DataError:
    return DataError(
        f"{error.filename or prefix}: cannot be read ({error.strerror or error}): give the prefix "
        f"of a .bin/.idx pair (`python -m megatron_bp.tools.prepare` makes one)"
    )


def _read_index(path: str) -> _Index:
    size = os.path.getsize(path)
    if size < HEADER.size:
        raise DataError(f"{path}: {size} bytes, and its header alone has {HEADER.size}; {AGAIN}")
    with open(path, "rb") as stream:
        magic, version, code, n, m = HEADER.unpack(stream.read(HEADER.size))
    if magic != MAGIC:
        raise DataError(f"{path}: starts with {magic!r}, and an .idx with {MAGIC!r}; {AGAIN}")
    if version != 1:
        raise DataError(f"{path}: version {version}, and Megatron reads version 1; {AGAIN}")
    if code not in DTYPES or DTYPES[code].kind == "f":
        raise DataError(f"{path}: type {code} of its ids is no integer type of Megatron; {AGAIN}")
    want = HEADER.size + 12 * n + 8 * m
    if size != want:
        modes = " (an index with modes is for multimodal models)" if size == want + n else ""
        raise DataError(
            f"{path}: {size} bytes, and its {n} sequences and {m} boundaries need {want}{modes}; "
            f"it is cut, too long or damaged: {AGAIN}"
        )
    if n == 0 or m < 2:
        raise DataError(f"{path}: {n} sequences, {m} boundaries: no document; prepare some data")
    lengths, pointers, boundaries = np.split(
        np.memmap(path, np.uint8, "r", HEADER.size), [4 * n, 12 * n]
    )
    return _Index(
        path, DTYPES[code], lengths.view("<i4"), pointers.view("<i8"), boundaries.view("<i8")
    )


def _chunks(length: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK))


def _check_lengths(index: _Index, bin_path: str, bin_size: int) -> int:
    """Return the number of tokens; lengths, pointers and the .bin's size must agree."""
    total = 0
    for chunk in _chunks(len(index.lengths)):
        lengths = index.lengths[chunk].astype(np.int64)
        if (lengths < 0).any():
            i = int(np.argmax(lengths < 0))
            raise DataError(
                f"{index.path}: length {lengths[i]} of sequence {chunk.start + i} is negative; "
                f"{AGAIN}"
            )
        total += int(lengths.sum())
    item = index.dtype.itemsize
    if total * item != bin_size:
        what = "is truncated" if bin_size < total * item else "is too long"
        raise DataError(
            f"{bin_path}: {bin_size} bytes, and its .idx says {total * item} ({total} ids of {item}"
            f"): it {what}, or the two are no pair; {AGAIN}"
        )
    if total == 0:
        raise DataError(f"{bin_path}: holds no token; prepare some data")
    position = 0
    for chunk in _chunks(len(index.lengths)):
        ends = position + np.cumsum(index.lengths[chunk], dtype=np.int64)
        wrong = index.pointers[chunk] != (ends - index.lengths[chunk]) * item
        if wrong.any():
            i = int(np.argmax(wrong))
            raise DataError(
                f"{index.path}: pointer {index.pointers[chunk][i]} of sequence {chunk.start + i} "
                f"is not the end of the one before, {(ends[i] - index.lengths[chunk][i]) * item}; "
                f"{AGAIN}"
            )
        position = int(ends[-1])
    return total


def _check_boundaries(index: _Index, tokens: int) -> tuple[int, int]:
    """Return how many documents have 0 tokens and 1; boundaries must rise from 0 to the end."""
    boundaries, n = index.boundaries, len(index.lengths)
    if boundaries[0] != 0 or boundaries[-1] != n:
        raise DataError(
            f"{index.path}: documents go from sequence {boundaries[0]} to {boundaries[-1]}, not "
            f"from 0 to {n}; {AGAIN}"
        )
    empty = single = 0
    for chunk in _chunks(len(boundaries) - 1):
        ends = boundaries[chunk.start : chunk.stop + 1]
        falls = np.diff(ends) < 0
        if falls.any():
            i = int(np.argmax(falls))
            raise DataError(
                f"{index.path}: document {chunk.start + i} goes from sequence {ends[i]} back to "
                f"{ends[i + 1]}; {AGAIN}"
            )
        places = index.pointers[np.minimum(ends, n - 1)] // index.dtype.itemsize
        lengths = np.diff(np.where(ends < n, places, tokens))
        empty += int((lengths == 0).sum())
        single += int((lengths == 1).sum())
    return empty, single


def _check_ids(
    path: str, dtype: np.dtype[Any], tokens: int, vocabulary: int
) -> tuple[int, int, int]:
    """Return the lowest and the highest id, and how many were looked at."""
    ids = np.memmap(path, dtype, "r")
    windows = list(_chunks(tokens))
    if tokens >= FULL_SCAN:
        starts = np.linspace(0, tokens - WINDOW, WINDOWS).astype(np.int64).tolist()
        windows = [slice(start, start + WINDOW) for start in starts]
    low, high = vocabulary, -1
    for window in windows:
        low, high = min(low, int(ids[window].min())), max(high, int(ids[window].max()))
        if low < 0 or high >= vocabulary:
            worst = low if low < 0 else high
            place = window.start + int(np.argmax(ids[window] == worst))
            raise DataError(
                f"{path}: token {place} has id {worst}, and the vocabulary ids 0 to "
                f"{vocabulary - 1}; train with the tokenizer that made the data, or prepare again"
            )
    return low, high, sum(w.stop - w.start for w in windows)


def _description(prefix: str) -> dict[str, Any]:
    """Return what prepare's P.json says; empty if there is none, or it is another tool's."""
    path = f"{prefix}.json"
    if not os.path.isfile(path) or os.path.getsize(path) > DESCRIPTION_BYTES:
        return {}
    with open(path, "rb") as stream:
        text = stream.read()
    if b'"megatron_bp"' not in text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is damaged ({error}); {AGAIN}, or remove it") from error
    return value if isinstance(value, dict) else {}


def _check_description(prefix: str, said: dict[str, Any], documents: int, tokens: int) -> str:
    """Return whether the checksums in P.json were verified; its counts must be the data's."""
    for name, count in (("documents", documents), ("tokens", tokens)):
        if said.get(name, count) != count:
            raise DataError(
                f"{prefix}.json: says {said[name]} {name}, and there are {count}: it belongs to "
                f"other data; {AGAIN}, or remove it"
            )
    sums = said.get("sha256")
    if sums is None:
        return "none"
    if not isinstance(sums, dict) or not {"bin", "idx"} <= sums.keys():
        raise DataError(f"{prefix}.json: its sha256 is {sums!r}, with no bin and idx; {AGAIN}")
    if os.path.getsize(f"{prefix}.bin") >= CHECKSUM_BYTES:
        return "skipped"
    for ending in ("bin", "idx", "bytes.npy"):
        path, want = f"{prefix}.{ending}", sums.get(ending)
        if want is None or (ending == "bytes.npy" and not os.path.lexists(path)):
            continue
        with open(path, "rb") as stream:
            got = hashlib.file_digest(stream, "sha256").hexdigest()
        if got != want:
            raise DataError(
                f"{path}: its sha256 is {got[:16]}..., and {prefix}.json says {str(want)[:16]}...: "
                f"it was changed after it was prepared; {AGAIN}"
            )
    return "verified"
