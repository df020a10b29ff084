"""Chance: uniform draws that are a pure function of what they are for.

Counter-based (Philox 4x64-10; Salmon et al., SC 2011, as numpy ships it). The key holds the seed
and the document; the counter holds purpose, split, epoch and copy, and runs along the document.
Nothing depends on rank, batch shape, accumulation, packing or resume.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """What a stream of draws is for; separate streams never meet."""

    LEVEL = 0  # one draw a block: the noise level
    MASK = 1  # one draw a position: corrupted or not
    REPLACEMENT = 2  # one draw a position: the id it becomes under uniform noise
    ORDER = 3  # one draw a block: the order in which antithetic levels are dealt
    SELF_CONDITIONING = 4  # one draw a document: whether it is conditioned on a first pass


@dataclass(frozen=True)
class NoiseKey:
    """Identity of one document's noise in one copy, one epoch of one split."""

    seed: int
    split: int
    epoch: int
    document: int
    copy: int


def uniform(key: NoiseKey, purpose: Purpose, start: int, stop: int) -> NDArray[np.float64]:
    """float64[stop - start] in [0, 1): draws `start` to `stop` of the stream of (key, purpose).

    Draw i of a stream is always the same number, whichever range is asked for.
    """
    mask = (1 << 64) - 1
    words = 4  # Philox makes four words a counter step, and steps before its first
    first = start // words
    place = int(purpose) << 8 | key.split
    counter = [first, key.copy, key.epoch & mask, place]
    bits = np.random.Philox(
        counter=np.array(counter, dtype=np.uint64),
        key=np.array([key.seed & mask, key.document & mask], dtype=np.uint64),
    )
    raw = bits.random_raw(stop - first * words)[start - first * words :]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
