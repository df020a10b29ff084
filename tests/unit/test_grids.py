"""Blocks, units and views of chats: both grids, both alignments, several copies."""

from typing import Any

import numpy as np
import oracle
import pytest
import torch

from megatron_bp.data.document import Document
from megatron_bp.sequence.blocks import block_grid, first_mixed
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.sequence.visibility import corrupted_positions, visibility


def chat(marks: str, key: int = 0) -> Document:
    """A document of one token a character; "x" is a response's."""
    supervised = np.array([mark == "x" for mark in marks], dtype=bool)
    return Document(np.arange(len(marks), dtype=np.int32), supervised, key)


def blocks_of(marks: str, block_size: int, grid: Any) -> list[int]:
    sample = pack([chat(marks)], len(marks))
    made = block_grid(sample.document, sample.position, block_size, sample.supervised, grid)
    return [int(n) for n in made.block_of]


BY_HAND = [
    # the example of blocks.py
    (
        "...xxxxxx.....x",
        4,
        "000011112333444",
        "000111122333345",
    ),
    ("xxxxxxxx", 4, "00001111", "00001111"),  # a text
    ("........", 4, "00001111", "00001111"),  # a prompt alone
    ("..xxxx..", 4, "00001122", "00111122"),  # a response that ends on the document's grid
    ("..xxxxx.", 4, "00001112", "00111123"),
    (".x.x.x", 4, "001122", "012345"),
    (".x.x.x", 1, "012345", "012345"),
    ("x", 4, "0", "0"),
    ("", 4, "", ""),
]


@pytest.mark.parametrize(("marks", "size", "document", "response"), BY_HAND)
def test_blocks_by_hand(marks: str, size: int, document: str, response: str) -> None:
    assert blocks_of(marks, size, "document") == [int(c) for c in document]
    assert blocks_of(marks, size, "response") == [int(c) for c in response]


@pytest.mark.parametrize(
    ("marks", "grid", "place"),
    [
        ("...xxxxxx.....x", "document", 9),
        ("...xxxxxx.....x", "response", 9),
        ("....xxxx....x", "document", None),  # ends on the grid
        ("..xxxxxx..x", "document", None),
        ("..xxxxxx..x", "response", 8),  # two tokens into the response's second block
        ("..xxxx..x", "response", None),
        ("...xxx...", "document", None),  # no prompt: nothing is answered any more
        ("...xx", "document", None),
        ("", "document", None),
    ],
)
def test_where_a_response_and_a_prompt_share_a_block(
    marks: str, grid: Any, place: int | None
) -> None:
    # in the middle of others, so that neighbours would show
    sample = pack([chat("xx..", 3), chat(marks, 4), chat("xxx", 5)], 4 + len(marks) + 3)
    got = first_mixed(sample.document, sample.position, 4, sample.supervised, grid)
    assert got == (None if place is None else 4 + place)
    options = SequenceOptions(4, grid=grid, response_end="refuse")
    if place is None:
        make_plan(sample, options)
    else:
        with pytest.raises(ValueError, match=rf"key 4 a response ends at token {place}, inside"):
            make_plan(sample, options)


def random_chats(seed: int) -> tuple[Sample, SequenceOptions, int | None]:
    rng = np.random.default_rng(seed)
    documents = []
    for key in range(rng.integers(1, 5)):
        runs = rng.integers(1, 7, rng.integers(1, 6))
        turns = np.repeat((np.arange(len(runs)) + rng.integers(2)) % 2 == 1, runs)
        documents.append(Document(rng.integers(0, 40, len(turns)).astype(np.int32), turns, key))
    length = sum(len(d.tokens) for d in documents) + int(rng.integers(0, 3))
    options = SequenceOptions(
        int(rng.integers(1, 6)),
        clean_relation=("block", "token")[rng.integers(2)],
        own_relation=("bidirectional", "causal")[rng.integers(2)],
        grid=("document", "response")[rng.integers(2)],
        alignment=("same", "next")[rng.integers(2)],
        copies=int(rng.integers(1, 4)),
        window_anchor=("row", "block")[rng.integers(2)],
    )
    return pack(documents, length), options, None if rng.random() < 0.3 else int(rng.integers(1, 9))


def dense(plan: SequencePlan, window: int | None) -> torch.Tensor:
    length, rows = len(plan.block_of), int(plan.units.offset[-1])
    clean = np.flatnonzero(plan.block_of >= 0).astype(np.int32)
    seen = visibility(plan, clean, np.arange(rows), window)
    mask = torch.zeros(length + rows, length + rows, dtype=torch.bool)
    for s, index in enumerate(seen.index.tolist()):
        row = index if s < seen.num_clean else length + index
        mask[row, int(seen.clean_lo[s]) : int(seen.clean_hi[s])] = True
        mask[row, length + int(seen.own_lo[s]) : length + int(seen.own_hi[s])] = True
    return mask


@pytest.mark.parametrize("seed", range(60))
def test_random_chats_against_the_oracle(seed: int) -> None:
    """Blocks, which rows there are and in which order, and who sees whom."""
    sample, options, window = random_chats(seed)
    document, supervised = sample.document.tolist(), sample.supervised.tolist()
    block = oracle.block_of(document, options.block_size, supervised, options.grid)
    plan = make_plan(sample, options)
    assert plan.block_of.tolist() == block
    draws = oracle.Draws([1.0] * (max(block, default=-1) + 1), [0.0] * len(block), [0] * len(block))
    table = oracle.corrupted_table(
        sample.tokens.tolist(),
        document,
        block,
        supervised,
        [draws] * options.copies,
        alignment=options.alignment,
    )
    assert corrupted_positions(plan).tolist() == [row.position for row in table]
    sizes = plan.units.stop - plan.units.start
    assert np.repeat(plan.units.copy, sizes).tolist() == [row.copy for row in table]
    want = oracle.visible(
        document,
        options.block_size,
        clean_relation=options.clean_relation,
        own_relation=options.own_relation,
        window=window,
        window_anchor=options.window_anchor,
        corrupted=[row.position for row in table],
        copy=[row.copy for row in table],
        block=block,
    )
    assert torch.equal(dense(plan, window), want)
