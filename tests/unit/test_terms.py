"""Loss terms: the next-token term by hand, and what each term is divided by."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import default_collate

from megatron_bp.batch.dataset import SampleDataset
from megatron_bp.batch.shard import local_batch
from megatron_bp.data.document import Document
from megatron_bp.diffusion.corruption import Term, corrupt
from megatron_bp.diffusion.loss import LossSum, TermScales, divisors, term_scales
from megatron_bp.diffusion.objective import Objective
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, make_plan
from megatron_bp.training.reader import MicroBatch, StepReader
from megatron_bp.training.step import bytes_of_text

DIFFUSION = Objective(mask_token_id=98, vocabulary=99, seed=3)
BOTH = replace(DIFFUSION, diffusion_weight=0.3, ar_weight=0.7)
OPTIONS = SequenceOptions(4, clean_relation="token")


def document(tokens: list[int], prompt: int = 0, key: int = 0) -> Document:
    ids = np.array(tokens, dtype=np.int32)
    return Document(ids, np.arange(len(ids)) >= prompt, key)


def three_documents(padding: int = 2) -> Sample:
    """5 tokens of which 2 are a prompt, 1 token, 3 tokens, and padding."""
    texts = [document([10, 11, 12, 13, 14], prompt=2), document([20]), document([30, 31, 32])]
    return pack(texts, 9 + padding)


def terms_of(sample: Sample, objective: Objective = BOTH) -> tuple[Term, ...]:
    return corrupt(sample, make_plan(sample, OPTIONS), objective).terms


# --- the next-token term -------------------------------------------------------------------------


def test_next_token_labels_weights_and_counts_by_hand() -> None:
    sample = three_documents()
    diffusion, ar = terms_of(sample)
    assert (diffusion.name, diffusion.factor, ar.name, ar.factor) == ("diffusion", 0.3, "ar", 0.7)
    # row:          10  11  12  13  14  20  30  31  32  padding
    # predicts:      -  12  13  14   -   -  31  32   -
    scored = [False, True, True, True, False, False, True, True, False, False, False]
    assert ar.counted[:11].tolist() == scored
    assert ar.weights[:11].tolist() == [float(s) for s in scored]
    assert ar.labels[:11][scored].tolist() == [12, 13, 14, 31, 32]
    assert (ar.count, diffusion.count) == (5, 7)
    assert ar.weights.dtype == np.float32
    assert len(ar.labels) == len(ar.weights) == len(ar.counted) == len(diffusion.labels)
    assert not ar.counted[11:].any()  # a corrupted row predicts no next token
    assert not ar.weights[11:].any()
    assert diffusion.labels[11:].tolist() == [10, 11, 12, 13, 14, 20, 30, 31, 32]
    assert diffusion.counted[11:].tolist() == [False] * 2 + [True] * 7
    assert not diffusion.counted[:11].any()


def test_the_token_after_a_row_without_padding_is_none() -> None:
    _, ar = terms_of(three_documents(padding=0))
    assert ar.count == 5
    assert not ar.counted[8]


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        ([], 0),
        ([[1]], 0),
        ([[1], [2], [3]], 0),
        ([[1, 2]], 1),
        ([[1, 2], [3, 4]], 2),
    ],
)
def test_a_document_has_one_pair_less_than_tokens(texts: list[list[int]], count: int) -> None:
    sample = pack([document(text) for text in texts], 6)
    assert terms_of(sample)[1].count == count


def test_a_prompt_is_not_predicted_but_predicts_the_first_answer() -> None:
    sample = pack([document([1, 2, 3, 4], prompt=3)], 4)
    _, ar = terms_of(sample)
    assert ar.counted[:4].tolist() == [False, False, True, False]
    assert ar.labels[2] == 4


def test_unsupervised_tokens_between_supervised_ones_are_not_predicted() -> None:
    text = Document(np.arange(6, dtype=np.int32), np.array([1, 1, 0, 0, 1, 1], dtype=bool), 0)
    _, ar = terms_of(pack([text], 6))
    assert ar.counted[:6].tolist() == [True, False, False, True, True, False]


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        (DIFFUSION, ["diffusion"]),
        (BOTH, ["diffusion", "ar"]),
        (replace(BOTH, diffusion_weight=0.0), ["ar"]),
    ],
)
def test_a_term_of_factor_0_is_left_out(objective: Objective, names: list[str]) -> None:
    assert [term.name for term in terms_of(three_documents(), objective)] == names


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_each_count(ranks: int) -> None:
    sample = pack([document(list(range(29)), prompt=3), document(list(range(40, 51)), key=1)], 43)
    options = SequenceOptions(4, ranks, ranks, clean_relation="token", score_clean="supervised")
    plan = make_plan(sample, options)
    corruption = corrupt(sample, plan, BOTH)
    batches = [local_batch(sample, plan, corruption, rank) for rank in range(ranks)]
    for k, term in enumerate(corruption.terms):
        mine = [batch.terms[k] for batch in batches]
        assert sum(t.count for t in mine) == term.count
        assert {(t.name, t.factor) for t in mine} == {(term.name, term.factor)}
        total = sum(float(t.weights.sum()) for t in mine)
        assert total == pytest.approx(float(term.weights.sum()), rel=1e-6)
    assert [t.count for t in corruption.terms] == [37, 36]  # the prompt predicts the first answer
    scored = sum((t.weights != 0).sum().item() for b in batches for t in b.terms[1:])
    assert scored == 36


# --- counts and scales ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "factors", "reference", "scales"),
    [
        ([7], [0.3], 0, (0.3,)),
        ([0], [0.3], 0, (0.3,)),
        ([7, 5], [0.3, 0.7], 0, (0.3, 0.7 * 7 / 5)),
        ([0, 5], [0.3, 0.7], 1, (0.0, 0.7)),
        ([7, 0], [0.3, 0.7], 0, (0.3, 0.0)),
        ([0, 0], [0.3, 0.7], 0, (0.0, 0.0)),
        ([0, 2, 8], [1.0, 2.0, 4.0], 1, (0.0, 2.0, 1.0)),
    ],
)
def test_scales_by_hand(
    counts: list[int], factors: list[float], reference: int, scales: tuple[float, ...]
) -> None:
    got = term_scales(counts, factors, [False] * len(counts))
    assert got.reference == (reference,)
    assert got.scales == pytest.approx(scales, rel=1e-15)


@pytest.mark.parametrize(
    ("counts", "joint", "reference", "scales"),
    [
        ([7, 5], [True, True], (0, 1), (0.3, 0.7)),
        ([0, 5], [True, True], (0, 1), (0.3, 0.7)),
        ([0, 0], [True, True], (0, 1), (0.0, 0.0)),
        ([7, 5], [True, False], (0,), (0.3, 0.7 * 7 / 5)),
        ([7], [True], (0,), (0.3,)),
    ],
)
def test_joint_terms_share_one_count(
    counts: list[int], joint: list[bool], reference: tuple[int, ...], scales: tuple[float, ...]
) -> None:
    got = term_scales(counts, [0.3, 0.7][: len(counts)], joint)
    assert got.reference == reference
    assert got.scales == pytest.approx(scales, rel=1e-15)
    if all(joint):
        assert divisors(counts, joint) == [sum(counts)] * len(counts)


def total_of(
    sums: list[float], counts: list[int], factors: list[float], joint: bool = False
) -> float:
    """What Megatron makes of scaled sums and the reference's count."""
    scales = term_scales(counts, factors, [joint] * len(counts))
    scaled = sum(s * x for s, x in zip(scales.scales, sums, strict=True))
    reference = sum(counts[k] for k in scales.reference)
    loss = LossSum(torch.tensor(scaled, dtype=torch.float64), reference)
    total, count = loss.for_megatron()
    return float(total / count.clamp(min=1))


def test_the_total_is_the_sum_of_terms_each_over_its_own_count() -> None:
    assert total_of([14.0, 20.0], [7, 5], [0.3, 0.7]) == pytest.approx(0.3 * 2 + 0.7 * 4)
    assert total_of([0.0, 20.0], [0, 5], [0.3, 0.7]) == pytest.approx(0.7 * 4)
    assert total_of([14.0, 0.0], [7, 0], [0.3, 0.7]) == pytest.approx(0.3 * 2)
    assert total_of([0.0, 0.0], [0, 0], [0.3, 0.7]) == 0.0
    assert total_of([14.0, 20.0], [7, 5], [0.3, 1.0], joint=True) == pytest.approx(24.2 / 12)
    assert total_of([0.0, 20.0], [0, 5], [0.3, 1.0], joint=True) == pytest.approx(4.0)
    assert total_of([0.0, 0.0], [0, 0], [0.3, 1.0], joint=True) == 0.0


def test_case_10_the_next_token_term_is_divided_by_its_own_pairs() -> None:
    """With CE = 1 everywhere its loss is 1, whatever the other term counts.

    All pairs of the chat are 30,000 + 512 - 1; those of supervised tokens happen to be 512.
    """
    chat = pack([document([1] * 30_000 + [2] * 512, prompt=30_000)], 30_512)
    for ar_scored, pairs in (("all", 30_511), ("supervised", 512)):
        diffusion, ar = terms_of(chat, replace(BOTH, ar_scored=ar_scored))
        assert (diffusion.count, ar.count) == (512, pairs)
        sums = [0.0, float(ar.weights.sum())]
        assert total_of(sums, [diffusion.count, ar.count], [0.3, 1.0]) == pytest.approx(1.0)


# --- the reader ----------------------------------------------------------------------------------

LENGTH = 12


class Texts:
    """Sample i holds one document of 3 + i tokens with i % 3 of prompt, and one of 2 tokens."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        assert idx is not None
        long = document(list(range(3 + idx)), prompt=idx % 3, key=10 * idx)
        return {"documents": (long, document([5, 6], key=10 * idx + 1))}


COUNTS = [(5 + i - i % 3, 3 + i - max(0, i % 3 - 1)) for i in range(8)]  # by hand, a sample


class Counting:
    """The collated samples, and how many were read."""

    def __init__(self, first: int = 0, step: int = 1) -> None:
        self.read = 0
        self._next, self._step = first, step
        self._samples = SampleDataset(Texts(), LENGTH, 0)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        batch = default_collate([self._samples[self._next % 8]])
        self._next += self._step
        self.read += 1
        return batch


def first_keys(micro: list[MicroBatch]) -> list[int]:
    return [int(m.sample.document_keys[0]) // 10 for m in micro]


CPU = torch.device("cpu")


def test_counts_of_the_samples_by_hand() -> None:
    for i, counts in enumerate(COUNTS):
        sample = pack(Texts()[i]["documents"], LENGTH)
        assert tuple(term.count for term in terms_of(sample)) == counts


def test_a_single_term_needs_no_group_and_reads_a_step_at_once() -> None:
    reader, source = StepReader(OPTIONS, DIFFUSION), Counting()
    got, read = [], []
    for _ in range(6):
        got.append(reader.take(source, 3, None, CPU))  # type: ignore[arg-type]
        read.append(source.read)
    assert read == [3, 3, 3, 6, 6, 6]
    assert first_keys(got) == [0, 1, 2, 3, 4, 5]
    assert {m.scales for m in got} == {TermScales((0,), (1.0,))}


@pytest.mark.parametrize("copies", [1, 3])
def test_bits_per_byte_do_not_depend_on_the_number_of_copies(copies: int) -> None:
    """Sum and count have every copy; so must the bytes that they are set against."""
    text = replace(document(list(range(8))), bytes=24.0)
    batch = default_collate([SampleDataset(Just(text), 8, 0)[0]])
    options = replace(OPTIONS, copies=copies)
    micro = StepReader(options, DIFFUSION).take(iter([batch]), 1, None, CPU)  # type: ignore[arg-type]
    assert micro.corruption.terms[0].count == 8 * copies
    assert bytes_of_text(micro) == 24 * copies


class Just:
    """One sample of one document."""

    def __init__(self, text: Document) -> None:
        self.text = text

    def __len__(self) -> int:
        return 1

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        return {"documents": (self.text,)}


def test_iterators_do_not_mix() -> None:
    reader = StepReader(OPTIONS, DIFFUSION)
    train, validation = Counting(), Counting(first=5)
    order = [(train, 3), (validation, 2), (train, 3), (validation, 2), (train, 3), (validation, 2)]
    got = [reader.take(source, n, None, CPU) for source, n in order]  # type: ignore[arg-type]
    assert first_keys(got) == [0, 5, 1, 6, 2, 7]


def read_on_rank(rank: int, world: int, micro_batches: int) -> list[dict[str, Any]]:
    """Two steps of a data-parallel rank."""
    reader, source = StepReader(OPTIONS, BOTH), Counting(rank, world)
    out = []
    for _ in range(2 * micro_batches):
        micro = reader.take(source, micro_batches, dist.group.WORLD, CPU)
        out.append({"keys": first_keys([micro]), "scales": micro.scales, "read": source.read})
    return out


@pytest.mark.ranks
def test_scales_are_those_of_the_whole_step_on_any_number_of_ranks() -> None:
    (one,) = run_ranks(1, read_on_rank, 4)
    two = run_ranks(2, read_on_rank, 2)
    assert [m["read"] for m in one] == [4] * 4 + [8] * 4
    assert [m["read"] for m in two[0]] == [2] * 2 + [4] * 2
    for step in range(2):
        samples = range(4 * step, 4 * step + 4)
        diffusion, ar = (sum(COUNTS[i][k] for i in samples) for k in (0, 1))
        want = TermScales((0,), (0.3, 0.7 * diffusion / ar))
        assert diffusion != ar
        for rank in [one, *two]:
            n = len(rank) // 2
            for micro in rank[n * step : n * (step + 1)]:
                assert micro["scales"].reference == want.reference
                assert micro["scales"].scales == pytest.approx(want.scales, rel=1e-15)
    assert sorted(key for rank in two for m in rank[:2] for key in m["keys"]) == [0, 1, 2, 3]


def rerun_on_rank(rank: int, world: int) -> tuple[list[int], list[TermScales], list[TermScales]]:
    """A step, the same step again after a rewind, and the next."""
    from megatron.core.rerun_state_machine import (
        RerunDataIterator,
        RerunMode,
        initialize_rerun_state_machine,
    )

    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    reader, iterator = StepReader(OPTIONS, BOTH), RerunDataIterator(Counting(rank, world))

    def step() -> list[MicroBatch]:
        return [reader.take(iterator, 2, dist.group.WORLD, CPU) for _ in range(2)]

    first = step()
    iterator.rewind()
    again = step()
    iterator.advance()
    third = step()
    for a, b in zip(first, again, strict=True):
        assert a.corruption.tokens.tobytes() == b.corruption.tokens.tobytes()
    scales = [[m.scales for m in micro] for micro in (first, again)]
    return first_keys(first + again + third), scales[0], scales[1]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_is_run_again_is_read_again(ranks: int) -> None:
    for rank, (keys, first, again) in enumerate(run_ranks(ranks, rerun_on_rank)):
        own = [rank + ranks * i for i in range(4)]
        assert keys == [*own[:2], *own[:2], *own[2:]]
        assert first == again


def empty_on_rank(rank: int, world: int) -> TermScales:
    """Rank 1's only sample is padding."""
    sample = SampleDataset(Texts(), LENGTH, 0)[0]
    if rank == 1:
        sample |= {"document": np.full(LENGTH, -1, np.int32), "supervised": np.zeros(LENGTH, bool)}
        sample |= {"document_keys": np.zeros(0, np.int64), "document_bytes": np.zeros(0)}
    reader = StepReader(OPTIONS, BOTH)
    return reader.take(iter([default_collate([sample])]), 1, dist.group.WORLD, CPU).scales


@pytest.mark.ranks
def test_a_rank_with_nothing_takes_part_and_gets_the_same_scales() -> None:
    one, two = run_ranks(2, empty_on_rank)
    assert one == two == TermScales((0,), (0.3, 0.7 * 5 / 3))
