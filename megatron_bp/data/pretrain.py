"""Pre-training documents from Megatron's own indexed data sets.

Megatron's GPTDataset cuts the concatenated documents of an epoch into samples of a fixed length.
Its own `__getitem__` drops the document boundaries; this subclass returns the pieces themselves.
Knows nothing of blocks, noise or ranks.
"""

import math
from typing import Any

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron_bp.data.checks import document_bytes
from megatron_bp.data.document import Document

# A key's bits, from the top: data set of a blend (11), sample (32), piece of the sample (20).
SAMPLE_BITS, PIECE_BITS = 32, 20


def blend_key(dataset: int, key: int) -> int:
    """The key of a document of data set number `dataset` of a blend.

    Raises:
        ValueError: the blend holds more data sets than keys have room for.
    """
    if dataset >= 1 << 63 - SAMPLE_BITS - PIECE_BITS:
        raise ValueError(f"data set {dataset} of the blend: at most 2048 can be told apart; merge")
    return dataset << SAMPLE_BITS + PIECE_BITS | key


def blend_place(key: int) -> tuple[int, int]:
    """(data set of the blend, key in it) of a key that `blend_key` made, or of one of no blend."""
    return key >> SAMPLE_BITS + PIECE_BITS, key & (1 << SAMPLE_BITS + PIECE_BITS) - 1


class DocumentDataset(GPTDataset):
    """Megatron's GPTDataset, yielding `Document`s instead of one flat row."""

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """The pieces of sample `idx`, in order: `{"documents": tuple[Document, ...]}`.

        A piece's key is (place of the sample in the unshuffled data, ordinal in the sample): each
        pass over the data cuts new samples, so a repeated document gets a new key.
        `idx` None (Megatron's batch padding) yields no document.
        """
        if idx is None:
            return {"documents": ()}
        text, of_documents, lengths = self._query_document_sample_shuffle_indices(idx)
        place = int(self.shuffle_index[idx])
        assert place < 1 << SAMPLE_BITS
        assert len(lengths) <= 1 << PIECE_BITS
        documents = []
        stop = 0
        for ordinal, (of, length) in enumerate(zip(of_documents, lengths, strict=True)):
            start, stop = stop, stop + int(length)
            if length == 0:
                continue
            tokens = text[start:stop].astype(np.int32)
            key = place << PIECE_BITS | ordinal
            supervised = np.ones(len(tokens), dtype=np.bool_)
            documents.append(
                Document(tokens, supervised, key, self._bytes_of(int(of), len(tokens)))
            )
        return {"documents": tuple(documents)}

    def _bytes_of(self, document: int, tokens: int) -> float:
        """UTF-8 bytes of `tokens` tokens of a document, in proportion; NaN if not known."""
        if not hasattr(self, "_document_bytes"):
            self._document_bytes = document_bytes(self.dataset.path_prefix)
        if self._document_bytes is None:
            return math.nan
        whole = int(self.dataset.sequence_lengths[document])
        return float(self._document_bytes[document]) * tokens / whole
