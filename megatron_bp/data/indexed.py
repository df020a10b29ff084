"""The layout of an .idx, and whether it and its .bin agree.

Sizes in bytes: magic 9, version 8, code of the type of an id 1, sequences n 8, boundaries m 8;
lengths 4 n (in ids), pointers 8 n (in bytes, into the .bin), boundaries 8 m (in sequences; document
i is sequences boundary i to boundary i + 1). NumPy only; reads no token.
"""

import os
import struct
from collections.abc import Iterator
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
AGAIN = "copy or prepare the data again"


class DataError(ValueError):
    """A data set that cannot be trained with; one line, with the way out."""


@dataclass(frozen=True, eq=False)
class Index:
    """An .idx mapped into memory."""

    path: str
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]  # [n]
    pointers: NDArray[np.int64]  # [n]
    boundaries: NDArray[np.int64]  # [m]


def read_index(path: str) -> Index:
    """The index in the file, its sizes checked.

    Raises:
        DataError: it is damaged.
        OSError: it cannot be read.
    """
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
    return Index(
        path, DTYPES[code], lengths.view("<i4"), pointers.view("<i8"), boundaries.view("<i8")
    )


def chunks(length: int) -> Iterator[slice]:
    """Slices of at most CHUNK entries that cover `length`."""
    return (slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK))


def check_lengths(index: Index, bin_path: str, bin_size: int) -> int:
    """Return the number of tokens; lengths, pointers and the .bin's size must agree."""
    total = 0
    for chunk in chunks(len(index.lengths)):
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
    for chunk in chunks(len(index.lengths)):
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


def check_boundaries(index: Index, tokens: int) -> tuple[int, int]:
    """Return how many documents have 0 tokens and 1; boundaries must rise from 0 to the end."""
    boundaries, n = index.boundaries, len(index.lengths)
    if boundaries[0] != 0 or boundaries[-1] != n:
        raise DataError(
            f"{index.path}: documents go from sequence {boundaries[0]} to {boundaries[-1]}, not "
            f"from 0 to {n}; {AGAIN}"
        )
    empty = single = 0
    for chunk in chunks(len(boundaries) - 1):
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
