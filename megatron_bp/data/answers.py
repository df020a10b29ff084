"""A chat as it is trained with: cut to a row, or its last answer filled up to the end of its block.

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
        fill: id that a whole answer at the end of a chat is filled up with, to the end of its last
            block; None for no filling.
        row_cost: linear work of one row of the network in visible pairs, for costs.
    """

    length: int
    block_size: int
    grid: Grid = "document"
    overlong: Overlong = "refuse"
    fill: int | None = None
    row_cost: int = 0


def filling(
    tokens: int | NDArray[np.int64],
    last_supervised: bool | NDArray[np.bool_],
    last_run: int | NDArray[np.int64],
    policy: ChatPolicy,
) -> NDArray[np.int64]:
    """int64, in the shape of the arguments: ids that are added to chats of so many tokens.

    Example, blocks of 4, a chat of 3 prompt and 4 answer tokens, x the filling:

        grid document   p p p a | a a a x      grid response   p p p | a a a a

    A chat that is longer than a row gets none, whether cut or not; none reaches beyond the row.

    Args:
        tokens: of the chat, before it is cut.
        last_supervised: whether its last token is supervised.
        last_run: where the last run of supervised tokens starts, if so.
        policy: what is done to chats.
    """
    if policy.fill is None:
        return np.zeros(np.shape(tokens), dtype=np.int64)
    origin = 0 if policy.grid == "document" else last_run
    missing = -(np.asarray(tokens) - origin) % policy.block_size
    room = np.maximum(policy.length - np.asarray(tokens), 0)
    return np.where(last_supervised, np.minimum(missing, room), 0).astype(np.int64)


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
    if n == 0 or policy.fill is None:
        return tokens, supervised
    prompts = np.flatnonzero(~supervised)
    last_run = int(prompts[-1]) + 1 if len(prompts) else 0
    added = int(filling(n, bool(supervised[-1]), last_run, policy))
    return (
        np.append(tokens, np.full(added, policy.fill, dtype=np.int32)),
        np.append(supervised, np.ones(added, dtype=np.bool_)),
    )
