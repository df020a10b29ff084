"""The order in which an epoch's chats are packed and its rows are read.

Chance is a function of (seed, split, epoch) alone, and no order depends on a number of ranks.

Data-parallel ranks that compute rows at the same time wait for the one that has most work, so such
rows should cost alike. Which these are depends on the ranks: consecutive rows of a global batch,
from two of them up to the whole batch. So a global batch is drawn from rows of similar cost
(`alike`), and inside it rows go by cost (`by_cost`): any consecutive rows of it are neighbours.
"""

import numpy as np
from numpy.typing import NDArray

POOL, BAND = 32, 4  # global batches
CHATS, ROWS, BATCHES = 1, 2, 3  # what is shuffled
PLACE = 1 << 32  # apart from all draws of diffusion/noise.py


def shuffled(n: int, seed: int, split: int, epoch: int, what: int) -> NDArray[np.int64]:
    """int64[n]: a random order of n things; the same for ever, unlike numpy's own shuffles."""
    counter = np.array([0, what, epoch, PLACE | split], dtype=np.uint64)
    bits = np.random.Philox(counter=counter, key=np.array([seed, 0], dtype=np.uint64))
    return np.argsort(bits.random_raw(n), kind="stable").astype(np.int64)


def alike(
    costs: NDArray[np.int64], batch: int, offset: int, seed: int, split: int, epoch: int
) -> NDArray[np.int64]:
    """int64[R]: an order of an epoch's rows in which a global batch holds rows of similar cost.

    Rows are shuffled and cut into pools of about POOL global batches. A pool's rows are sorted by
    cost and cut into bands of about BAND batches; a band is shuffled and cut into batches; a pool's
    batches are shuffled. So a step's rows come from one eighth of all costs, at random, and POOL
    steps hold a fair sample of the data. What is given up: the rows of a single step are no fair
    sample: long chats meet long chats, and as a step's loss is a mean over its own supervised
    tokens, their share in an update differs a little from what it is when all are mixed.

    The rows that finish the batch which the epoch before began, and those that begin one which the
    next will finish, are any rows.

    Args:
        costs: int64[R], cost of each row.
        batch: rows of a global batch.
        offset: rows that earlier epochs hold.
        seed: of the data's order.
        split: 0 for training.
        epoch: pass over the data.
    """
    order = shuffled(len(costs), seed, split, epoch, ROWS)
    head = min(-offset % batch, len(order))
    batches = (len(order) - head) // batch
    if batches < 2:
        return order
    whole = order[head : head + batches * batch]
    turns = shuffled(batches, seed, split, epoch, BATCHES)
    out, begin = [order[:head]], 0
    for pool in np.array_split(np.arange(batches), max(1, round(batches / POOL))):
        rows = whole[pool[0] * batch : (pool[-1] + 1) * batch]
        # Stable: rows of equal cost stay in random order, which decides between bands.
        by_cost = rows[np.argsort(costs[rows], kind="stable")]
        place = {int(row): i for i, row in enumerate(rows)}
        mixed = []
        for band in np.array_split(np.arange(len(pool)), max(1, round(len(pool) / BAND))):
            part = by_cost[band[0] * batch : (band[-1] + 1) * batch]
            mixed.append(np.array(sorted(part.tolist(), key=place.__getitem__), dtype=np.int64))
        by_batch = np.concatenate(mixed).reshape(-1, batch)
        out.append(by_batch[np.argsort(turns[begin : begin + len(pool)])].reshape(-1))
        begin += len(pool)
    out.append(order[head + batches * batch :])
    return np.concatenate(out)


def by_cost(costs: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[n]: the order of a global batch: cheap rows first, so that neighbours cost alike."""
    return np.argsort(costs, kind="stable").astype(np.int64)
