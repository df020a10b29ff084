"""What P.json says: the same for the same files, seed and options, wherever the files lie."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp import __version__
from megatron_bp.tools.prepare.options import Options
from megatron_bp.tools.prepare.tokenizing import Tokenizer

CHUNK = 1 << 24  # ids


@dataclass
class Tally:
    """What went into the data set, and what did not.

    Attributes:
        documents, tokens: in all.
        bytes: UTF-8 bytes of the text; of chats, of the supervised text.
        counts: how often each id stands in the data, [vocabulary]; in chats, where supervised.
        skipped, places: what was left out, by reason.
        chats: what is told of chats alone; None for texts.
    """

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    skipped: Counter[str] = field(default_factory=Counter)
    places: Mapping[str, list[str]] = field(default_factory=dict)
    chats: Mapping[str, Any] | None = None


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy of the distribution that `counts` [ids] is in proportion to, in bits."""
    p = counts[counts > 0] / max(int(counts.sum()), 1)
    return float(-(p * np.log2(p)).sum()) + 0.0  # + 0.0: no minus zero


def count_ids(
    path: Path,
    dtype: type[np.integer[Any]],
    vocabulary: int,
    bits: NDArray[np.uint8] | None = None,
) -> NDArray[np.int64]:
    """Return how often each id stands in a file of ids, [vocabulary].

    Args:
        path: of the file.
        dtype: of an id in it.
        vocabulary: ids are below this.
        bits: uint8[ceil(ids / 8)], which of them count; None for all.
    """
    ids, counts = np.memmap(path, dtype, "r"), np.zeros(vocabulary, np.int64)
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        if bits is not None:
            packed = bits[start // 8 : (start + CHUNK) // 8]
            chunk = chunk[np.unpackbits(packed, bitorder="little")[: len(chunk)].astype(np.bool_)]
        counts += np.bincount(chunk, minlength=vocabulary)
    return counts


def report(
    tally: Tally, options: Options, tokenizer: Tokenizer, sha256: Mapping[str, str]
) -> dict[str, Any]:
    """Return what P.json says."""
    bits = entropy(tally.counts)
    return {
        "megatron_bp": __version__,
        "kind": "text" if tally.chats is None else "chats",
        "seed": options.seed,
        "documents": tally.documents,
        "tokens": tally.tokens,
        "bytes": tally.bytes,
        "skipped": dict(sorted(tally.skipped.items())),
        "skipped_places": dict(tally.places),
        "unigram_bits_per_token": round(bits, 6),
        "unigram_bits_per_byte": round(bits * int(tally.counts.sum()) / max(tally.bytes, 1), 6),
        "append_eod": options.append_eod,
        "tokenizer": tokenizer.describe(),
        **(tally.chats or {}),
        "sha256": dict(sha256),
    }


def told(skipped: Mapping[str, int]) -> str:
    """Return the counts in words: "2 duplicate, 1 symlink"."""
    return ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items())) or "none"
