"""Small chats for --tiny: documents of a prepared data set, cut short, two answers in each."""

import json
from pathlib import Path

import numpy as np

from megatron_bp.data.description import description

SHORTEST, LONGEST = 6, 40  # tokens of a chat, several of which make a row


def as_chats(source: Path, prefix: Path) -> None:
    """Write a data set of chats at `prefix` from the one of texts at `source`.

    Of n tokens the second third and the last sixth are supervised. Lengths differ, so that rows
    hold unlike numbers of chats.

    Raises:
        ValueError: no document is long enough.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    texts = IndexedDataset(str(source))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", texts.index.dtype)
    masks = []
    for number in range(len(texts)):
        ids = texts[number][: SHORTEST + 11 * number % (LONGEST - SHORTEST + 1)]
        n = len(ids)
        if n < SHORTEST:
            continue
        builder.add_document(ids, [n])
        mask = np.zeros(n, dtype=np.uint8)
        mask[n // 3 : 2 * n // 3] = mask[n - n // 6 :] = 1
        masks.append(mask)
    if not masks:
        raise ValueError(f"{source}: no text of {SHORTEST} tokens; give --data-path after --")
    builder.finalize(f"{prefix}.idx")
    np.save(f"{prefix}.supervised.npy", np.packbits(np.concatenate(masks), bitorder="little"))
    said = description(str(source))
    kept = {name: said[name] for name in ("megatron_bp", "tokenizer") if name in said}
    Path(f"{prefix}.json").write_text(json.dumps(kept | {"kind": "chats"}), encoding="utf-8")
