"""Which tokens of a data set of chats are supervised: P.supervised.npy, mapped into memory.

The file is uint8[ceil(tokens / 8)]: the masks of all documents one after the other, in the order of
the .bin, packed as `np.packbits(mask, bitorder="little")` does, so token i of the .bin is bit
i % 8 of byte i // 8. The bits after the last token are 0. A data set of texts has no such file:
all of it is supervised. NumPy only; knows nothing of ranks, blocks or models.

    >>> np.packbits([0, 0, 1, 1, 0, 1, 0, 0, 1], bitorder="little")  # 9 tokens
    array([44, 1], dtype=uint8)
"""

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_bp.data.description import check_number, description, unreadable
from megatron_bp.data.indexed import AGAIN, DataError, chunks, read_index

KINDS = ("text", "chats")


@dataclass(frozen=True, eq=False)
class SupervisedMask:
    """The mask of a whole data set.

    Attributes:
        bits: uint8[ceil(tokens / 8)], mapped into memory.
        tokens: ids in the .bin.
    """

    bits: NDArray[np.uint8]
    tokens: int

    def of(self, first: int, n: int) -> NDArray[np.bool_]:
        """Whether tokens first to first + n - 1 of the .bin are supervised, [n]."""
        assert 0 <= first <= first + n <= self.tokens
        bits = np.unpackbits(self.bits[first // 8 : -(-(first + n) // 8)], bitorder="little")
        return bits[first % 8 : first % 8 + n].astype(np.bool_)

    def count(self) -> int:
        """How many tokens are supervised; reads the whole file."""
        return sum(int(np.bitwise_count(self.bits[x]).sum()) for x in chunks(len(self.bits)))


def supervised_of(prefix: str) -> SupervisedMask | None:
    """Return the mask of P.supervised.npy; None for a data set of texts, which has none.

    Raises:
        DataError: P.json says that there is one and there is not, or it is not that of P.bin.
    """
    path = f"{prefix}.supervised.npy"
    try:
        said, there = description(prefix), os.path.lexists(path)
        kind = said.get("kind", "chats" if there else "text")
        if kind not in KINDS:
            raise DataError(f"{prefix}.json: kind {kind!r} is none of {', '.join(KINDS)}; {AGAIN}")
        if kind == "text":
            if there:
                raise DataError(
                    f"{path}: a mask, and {prefix}.json says that the data are texts, which have "
                    f"none; remove one of the two, or {AGAIN}"
                )
            return None
        if not there:
            raise DataError(
                f"{path}: is missing, and {prefix}.json says that the data are chats: without it "
                f"nobody knows which tokens are supervised; {AGAIN}"
            )
        bits = _mapped(path)
        index = read_index(f"{prefix}.idx")
        tokens = int(index.pointers[-1]) // index.dtype.itemsize + int(index.lengths[-1])
    except OSError as error:
        raise unreadable(prefix, error) from error
    got = f"{bits.dtype.name}{list(bits.shape)}"
    if got != f"uint8[{-(-tokens // 8)}]":
        raise DataError(
            f"{path}: is {got}, and {prefix}.idx has {tokens} tokens, a bit for each "
            f"(uint8[{-(-tokens // 8)}]); {AGAIN}"
        )
    if tokens % 8 and int(bits[-1]) >> tokens % 8:
        raise DataError(f"{path}: has bits after the last of {tokens} tokens; {AGAIN}")
    return SupervisedMask(bits, tokens)


def check_supervised(prefix: str) -> None:
    """Look at the mask, if there is one, as a whole.

    Raises:
        DataError: as in `supervised_of`, or it has no bit or another number than P.json says.
    """
    mask = supervised_of(prefix)
    if mask is None:
        return
    got = mask.count()
    want = description(prefix).get("supervised_tokens", got)
    check_number(prefix, "supervised_tokens", want)
    if got != want:
        raise DataError(
            f"{prefix}.supervised.npy: {got} supervised tokens, and {prefix}.json says {want}; "
            f"{AGAIN}"
        )
    if got == 0:
        raise DataError(f"{prefix}.supervised.npy: no token is supervised; prepare some answers")


def _mapped(path: str) -> NDArray[np.uint8]:
    """Return the array in the file.

    Raises:
        DataError: there is none.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # np.load raises all kinds for a broken header
        raise DataError(f"{path}: no array of NumPy can be read from it; {AGAIN}") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path}: holds no array of NumPy; {AGAIN}")
    return array
