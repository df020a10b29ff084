"""Which chats share a row, in which order rows are read, and what that does for ranks."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_bp.data.best_fit import Rows, best_fit, in_order
from megatron_bp.data.order import BATCHES, CHATS, POOL, ROWS, alike, by_cost, shuffled

Ints = NDArray[np.int64]


def lengths(n: int, longest: int, seed: int = 0) -> Ints:
    """Lognormal, as chats are."""
    return np.clip(np.random.default_rng(seed).lognormal(6, 1, n), 1, longest).astype(np.int64)


def listed(rows: Rows) -> list[list[int]]:
    return [rows.of(i).tolist() for i in range(len(rows))]


# --- packing -------------------------------------------------------------------------------------


def test_best_fit_by_hand() -> None:
    """Rows of 10; chats 0-6 of 3 7 5 2 2 8 3 tokens.

    Longest first: 5 (8) opens a row, 1 (7) another, 2 (5) a third; room is 2, 3, 5. 0 (3) fits 1's
    row exactly, 6 (3) the third (room 2). 3 (2) goes to the fullest with room, the first of the two
    rows with room 2; 4 (2) to the other.
    """
    tokens = np.array([3, 7, 5, 2, 2, 8, 3])
    assert listed(best_fit(np.arange(7), tokens, 10)) == [[5, 3], [1, 0], [2, 6, 4]]


def test_windows_are_packed_one_after_the_other() -> None:
    tokens = np.array([5, 6, 4, 5])
    assert listed(best_fit(np.array([0, 1, 2, 3]), tokens, 10, window=2)) == [[1], [0], [3, 2]]
    assert listed(best_fit(np.array([0, 1, 2, 3]), tokens, 10)) == [[1, 2], [0, 3]]


def test_in_order_by_hand() -> None:
    tokens = np.array([3, 7, 1, 5, 5, 10, 1])
    assert listed(in_order(np.arange(7), tokens, 10)) == [[0, 1], [2, 3], [4], [5], [6]]
    assert listed(in_order(np.array([1, 2, 6]), tokens, 10)) == [[1, 2, 6]]
    assert listed(in_order(np.zeros(0, np.int64), tokens, 10)) == []


@pytest.mark.parametrize("pack", [best_fit, in_order])
@pytest.mark.parametrize("seed", range(5))
def test_every_chat_once_and_no_row_too_long(pack: Callable[..., Rows], seed: int) -> None:
    tokens = lengths(500, 1024, seed)
    chats = shuffled(500, seed + 1, 0, 0, CHATS)[:400]
    rows = pack(chats, tokens, 1024)
    assert sorted(rows.chats.tolist()) == sorted(chats.tolist())
    assert rows.start[0] == 0
    assert (np.diff(rows.start) > 0).all(), "an empty row"
    assert max(int(tokens[row].sum()) for row in listed(rows)) <= 1024
    assert rows.sums(tokens).tolist() == [int(tokens[row].sum()) for row in listed(rows)]


def test_best_fit_leaves_little_room() -> None:
    tokens = lengths(20000, 4096)
    rows = best_fit(np.arange(20000), tokens, 4096)
    assert tokens.sum() / (len(rows) * 4096) > 0.998
    plain = in_order(np.arange(20000), tokens, 4096)
    assert tokens.sum() / (len(plain) * 4096) < 0.9


def test_rows_in_another_order() -> None:
    rows = best_fit(np.arange(7), np.array([3, 7, 5, 2, 2, 8, 3]), 10)
    assert listed(rows.reordered(np.array([2, 0, 1]))) == [[2, 6, 4], [5, 3], [1, 0]]


# --- order ---------------------------------------------------------------------------------------


def test_shuffles_are_of_seed_split_epoch_and_purpose_alone() -> None:
    base = shuffled(50, 1, 0, 0, CHATS)
    assert sorted(base.tolist()) == list(range(50))
    assert base.tolist() == shuffled(50, 1, 0, 0, CHATS).tolist()
    others = [(2, 0, 0, CHATS), (1, 1, 0, CHATS), (1, 0, 1, CHATS), (1, 0, 0, ROWS)]
    others.append((1, 0, 0, BATCHES))
    assert len({str(shuffled(50, *other)) for other in others} | {str(base)}) == 6


def test_a_shuffle_is_the_same_for_ever() -> None:
    """As numpy's Philox gives it today: a change would read other rows after a resume."""
    assert shuffled(8, 1234, 0, 3, CHATS).tolist() == SHUFFLED


SHUFFLED = [5, 1, 4, 2, 3, 6, 0, 7]


@pytest.mark.parametrize(
    ("rows", "batch", "offset"),
    [
        (1000, 8, 0),
        (1000, 8, 5),
        (37, 8, 3),
        (16, 8, 0),
        (7, 8, 0),
        (3, 8, 5),
        (1, 1, 0),
        (0, 4, 1),
    ],
)
def test_an_order_holds_each_row_once(rows: int, batch: int, offset: int) -> None:
    costs = lengths(rows, 4096) ** 2
    order = alike(costs, batch, offset, 1, 0, 0)
    assert sorted(order.tolist()) == list(range(rows))
    assert order.tolist() == alike(costs, batch, offset, 1, 0, 0).tolist()


def global_batches(costs: Ints, batch: int, balanced: bool) -> Ints:
    """[batches, batch]: costs of the rows of each whole global batch, in the order of reading."""
    order = alike(costs, batch, 0, 1, 0, 0) if balanced else shuffled(len(costs), 1, 0, 0, ROWS)
    rows = order[: len(order) // batch * batch].reshape(-1, batch)
    if balanced:
        rows = np.stack([row[by_cost(costs[row])] for row in rows])
    return costs[rows]


def waiting(batches: Ints, moment: int) -> float:
    """Time over time without waiting, where ranks compute `moment` rows at once, a row each."""
    at_once = batches.reshape(-1, moment)
    return float(at_once.max(1).sum() / at_once.mean(1).sum())


@pytest.mark.parametrize(
    ("linear", "limits"),
    [
        # Attention alone, as at very long context; and with much linear work, as at short one.
        (0, {2: (1.3, 1.02), 4: (1.7, 1.05), 8: (2.0, 1.1), 32: (2.6, 1.45)}),
        (3000, {2: (1.07, 1.01), 4: (1.12, 1.02), 8: (1.2, 1.03), 32: (1.33, 1.1)}),
    ],
)
def test_ranks_wait_less_for_each_other(
    linear: int, limits: dict[int, tuple[float, float]]
) -> None:
    """Worst over mean cost of the rows of a moment, for 2 to 32 ranks, without and with order.

    32 is the global batch: one micro-batch a step, all rows of a step at once.
    """
    tokens = lengths(20000, 4096)
    cost = tokens * (tokens + 32) // 2 + linear * tokens
    costs = best_fit(shuffled(20000, 1, 0, 0, CHATS), tokens, 4096).sums(cost)
    for moment, (without, with_order) in limits.items():
        assert waiting(global_batches(costs, 32, False), moment) > without
        assert waiting(global_batches(costs, 32, True), moment) < with_order


def test_a_steps_rows_stay_mixed() -> None:
    """A batch spans about an eighth of all costs, and the steps of a pool span all of them."""
    costs = shuffled(32 * POOL * 3, 5, 0, 0, ROWS)  # each cost once: cost is rank
    batches = global_batches(costs, 32, True)
    spans = (batches.max(1) - batches.min(1)) / len(costs)
    assert 0.08 < spans.mean() < 0.2
    middles = batches.mean(1) / len(costs)
    steps = np.abs(np.diff(middles)).mean()
    assert steps > 0.2, "batches of like cost follow one another"
    assert abs(middles[:POOL].mean() - 0.5) < 0.05


def test_an_epoch_that_begins_inside_a_batch_keeps_to_the_batches_after_it() -> None:
    costs = shuffled(32 * POOL, 5, 0, 0, ROWS)
    order = alike(costs, 32, 5, 1, 0, 0)
    whole = costs[order[27 : 27 + 32 * 20]].reshape(-1, 32)
    spans = (whole.max(1) - whole.min(1)) / len(costs)
    assert spans.mean() < 0.2
    off = costs[order[: 32 * 20]].reshape(-1, 32)
    assert ((off.max(1) - off.min(1)) / len(costs)).mean() > 0.3
