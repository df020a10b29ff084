"""Random packed rows that the tests share."""

from dataclasses import dataclass

import numpy as np

from megatron_bp.data.document import Document
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions


@dataclass(frozen=True)
class Case:
    """A packed row and how it is seen.

    `prompts` are documents without any supervised token; `responses` are the supervised spans of
    each document (an empty tuple: all of each). `first` is the number of the first document: tokens
    and key of a document follow from its number, whatever it is packed with.
    """

    lengths: tuple[int, ...]
    block_size: int
    padding: int = 0
    clean_relation: str = "block"
    own_relation: str = "bidirectional"
    window: int | None = None
    prompts: tuple[int, ...] = ()
    heads: int = 4
    groups: int = 2
    head_dim: int = 8
    first: int = 0
    responses: tuple[tuple[tuple[int, int], ...], ...] = ()
    grid: str = "document"
    window_anchor: str = "row"


CASES = {
    "one document": Case((24,), 4),
    "ragged, packed, padded": Case((5, 6, 13, 1), 4, padding=3),
    "token-causal": Case((17, 9), 4, clean_relation="token"),
    "causal units": Case((11, 7, 6), 3, own_relation="causal", heads=2),
    "window": Case((19, 14), 4, window=5, heads=6),
    "window, token-causal": Case((29,), 8, window=3, clean_relation="token"),
    "window of one": Case((12,), 3, window=1),
    "prompts": Case((10, 8, 9), 4, prompts=(0, 2)),
    "nothing supervised": Case((10, 6), 4, prompts=(0, 1)),
    "fewer units than ranks": Case((3,), 4, heads=1, groups=1),
    "one token": Case((1,), 4),
    "only padding": Case((), 4, padding=6),
    "block of one": Case((9, 4), 1),
    "multi-query": Case((21,), 5, heads=4, groups=1),
    "many short": Case((2, 3, 1, 1, 4, 2, 5, 1), 2, padding=1),
}


def sample_of(case: Case, vocabulary: int = 50, split: int = 0, seed: int = 0) -> Sample:
    """The case's packed row with random tokens; document number n has key 100 + n."""
    documents = []
    for ordinal, length in enumerate(case.lengths):
        number = case.first + ordinal
        rng = np.random.default_rng([seed, number])
        tokens = rng.integers(0, vocabulary, length).astype(np.int32)
        supervised = np.full(length, ordinal not in case.prompts)
        if case.responses:
            supervised[:] = False
            for start, stop in case.responses[ordinal]:
                supervised[start:stop] = True
        documents.append(Document(tokens, supervised, 100 + number))
    return pack(documents, sum(case.lengths) + case.padding, split=split)


def random_row(seed: int) -> tuple[Sample, SequenceOptions]:
    """Random documents with prompts, gaps in what is supervised, and padding."""
    rng = np.random.default_rng(seed)
    documents = []
    for key, length in enumerate(rng.integers(1, 30, rng.integers(1, 6))):
        supervised = np.repeat(rng.random(30) < 0.6, 5)[:length]
        if rng.random() < 0.3:
            supervised = np.arange(length) >= rng.integers(0, length + 1)
        documents.append(Document(rng.integers(0, 49, length).astype(np.int32), supervised, key))
    length = sum(len(d.tokens) for d in documents) + int(rng.integers(0, 4))
    options = SequenceOptions(
        block_size=int(rng.integers(1, 7)),
        clean_relation=("block", "token")[rng.integers(2)],
        own_relation=("bidirectional", "causal")[rng.integers(2)],
        row_cost=int(rng.choice([0, 50])),
        grid=("document", "response")[rng.integers(2)],
        alignment=("same", "next")[rng.integers(2)],
        copies=(1, 1, 2, 3)[rng.integers(4)],
        window_anchor=("row", "block")[rng.integers(2)],
    )
    return pack(documents, length), options
