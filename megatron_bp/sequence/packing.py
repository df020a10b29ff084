"""Sample: one packed row of documents.

Integers only; no blocks, noise or ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_bp.data.document import Document


@dataclass(frozen=True, eq=False)
class Sample:
    """One packed row of length T holding D documents; padding only at its end.

    Attributes:
        tokens: int32[T], token ids; 0 for padding.
        document: int32[T], ordinal of the document in this row; -1 for padding.
        position: int32[T], position inside the document; 0 for padding.
        supervised: bool[T], may be corrupted and scored; False for padding.
        document_keys: int64[D], `Document.key` of each document.
        document_bytes: float64[D], `Document.bytes` of each document.
        split: 0 train, 1 validation, 2 test.
        epoch: pass over the data; 0 where the keys already tell passes apart.
    """

    tokens: NDArray[np.int32]
    document: NDArray[np.int32]
    position: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    document_keys: NDArray[np.int64]
    document_bytes: NDArray[np.float64]
    split: int
    epoch: int


def pack(documents: Sequence[Document], length: int, split: int = 0, epoch: int = 0) -> Sample:
    """The documents one after the other in a row of `length` tokens, padded at the end.

    Raises:
        ValueError: the documents do not fit.
    """
    sizes = np.array([len(d.tokens) for d in documents], dtype=np.int64)
    used = int(sizes.sum())
    if used > length:
        raise ValueError(
            f"{len(documents)} documents hold {used} tokens, more than the row's {length}; "
            f"cut them or raise --seq-length"
        )
    tokens = np.zeros(length, dtype=np.int32)
    document = np.full(length, -1, dtype=np.int32)
    position = np.zeros(length, dtype=np.int32)
    supervised = np.zeros(length, dtype=np.bool_)
    if used:
        tokens[:used] = np.concatenate([d.tokens for d in documents])
        supervised[:used] = np.concatenate([d.supervised for d in documents])
        document[:used] = np.repeat(np.arange(len(documents)), sizes)
        position[:used] = np.arange(used) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    keys = np.array([d.key for d in documents], dtype=np.int64)
    bytes_ = np.array([d.bytes for d in documents], dtype=np.float64)
    return Sample(tokens, document, position, supervised, keys, bytes_, split, epoch)
