"""A chat as it is trained with: cut to a row, or its last answer filled up to its block's end.

Pure functions of one chat's ids and mask. Knows nothing of packing, noise or ranks.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Overlong = Literal["refuse", "truncate", "drop"]
Grid = Literal["document", "response"]


@dataclass(frozen=True)
class ChatPolicy:
    """What is done to chats before they are packed.

    Attributes:
        length: tokens of a row.
        block_size: tokens of a block.
        grid: blocks count from the chat's start, or anew from the start of each response.
        overlong: what becomes of a chat that is longer than a row: an error ("refuse"), its first
            `length` tokens ("truncate"), or nothing ("drop").
        fill: id that a chat's last answer is filled up with, to the end of its last block, in place
            of what follows it; None for no filling.
        row_cost: linear work of one row of the network in visible pairs, for costs.
    """

    length: int
    block_size: int
    grid: Grid = "document"
    overlong: Overlong = "refuse"
    fill: int | None = None
    row_cost: int = 0


def kept_and_added(
    tokens: int | NDArray[np.int64],
    end: int | NDArray[np.int64],
    last_run: int | NDArray[np.int64],
    policy: ChatPolicy,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(int64, int64) in the shape of the arguments: tokens that stay of a chat, ids added to them.

    With filling, what follows the last supervised token (the line break that a template renders
    after an end of turn, say) does not stay: generation ends there, and nothing after it is scored.
    Example, blocks of 4, a chat of 3 prompt and 4 answer tokens and one after them, x the filling:

        grid document   p p p a | a a a x      grid response   p p p | a a a a

    A chat that is longer than a row, with all that follows its answers, is cut to the row and gets
    no filling, whatever the cut leaves; nor does one without a supervised token. No filling reaches
    beyond the row.

    Args:
        tokens: of the chat, before it is cut.
        end: where its last run of supervised tokens ends; 0 if there is none.
        last_run: where that run starts.
        policy: what is done to chats.
    """
    size = np.asarray(tokens, dtype=np.int64)
    kept = np.minimum(size, policy.length)
    if policy.fill is None:
        return kept, np.zeros_like(kept)
    filled = (size <= policy.length) & (np.asarray(end) > 0)
    kept = np.where(filled, end, kept)
    origin = 0 if policy.grid == "document" else last_run
    missing = -(kept - origin) % policy.block_size
    return kept, np.where(filled, np.minimum(missing, policy.length - kept), 0)


def as_trained(
    tokens: NDArray[np.int32], supervised: NDArray[np.bool_], policy: ChatPolicy
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """The chat's ids and mask after cutting and filling; empty if it is dropped.

    Args:
        tokens: int32[n].
        supervised: bool[n].
        policy: what is done to chats.

    Raises:
        ValueError: it is longer than a row, and such chats are refused.
    """
    n = len(tokens)
    if n > policy.length:
        if policy.overlong == "refuse":
            raise ValueError(f"a chat of {n} tokens is longer than a row of {policy.length}")
        kept = policy.length if policy.overlong == "truncate" else 0
        return tokens[:kept], supervised[:kept]
    if policy.fill is None:
        return tokens, supervised
    places = np.flatnonzero(supervised)
    end = int(places[-1]) + 1 if len(places) else 0
    prompts = np.flatnonzero(~supervised[:end])
    last_run = int(prompts[-1]) + 1 if len(prompts) else 0
    kept, added = map(int, kept_and_added(n, end, last_run, policy))
    return (
        np.append(tokens[:kept], np.full(added, policy.fill, dtype=np.int32)),
        np.append(supervised[:kept], np.ones(added, dtype=np.bool_)),
    )
