"""What each chat of a data set is as it is trained with: size, cost, or why it is left out.

One pass over the lengths and the mask; no token is read. The same numbers that `answers.as_trained`
gives chat by chat. Knows nothing of packing, noise or ranks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_bp.data.answers import ChatPolicy, kept_and_added
from megatron_bp.data.indexed import DataError
from megatron_bp.data.supervised import SupervisedMask

CHUNK = 1 << 24  # tokens looked at at once, or one chat


@dataclass(frozen=True, eq=False)
class Catalogue:
    """Of C chats, in the order of the .idx; those left out have 0 tokens.

    Attributes:
        first: int64[C], place of each chat's first token in the data.
        tokens: int64[C], as they are trained with: cut, filled.
        supervised: int64[C], tokens of these that are supervised, filling included.
        whole: int64[C], supervised tokens before anything was cut or filled.
        filled: int64[C], tokens that were added.
        cost: int64[C], work of each in visible pairs.
        truncated, overlong, unsupervised: bool[C], cut; left out as longer than a row; left out as
            nothing (that is left) of it is supervised.
    """

    first: NDArray[np.int64]
    tokens: NDArray[np.int64]
    supervised: NDArray[np.int64]
    whole: NDArray[np.int64]
    filled: NDArray[np.int64]
    cost: NDArray[np.int64]
    truncated: NDArray[np.bool_]
    overlong: NDArray[np.bool_]
    unsupervised: NDArray[np.bool_]

    @property
    def kept(self) -> NDArray[np.bool_]:
        """bool[C]: chats that are trained with."""
        return self.tokens > 0


def catalogue(
    lengths: NDArray[np.int32], mask: SupervisedMask, policy: ChatPolicy, name: str
) -> Catalogue:
    """The chats of a data set under a policy.

    Args:
        lengths: int32[C], tokens of each chat.
        mask: which of them are supervised.
        policy: what is done to chats.
        name: of the data set, for errors.

    Raises:
        DataError: a chat is longer than a row, and such chats are refused.
    """
    sizes = lengths.astype(np.int64)
    refuse_overlong(sizes, policy, name)
    ends = np.cumsum(sizes)
    first = ends - sizes
    facts = np.zeros((5, len(sizes)), dtype=np.int64)
    start = 0
    while start < len(sizes):
        stop = max(start + 1, int(np.searchsorted(ends, first[start] + CHUNK, "right")))
        part = slice(start, stop)
        facts[:, part] = _of_chunk(sizes[part], mask, int(first[start]), policy.length)
        start = stop
    whole, kept, places, end, last_run = facts
    overlong = (sizes > policy.length) & (policy.overlong == "drop")
    unsupervised = (kept == 0) & ~overlong
    left = ~overlong & ~unsupervised
    cut, filled = (np.where(left, n, 0) for n in kept_and_added(sizes, end, last_run, policy))
    tokens = cut + filled
    supervised = np.where(left, kept + filled, 0)
    seen = places + filled * cut + filled * (filled - 1) // 2
    cost = tokens * (tokens + policy.block_size) // 2 + seen + supervised * policy.block_size
    cost += policy.row_cost * (tokens + supervised)
    return Catalogue(
        first=first,
        tokens=tokens,
        supervised=supervised,
        whole=whole,
        filled=filled,
        cost=np.where(left, cost, 0),
        truncated=left & (sizes > policy.length),
        overlong=overlong,
        unsupervised=unsupervised,
    )


def refuse_overlong(sizes: NDArray[np.int64], policy: ChatPolicy, name: str) -> None:
    """Raise a DataError for the first chat that is longer than a row, if such are refused."""
    long = np.flatnonzero(sizes > policy.length)
    if policy.overlong != "refuse" or not len(long):
        return
    raise DataError(
        f"{name}: chat {long[0]} has {sizes[long[0]]} tokens, and a row {policy.length} "
        f"(--seq-length); {len(long)} of {len(sizes)} chats are too long, the longest has "
        f"{sizes.max()}: raise --seq-length, or say --overlong-chats truncate or drop"
    )


def _of_chunk(
    sizes: NDArray[np.int64], mask: SupervisedMask, first: int, length: int
) -> NDArray[np.int64]:
    """int64[5, C'] of chats one after the other, from the runs of their masks.

    Supervised tokens, those in the first `length` tokens, the sum of their positions, and where the
    last run of supervised tokens ends and starts; 0 where there is none.
    """
    begin = np.cumsum(sizes) - sizes
    bits = mask.of(first, int(sizes.sum()))
    out = np.zeros((5, len(sizes)), dtype=np.int64)
    turns = np.flatnonzero(bits[1:] != bits[:-1]) + 1
    edges = np.unique(np.concatenate([turns, begin[sizes > 0]]))
    stops = np.append(edges[1:], len(bits))
    runs = bits[edges]
    chat = np.searchsorted(begin, edges[runs], "right") - 1
    start, stop = edges[runs] - begin[chat], stops[runs] - begin[chat]
    a, b = np.minimum(start, length), np.minimum(stop, length)
    np.add.at(out[0], chat, stop - start)
    np.add.at(out[1], chat, b - a)
    np.add.at(out[2], chat, (a + b - 1) * (b - a) // 2)
    np.maximum.at(out[3], chat, stop)
    np.maximum.at(out[4], chat, start)
    return out
