"""Cutting and filling of chats by hand, and the same numbers for a whole data set at once.

In the tables p is a prompt token, a an answer's, x filling; ids are their places, filling is 999.
"""

from typing import Any

import numpy as np
import pytest
from chat_files import random_chats, write_chats

from megatron_bp.data import catalogue as catalogue_module
from megatron_bp.data.answers import ChatPolicy, as_trained
from megatron_bp.data.catalogue import Catalogue, catalogue
from megatron_bp.data.indexed import DataError
from megatron_bp.data.supervised import supervised_of
from megatron_bp.sequence.blocks import block_grid

FILL = 999


def policy(**changes: Any) -> ChatPolicy:
    values = {"length": 10, "block_size": 4, "fill": FILL} | changes
    return ChatPolicy(**values)


@pytest.mark.parametrize(
    ("kinds", "changes", "wanted"),
    [
        # 3 + 4 = 7 tokens, blocks of 4 from the start: 1 more makes two blocks.
        ("pppaaaa", {}, "pppaaaax"),
        # Blocks from the answer's start: its 4 tokens are a block.
        ("pppaaaa", {"grid": "response"}, "pppaaaa"),
        ("pppaaa", {"grid": "response"}, "pppaaax"),
        # 8 tokens are two blocks; 5 of an answer need 3 more.
        ("pppaaaaa", {}, "pppaaaaa"),
        ("papaaaaa", {"grid": "response", "length": 20}, "papaaaaaxxx"),
        # The last answer's run counts, not the first's: 2 + 2.
        ("paaapaa", {"grid": "response", "length": 20}, "paaapaaxx"),
        # All of it an answer.
        ("aaaaa", {}, "aaaaaxxx"),
        ("aaaaa", {"grid": "response"}, "aaaaaxxx"),
        # What follows the last answer is cut off, then it is filled: 3 + 1, 4 + 0, 1 + (2 + 2).
        ("paap", {}, "paax"),
        ("papap", {}, "papa"),
        ("paapp", {"grid": "response"}, "paaxx"),
        ("appppaaappp", {"length": 20, "grid": "response"}, "appppaaax"),
        ("appppp", {}, "axxx"),
        # There is no answer: nothing to fill, nothing cut.
        ("ppp", {}, "ppp"),
        ("pp", {"grid": "response"}, "pp"),
        # Without filling all stays.
        ("paap", {"fill": None}, "paap"),
        # No filling asked for.
        ("pppaaa", {"fill": None}, "pppaaa"),
        # The row ends before the block does.
        ("ppppppppa", {}, "ppppppppax"),
        ("ppppppppaa", {}, "ppppppppaa"),
        ("ppppppppa", {"length": 9}, "ppppppppa"),
        ("ppppppppap", {}, "ppppppppax"),
        ("pppppaaaap", {}, "pppppaaaax"),
        # Longer than the row: cut, and never filled, wherever the cut falls.
        ("ppppppaaaaaa", {"overlong": "truncate"}, "ppppppaaaa"),
        ("pppppaaaapap", {"overlong": "truncate"}, "pppppaaaap"),
        ("ppppppppaaaa", {"overlong": "truncate", "length": 9}, "ppppppppa"),
        ("ppppppppppaa", {"overlong": "truncate"}, "pppppppppp"),
        ("ppppppaaaaaa", {"overlong": "drop"}, ""),
        # It is judged by its length with what follows its answer.
        ("ppppppaaapp", {"overlong": "truncate"}, "ppppppaaap"),
        ("ppppppaaapp", {"overlong": "drop"}, ""),
        ("", {}, ""),
    ],
)
def test_a_chat_as_it_is_trained(kinds: str, changes: dict[str, Any], wanted: str) -> None:
    tokens = np.arange(len(kinds), dtype=np.int32)
    supervised = np.array([kind == "a" for kind in kinds], dtype=np.bool_)
    got, mask = as_trained(tokens, supervised, policy(**changes))
    assert got.tolist() == [FILL if kind == "x" else i for i, kind in enumerate(wanted)]
    assert mask.tolist() == [kind in "ax" for kind in wanted]
    assert (got.dtype, mask.dtype) == (np.int32, np.bool_)


def test_an_overlong_chat_is_refused_by_default() -> None:
    with pytest.raises(ValueError, match="11 tokens is longer than a row of 10"):
        as_trained(np.arange(11, dtype=np.int32), np.ones(11, np.bool_), policy())


@pytest.mark.parametrize("grid", ["document", "response"])
def test_filling_ends_where_the_plans_block_does(grid: Any) -> None:
    """One more supervised token would begin a block of the grid that the plan is made on."""
    filled = 0
    for ids, mask in random_chats(100):
        tokens, supervised = np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_)
        got, scored = as_trained(tokens, supervised, policy(length=80, grid=grid))
        assert (got == FILL).sum() < 4
        if not any(mask):
            continue
        filled += bool((got == FILL).any())
        n = len(got) + 1
        blocks = block_grid(
            np.zeros(n, np.int32), np.arange(n, dtype=np.int32), 4, np.append(scored, True), grid
        )
        assert blocks.start[-1] == len(got)
    assert filled > 20


# --- a whole data set ----------------------------------------------------------------------------


def of_data(path: Any, chats: list[Any], policy: ChatPolicy) -> Catalogue:
    mask = supervised_of(write_chats(path / "data", chats))
    assert mask is not None
    sizes = np.array([len(ids) for ids, _ in chats], dtype=np.int32)
    return catalogue(sizes, mask, policy, "data")


@pytest.mark.parametrize("chunk", [1, 64, 1 << 22])
@pytest.mark.parametrize("grid", ["document", "response"])
@pytest.mark.parametrize(("overlong", "length"), [("truncate", 20), ("drop", 20), ("refuse", 40)])
def test_the_catalogue_is_what_each_chat_becomes(
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    grid: Any,
    overlong: Any,
    length: int,
) -> None:
    monkeypatch.setattr(catalogue_module, "CHUNK", chunk)
    how = policy(length=length, grid=grid, overlong=overlong)
    chats = random_chats(200)
    for place in (0, 0, 50, 204):  # empty ones
        chats.insert(place, ([], []))
    facts = of_data(tmp_path, chats, how)
    assert facts.kept.sum() > 50
    assert facts.filled.sum() > 50
    assert facts.unsupervised.sum() > 5
    for i, (ids, mask) in enumerate(chats):
        tokens = np.array(ids, dtype=np.int32)
        supervised = np.array(mask, dtype=np.bool_)
        got, scored = as_trained(tokens, supervised, how)
        assert facts.first[i] == sum(len(c) for c, _ in chats[:i])
        assert facts.whole[i] == sum(mask)
        assert facts.overlong[i] == (len(ids) > length and overlong == "drop")
        if facts.overlong[i]:
            assert not facts.unsupervised[i]
            assert facts.tokens[i] == facts.cost[i] == 0
            continue
        assert facts.unsupervised[i] == (not scored.any())
        if not scored.any():
            assert facts.tokens[i] == facts.cost[i] == 0
            continue
        assert facts.truncated[i] == (len(ids) > length)
        assert facts.tokens[i] == len(got)
        assert facts.supervised[i] == scored.sum()
        assert facts.filled[i] == (got == FILL).sum()
        places = np.flatnonzero(scored)
        assert facts.cost[i] == len(got) * (len(got) + 4) // 2 + int((places + 4).sum())


def test_the_cost_of_rows_of_the_network_is_added(tmp_path: Any) -> None:
    """Of 5 tokens and 2 supervised ones in blocks of 4: 7 rows."""
    chats = [([1] * 5, [0, 0, 0, 1, 1])]
    (without,) = of_data(tmp_path, chats, policy(fill=None)).cost
    (with_rows,) = of_data(tmp_path, chats, policy(fill=None, row_cost=1000)).cost
    assert with_rows - without == 7000
    assert without == 5 * 9 // 2 + (3 + 4) + (4 + 4)


def test_a_data_set_with_an_overlong_chat_is_refused(tmp_path: Any) -> None:
    chats = [([1] * 5, [1] * 5), ([1] * 12, [1] * 12), ([1] * 30, [1] * 30)]
    with pytest.raises(DataError) as error:
        of_data(tmp_path, chats, policy())
    assert str(error.value) == (
        "data: chat 1 has 12 tokens, and a row 10 (--seq-length); 2 of 3 chats are too long, the "
        "longest has 30: raise --seq-length, or say --overlong-chats truncate or drop"
    )


def test_a_chat_cut_before_its_answer_is_dropped(tmp_path: Any) -> None:
    chats = [([1] * 12, [0] * 10 + [1, 1]), ([1] * 12, [0] * 9 + [1] * 3)]
    facts = of_data(tmp_path, chats, policy(overlong="truncate"))
    assert facts.unsupervised.tolist() == [True, False]
    assert facts.truncated.tolist() == [False, True]
    assert facts.tokens.tolist() == [0, 10]
    assert facts.supervised.tolist() == [0, 1]
    assert facts.filled.tolist() == [0, 0]
