"""Sample: one packed row of documents.

Integers only; no blocks, noise or ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        document_epochs: int64[D], pass over the data of each document; 0 where the keys already
            tell passes apart.
        split: 0 train, 1 validation, 2 test.
    """

    tokens: NDArray[np.int32]
    document: NDArray[np.int32]
    position: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    document_keys: NDArray[np.int64]
    document_bytes: NDArray[np.float64]
    document_epochs: NDArray[np.int64]
    split: int


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
    epochs = np.full(len(documents), epoch, dtype=np.int64)
    return Sample(tokens, document, position, supervised, keys, bytes_, epochs, split)


def join(samples: Sequence[Sample]) -> Sample:
    """One row of all documents of the samples, in order; as long as they are together.

    Noise and loss of a document do not change by it: they depend on the document alone.
    """
    if len(samples) == 1:
        return samples[0]
    used = [int(np.count_nonzero(sample.document >= 0)) for sample in samples]
    before = np.cumsum([0, *(len(sample.document_keys) for sample in samples)])
    missing = sum(len(sample.tokens) for sample in samples) - sum(used)

    def row(name: str, filling: int) -> NDArray[Any]:
        columns = [getattr(sample, name)[:n] for sample, n in zip(samples, used, strict=True)]
        if name == "document":
            columns = [column + n for column, n in zip(columns, before[:-1], strict=True)]
        dtype = getattr(samples[0], name).dtype
        return np.concatenate([*columns, np.full(missing, filling)]).astype(dtype)

    def of_documents(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(sample, name) for sample in samples])

    return Sample(
        tokens=row("tokens", 0),
        document=row("document", -1),
        position=row("position", 0),
        supervised=row("supervised", 0),
        document_keys=of_documents("document_keys"),
        document_bytes=of_documents("document_bytes"),
        document_epochs=of_documents("document_epochs"),
        split=samples[0].split,
    )
