"""Whether a .bin/.idx pair is sound, before training starts.

Megatron maps both files and trusts them: a truncated .bin ends a run hours later, and a wrong .idx
trains on something else. NumPy only; knows nothing of ranks, blocks or models.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp.data.description import check_description, description, unreadable
from megatron_bp.data.indexed import (
    AGAIN,
    DataError,
    check_boundaries,
    check_lengths,
    chunks,
    read_index,
)
from megatron_bp.data.supervised import check_supervised

__all__ = ["DataError", "IndexedFacts", "check_indexed", "document_bytes"]

FULL_SCAN = 200_000_000  # more ids than this are sampled
WINDOWS, WINDOW = 1024, 1 << 15  # that many windows of so many ids


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


def check_indexed(prefix: str, vocabulary: int, mask: int | None = None) -> IndexedFacts:
    """Return the facts of P.bin and P.idx if they are sound and their ids are in the vocabulary.

    Args:
        prefix: P, the common part of the names, as for --data-path.
        vocabulary: the tokenizer's true size: ids are 0 to vocabulary - 1.
        mask: an id that no text may hold; None for none.

    Raises:
        DataError: they are not, or cannot be read.
    """
    try:
        index = read_index(f"{prefix}.idx")
        size = os.path.getsize(f"{prefix}.bin")
        tokens = check_lengths(index, f"{prefix}.bin", size)
        empty, single = check_boundaries(index, tokens)
        said = description(prefix)
        checksum = check_description(prefix, said, len(index.boundaries) - 1, tokens)
        low, high, scanned = _check_ids(f"{prefix}.bin", index.dtype, tokens, vocabulary, mask)
    except OSError as error:
        raise unreadable(prefix, error) from error
    check_supervised(prefix)
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
        description=said,
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
        documents = len(read_index(f"{prefix}.idx").boundaries) - 1
        said = description(prefix)
    except OSError as error:
        raise unreadable(prefix, error) from error
    got = f"{sizes.dtype.name}{list(sizes.shape)}" if isinstance(sizes, np.ndarray) else "no array"
    if got != f"int64[{documents}]":
        raise DataError(f"{path}: is {got}, and P.idx has {documents} documents (int64); {AGAIN}")
    total = said.get("bytes", int(sizes.sum()))
    if (sizes < 0).any() or sizes.sum() != total:
        raise DataError(f"{path}: {sizes.sum()} bytes in all, {total} by P.json; {AGAIN}")
    out: NDArray[np.int64] = sizes
    return out


def _check_ids(
    path: str, dtype: np.dtype[Any], tokens: int, vocabulary: int, mask: int | None
) -> tuple[int, int, int]:
    """Return the lowest and the highest id, and how many were looked at."""
    ids = np.memmap(path, dtype, "r")
    windows = list(chunks(tokens))
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
        if mask is not None and (ids[window] == mask).any():
            place = window.start + int(np.argmax(ids[window] == mask))
            raise DataError(
                f"{path}: token {place} is the mask token {mask} (--mask-token-id), so the model "
                f"could not tell noise from text; choose an id that no text holds, or prepare again"
            )
    return low, high, sum(w.stop - w.start for w in windows)
