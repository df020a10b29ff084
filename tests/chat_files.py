"""Small data sets of chats, written without the product: ids of bytes and a mask."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

Chat = tuple[list[int], list[int]]  # ids; 1 where supervised, else 0


def write_chats(prefix: Path, chats: Sequence[Chat], sizes: Sequence[int] | None = None) -> str:
    """Files of a chats data set; `sizes` are bytes of each chat's supervised text."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for ids, _ in chats:
        builder.add_document(np.array(ids, dtype=np.uint16), [len(ids)])
    builder.finalize(f"{prefix}.idx")
    mask = np.concatenate([np.array(m, dtype=np.uint8) for _, m in chats])
    np.save(f"{prefix}.supervised.npy", np.packbits(mask, bitorder="little"))
    if sizes is not None:
        np.save(f"{prefix}.bytes.npy", np.array(sizes, dtype=np.int64))
    said = {"megatron_bp": "test", "kind": "chats", "tokenizer": {"kind": "bytes"}}
    Path(f"{prefix}.json").write_text(json.dumps(said))
    return str(prefix)


def chat(question: str, answer: str) -> Chat:
    """One turn of each, the answer supervised."""
    ids = list(question.encode()) + list(answer.encode())
    return ids, [0] * len(question.encode()) + [1] * len(answer.encode())


def random_chats(count: int, seed: int = 0, most: int = 40, unlike: bool = True) -> list[Chat]:
    """Chats of several turns, of 4 to `most` tokens; some with nothing supervised if `unlike`."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        size = int(min(most, 4 + rng.lognormal(2.2, 0.8)))
        ids = rng.integers(97, 123, size).tolist()
        edges = np.sort(rng.integers(0, size + 1, 3 if unlike else 1))
        mask = np.zeros(size, dtype=np.int64)
        for i, start in enumerate(edges.tolist()):
            mask[start:] = (i + 1) % 2
        if not unlike:
            mask[-1] = 1
        out.append((ids, mask.tolist()))
    return out
