"""What an exchange sends, counted from the plan, is what its forms hand over."""

import numpy as np
import pytest
import torch
from cases import Case, sample_of

from megatron_bp.attention.exchange.choose import FORMS, ExchangeOptions, prepare_exchange
from megatron_bp.attention.exchange.count import Sending, over_heads, sending
from megatron_bp.attention.exchange.needed import rows_to_send
from megatron_bp.attention.parts import Held
from megatron_bp.sequence.plan import RankRows, SequenceOptions, make_plan

CPU = torch.device("cpu")


def size(held: Held) -> int:
    return len(held.clean) + held.gap + len(held.corrupted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("degrees", [(2, 2), (4, 4), (4, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_rows_are_those_of_the_exchange(
    form: str, degrees: tuple[int, int], window: int | None
) -> None:
    """A ring hands on what came, but the last; gradients start with what came first."""
    plan = make_plan(sample_of(Case((61, 40, 13), 4)), SequenceOptions(4, *degrees))
    if degrees[0] == 1 and form in ("needed_rows", "te"):
        pytest.skip("mode CP has no such form")
    options = ExchangeOptions(form)  # type: ignore[arg-type]
    sent_to = came = 0
    for rank in range(max(degrees)):
        group = plan.shard_group(rank)
        shards = tuple(plan.rows_of(peer, 8) for peer in group)
        got = sending(plan, shards, rank, window, options)
        held = prepare_exchange(plan, shards, rank, window, options, CPU).held
        if got.form == "ring":
            own = shards[group.index(rank)].num_sent
            want = (own + sum(map(size, held[:-1])), sum(map(size, held)))
        elif got.form == "needed_rows":
            want = (got.fetched, sum(map(size, held)))
            sent_to, came = sent_to + got.fetched, came + got.returned
        else:
            every = (len(group) - 1) * max(shard.num_sent for shard in shards)
            want = every, every
        assert (got.fetched, got.returned) == want
        assert got.wide == (form in ("ring", "te"))
        assert got.form == form or form == "auto"
    assert sent_to == came


@pytest.mark.parametrize("seed", range(8))
def test_rows_to_send_are_those_that_one_has_and_one_lacks(seed: int) -> None:
    """Counted run by run; position by position here. One shard is empty, some share positions."""
    rng = np.random.default_rng(seed)
    every = [np.flatnonzero(rng.random(60) < share) for share in (0.5, 0.3, 0.0, 0.9, 0.1)]
    shards = tuple(
        RankRows(clean.astype(np.int32), 0, np.zeros(0, np.int64), len(clean)) for clean in every
    )
    lacked = tuple(
        np.flatnonzero(rng.random(60) < share).astype(np.int32) for share in (0.4, 0, 0.7, 0.2, 1)
    )
    want = [[len({*clean} & {*wanted}) for wanted in lacked] for clean in every]
    assert rows_to_send(shards, lacked).tolist() == want
    assert rows_to_send(shards[2:3], lacked[:1]).tolist() == [[0]]


def test_bytes_by_hand() -> None:
    """Rows of 10 numbers: 3 of 2 B twice, and 5 back, of 2 B or of 4."""
    assert Sending("needed_rows", 3, 5, False).bytes(10, torch.bfloat16, 2, 1) == 120 + 100
    assert Sending("ring", 3, 5, True).bytes(10, torch.bfloat16, 2, 1) == 120 + 200
    assert Sending("ring", 3, 5, True).bytes(10, torch.float64, 1, 0) == 240


@pytest.mark.parametrize(("key_heads", "wanted"), [(2, 492), (4, 492), (8, 672)])
def test_heads_by_hand(key_heads: int, wanted: int) -> None:
    """Rank 1 of 4 has 10 of 32 rows; 2 of 8 query heads a rank, of dimension 3.

    Its rows go to 3 others with 2 queries, 1 key and 1 value (2 and 2 of 8): 3 x 10 x 4 = 120 heads
    (180); what it made of the others' 22 rows goes back: 44. 164 x 3 = 492 (224 x 3 = 672).
    """
    nobody = np.zeros(0, np.int64)
    shards = tuple(RankRows(np.arange(n, dtype=np.int32), 0, nobody, n) for n in (6, 10, 8, 8))
    assert over_heads(shards, 1, 8, key_heads, 3) == wanted
