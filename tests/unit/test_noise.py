"""Noise and corruption: what chance depends on, what is masked, what it weighs."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from cases import CASES, Case, sample_of
from numpy.typing import NDArray

from megatron_bp.data.document import Document
from megatron_bp.diffusion import corruption, levels
from megatron_bp.diffusion.corruption import Corruption, corrupt
from megatron_bp.diffusion.noise import NoiseKey, Purpose, uniform
from megatron_bp.diffusion.objective import Objective
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, make_plan
from megatron_bp.sequence.visibility import corrupted_positions

KEY = NoiseKey(seed=1234, split=0, epoch=0, document=7, copy=0)
MASK_ID = 50
OBJECTIVE = Objective(mask_token_id=MASK_ID, vocabulary=51, seed=3)
TRAIN, VALIDATION = 0, 1
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def ks_distance(draws: NDArray[np.float64]) -> float:
    """Kolmogorov-Smirnov distance from the uniform distribution on [0, 1), times sqrt(n)."""
    n, ordered = len(draws), np.sort(draws)
    above = np.arange(1, n + 1) / n - ordered
    return float(max(above.max(), (1 / n - above).max()) * np.sqrt(n))


def noised(case: Case, objective: Objective = OBJECTIVE, ranks: int = 1) -> Corruption:
    sample = sample_of(case)
    return corrupt(sample, make_plan(sample, options(case, ranks)), objective)


def options(case: Case, ranks: int = 1) -> SequenceOptions:
    return SequenceOptions(case.block_size, ranks, ranks)


def corrupt_documents(
    documents: Sequence[Document],
    objective: Objective = OBJECTIVE,
    block_size: int = 4,
    split: int = TRAIN,
    epoch: int = 0,
) -> tuple[Sample, NDArray[np.int32], Corruption]:
    """The documents packed in one row, the position of each corrupted row, the corruption."""
    sample = pack(documents, sum(len(d.tokens) for d in documents), split, epoch)
    plan = make_plan(sample, SequenceOptions(block_size))
    return sample, corrupted_positions(plan), corrupt(sample, plan, objective)


def document(length: int, key: int = 7, prompt: int = 0) -> Document:
    """Tokens below the mask id; the first `prompt` of them are not supervised."""
    tokens = np.random.default_rng(key).integers(0, MASK_ID, length).astype(np.int32)
    return Document(tokens, np.arange(length) >= prompt, key)


def scores(result: Corruption) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.float32]]:
    """(was it masked, label, weight) of each corrupted row."""
    (term,) = result.terms
    first = len(term.labels) - len(result.tokens)
    assert (result.corrupted == (result.tokens == MASK_ID)).all()
    return result.corrupted, term.labels[first:], term.weights[first:]


def count(result: Corruption) -> int:
    (term,) = result.terms
    assert term.name == "diffusion"
    return term.count


# --- draws ---------------------------------------------------------------------------------------


def test_a_draw_is_the_same_in_whatever_range_it_is_asked_for() -> None:
    whole = uniform(KEY, Purpose.MASK, 0, 40)
    for start in range(20):
        for stop in range(start, 40):
            assert np.array_equal(uniform(KEY, Purpose.MASK, start, stop), whole[start:stop])


@pytest.mark.parametrize(
    "change",
    [{"seed": 1235}, {"split": 1}, {"epoch": 1}, {"document": 8}, {"copy": 1}],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("purpose", Purpose)
def test_streams_of_different_keys_share_no_draw(purpose: Purpose, change: dict[str, int]) -> None:
    one, other = uniform(KEY, purpose, 0, 10**4), uniform(replace(KEY, **change), purpose, 0, 10**4)
    assert len(np.intersect1d(one, other)) == 0
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.04  # four standard deviations


def test_streams_of_different_purposes_share_no_draw() -> None:
    for one, other in combinations(Purpose, 2):
        draws = uniform(KEY, one, 0, 10**4), uniform(KEY, other, 0, 10**4)
        assert len(np.intersect1d(*draws)) == 0
        assert abs(np.corrcoef(*draws)[0, 1]) < 0.04


def test_no_two_fields_of_a_key_can_be_exchanged() -> None:
    names = ("seed", "split", "epoch", "document", "copy")
    keys = [NoiseKey(**{name: 2 if name == other else 1 for name in names}) for other in names]
    streams = [tuple(uniform(key, purpose, 0, 4)) for key in keys for purpose in Purpose]
    assert len(set(streams)) == len(streams) == 5 * len(Purpose)


def test_large_and_negative_fields_make_streams_of_their_own() -> None:
    values = [0, 1, -1, 2**31, 2**32, 2**62, -(2**63), 2**63 - 1]
    for name in ("seed", "document"):
        streams = {tuple(uniform(replace(KEY, **{name: v}), Purpose.MASK, 0, 4)) for v in values}
        assert len(streams) == len(values)


@pytest.mark.parametrize("purpose", Purpose)
def test_draws_are_uniform_along_a_stream(purpose: Purpose) -> None:
    draws = uniform(KEY, purpose, 0, 10**5)
    assert draws.dtype == np.float64
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    assert ks_distance(draws) < 1.95  # a thousandth of all keys would be above
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 4 / np.sqrt(10**5)


def test_first_draws_are_uniform_over_documents() -> None:
    draws = [uniform(replace(KEY, document=i), Purpose.LEVEL, 0, 1)[0] for i in range(10**4)]
    assert ks_distance(np.array(draws)) < 1.95


@pytest.mark.parametrize(
    ("key", "purpose", "draws"),
    [
        (KEY, Purpose.LEVEL, [0.9024777001180888, 0.06555083932171824, 0.9847465836717398]),
        (KEY, Purpose.MASK, [0.16789785902532695, 0.8256620807929378, 0.5641283808602325]),
        (
            NoiseKey(seed=1234, split=1, epoch=2, document=-5, copy=1),
            Purpose.MASK,
            [0.3028243950399021, 0.8634403355847678, 0.8133228328974053],
        ),
        (
            NoiseKey(seed=2**40, split=2, epoch=9, document=3 << 24 | 5, copy=0),
            Purpose.LEVEL,
            [0.3221210368108398, 0.8004035598261143, 0.8999498068525295],
        ),
    ],
)
def test_draws_never_change(key: NoiseKey, purpose: Purpose, draws: list[float]) -> None:
    """Golden numbers, computed by a second Philox 4x64-10: a change breaks resuming a run."""
    assert uniform(key, purpose, 0, 3).tolist() == draws


# --- what a corruption depends on ----------------------------------------------------------------


def test_a_corruption_never_changes() -> None:
    """Golden numbers, from the second Philox: t = a + (1 - draw of the level) (b - a)."""
    _, _, result = corrupt_documents([document(8)])
    masked, _, weights = scores(result)
    assert result.p.tolist() == [0.8392470479011536] * 4 + [0.17786778509616852] * 4
    assert masked.tolist() == [True] * 7 + [False]
    assert weights.tolist() == (masked / result.p).tolist()


@every_case
def test_packed_equals_unpacked(case: Case) -> None:
    sample = sample_of(case)
    plan = make_plan(sample, options(case))
    packed, at = corrupt(sample, plan, OBJECTIVE), corrupted_positions(plan)
    masked, labels, weights = scores(packed)
    total = 0
    for ordinal, key in enumerate(sample.document_keys):
        here = sample.document == ordinal
        alone = Document(sample.tokens[here], sample.supervised[here], int(key))
        _, _, want = corrupt_documents([alone], block_size=case.block_size)
        rows = sample.document[at] == ordinal
        assert packed.tokens[rows].tolist() == want.tokens.tolist()
        assert packed.p[rows].tobytes() == want.p.tobytes()
        for got, expected in zip((masked, labels, weights), scores(want), strict=True):
            assert got[rows].tobytes() == expected.tobytes()
        total += count(want)
    assert count(packed) == total


def test_a_document_with_its_start_unscored_keeps_the_noise_of_the_rest() -> None:
    whole, tail = document(40), document(40, prompt=13)
    _, _, full = corrupt_documents([whole])
    _, at, part = corrupt_documents([tail])
    assert at.tolist() == [*range(12, 40)]  # the block of token 12 holds a supervised one
    assert part.p.tobytes() == full.p[12:].tobytes()
    assert part.tokens[1:].tolist() == full.tokens[13:].tolist()


@pytest.mark.parametrize("ranks", [2, 4])
@every_case
def test_corruption_is_the_same_on_any_number_of_ranks(case: Case, ranks: int) -> None:
    one, several = noised(case), noised(case, ranks=ranks)
    for name in ("tokens", "p", "corrupted"):
        assert getattr(one, name).tobytes() == getattr(several, name).tobytes()
    for name in ("labels", "weights", "counted"):
        a, b = (getattr(result.terms[0], name) for result in (one, several))
        assert a.tobytes() == b.tobytes()
    assert count(one) == count(several)


@pytest.mark.parametrize("change", ["seed", "split", "epoch", "key"])
def test_each_part_of_the_key_changes_levels_and_masks(change: str) -> None:
    objective = replace(OBJECTIVE, interval=(0.0, 1.0))
    _, _, one = corrupt_documents([document(400)], objective)
    text = document(400)
    if change == "key":
        text = Document(text.tokens, text.supervised, 8)
    _, _, other = corrupt_documents(
        [text],
        replace(objective, seed=4) if change == "seed" else objective,
        split=VALIDATION if change == "split" else TRAIN,
        epoch=1 if change == "epoch" else 0,
    )
    assert not np.isin(one.p, other.p).any()
    assert (scores(one)[0] != scores(other)[0]).mean() > 0.3


# --- what is masked, and what it weighs ----------------------------------------------------------


def test_only_supervised_tokens_are_masked_scored_and_counted() -> None:
    texts = [document(50, key, prompt=key % 9) for key in range(40)]
    sample, at, result = corrupt_documents(texts)
    masked, _, weights = scores(result)
    supervised = sample.supervised[at]
    assert (~supervised).sum() > 50  # prompts that end inside a block
    assert not masked[~supervised].any()
    assert not weights[~supervised].any()
    assert 0.4 < masked[supervised].mean() < 0.6
    assert count(result) == sample.supervised.sum() == supervised.sum()


def test_a_token_is_masked_with_the_probability_of_its_block() -> None:
    _, _, result = corrupt_documents([document(10**4, key) for key in range(4)], block_size=100)
    share = scores(result)[0].reshape(400, 100).mean(axis=1)
    p = result.p.reshape(400, 100)[:, 0]
    deviations = (share - p) / np.sqrt(np.maximum(p * (1 - p), 1e-4) / 100)
    assert abs(deviations).max() < 5
    assert abs(deviations.mean()) < 4 / np.sqrt(400)


def test_tokens_of_a_block_are_masked_independently() -> None:
    objective = replace(OBJECTIVE, interval=(0.4999, 0.5))
    _, _, result = corrupt_documents([document(4 * 10**4)], objective)
    masked = scores(result)[0].reshape(10**4, 4)
    patterns = np.bincount(masked @ [1, 2, 4, 8], minlength=16)
    assert abs(patterns - 625).max() < 5 * np.sqrt(625)


def test_a_row_that_is_not_masked_holds_its_token_and_weighs_nothing() -> None:
    sample, at, result = corrupt_documents([document(200), document(101, key=8)])
    masked, labels, weights = scores(result)
    truth = sample.tokens[at]
    assert result.tokens[~masked].tolist() == truth[~masked].tolist()
    assert labels.tolist() == truth.tolist()
    assert (weights != 0).tolist() == masked.tolist()
    assert 0 < masked.sum() < len(masked)


def test_clean_rows_are_not_scored() -> None:
    sample, _, result = corrupt_documents([document(60)])
    (term,) = result.terms
    assert len(term.weights) == len(term.labels) == len(term.counted) == 60 + len(result.tokens)
    assert not term.weights[: len(sample.tokens)].any()
    assert not term.counted[: len(sample.tokens)].any()


@pytest.mark.parametrize("weighting", ["bound", "one"])
def test_weight_of_a_masked_token(weighting: str) -> None:
    objective = replace(OBJECTIVE, weighting=weighting)
    assert objective.is_bound == (weighting == "bound")
    _, _, result = corrupt_documents([document(400)], objective)
    masked, _, weights = scores(result)
    want = 1 / result.p[masked] if weighting == "bound" else np.ones_like(result.p[masked])
    assert weights.dtype == np.float32
    assert weights[masked].tolist() == want.tolist()


# --- the noise level -----------------------------------------------------------------------------


@every_case
def test_level_is_one_number_a_block(case: Case) -> None:
    sample = sample_of(case)
    plan = make_plan(sample, options(case))
    result = corrupt(sample, plan, OBJECTIVE)
    block = plan.block_of[corrupted_positions(plan)]
    found = {(int(b), float(p)) for b, p in zip(block, result.p, strict=True)}
    assert len(found) == len(plan.units)
    assert len({p for _, p in found}) == len(plan.units)


def test_levels_of_the_blocks_of_one_document_are_uniform() -> None:
    """One level a document would give a single number here."""
    objective = replace(OBJECTIVE, interval=(0.2, 0.7))
    _, _, result = corrupt_documents([document(4 * 10**4)], objective)
    t = result.p.astype(np.float64)[::4]
    assert ks_distance((t - 0.2) / 0.5) < 1.95
    assert abs(np.corrcoef(t[:-1], t[1:])[0, 1]) < 0.04


def test_training_levels_keep_to_the_interval() -> None:
    objective = replace(OBJECTIVE, interval=(0.3, 0.4))
    _, _, result = corrupt_documents([document(4000)], objective)
    assert 0.3 <= result.p.min() < 0.301
    assert 0.399 < result.p.max() <= np.float32(0.4)


@pytest.mark.parametrize("split", [1, 2])
def test_evaluation_draws_levels_from_all_of_0_to_1(split: int) -> None:
    objective = replace(OBJECTIVE, interval=(0.3, 0.4))
    _, _, result = corrupt_documents([document(4 * 10**4)], objective, split=split)
    assert result.p.min() > 0.0
    assert result.p.max() <= 1.0
    assert ks_distance(result.p.astype(np.float64)[::4]) < 1.95


@pytest.mark.parametrize("interval", [(0.0, 1.0), (1e-3, 1.0), (0.3, 0.4)])
@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-53])
def test_extreme_draws_keep_the_level_in_the_interval(
    monkeypatch: pytest.MonkeyPatch, draw: float, interval: tuple[float, float]
) -> None:
    asked = []

    def extreme(key: NoiseKey, purpose: Purpose, start: int, stop: int) -> NDArray[np.float64]:
        asked.append(purpose)
        return np.full(stop - start, draw)

    monkeypatch.setattr(corruption, "uniform", extreme)
    monkeypatch.setattr(levels, "uniform", extreme)
    _, _, result = corrupt_documents([document(8)], replace(OBJECTIVE, interval=interval))
    assert set(asked) == {Purpose.LEVEL, Purpose.MASK}
    assert (result.p > 0.0).all()
    assert (result.p >= np.float32(interval[0])).all()
    assert (result.p <= np.float32(interval[1])).all()
    assert np.isfinite(result.terms[0].weights).all()


def test_padding_is_no_text_that_holds_the_mask() -> None:
    text = Document(np.array([5, 6, 7], dtype=np.int32), np.ones(3, dtype=bool), 42)
    for length in (3, 4):
        sample = pack([text], length)
        plan = make_plan(sample, SequenceOptions(4))
        assert corrupt(sample, plan, Objective(0, 9, 1)).tokens.shape == (3,)
    with pytest.raises(ValueError, match="id 7 stands in the document with key 42"):
        corrupt(sample, plan, Objective(7, 9, 1))


# --- objectives.md section 5, case 4: CE = 1 everywhere ------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.001])
def test_weights_sum_to_the_supervised_tokens_whatever_the_level(p: float) -> None:
    """A count of masked tokens would give 1 / p instead."""
    objective = replace(OBJECTIVE, interval=(p * (1 - 1e-9), p))
    texts = [document(250, key) for key in range(800)]
    _, _, result = corrupt_documents(texts, objective)
    masked = int(scores(result)[0].sum())
    loss = float(scores(result)[2].sum(dtype=np.float64)) / count(result)
    assert count(result) == 200_000
    assert loss == pytest.approx(masked / (p * 200_000), rel=1e-6)
    assert abs(loss - 1.0) < 4 * np.sqrt((1 - p) / (p * 200_000))


def test_weights_sum_to_the_supervised_tokens_over_all_levels() -> None:
    objective = replace(OBJECTIVE, interval=(0.05, 1.0))
    _, _, result = corrupt_documents([document(4 * 10**4, key) for key in range(5)], objective)
    loss = float(scores(result)[2].sum(dtype=np.float64)) / count(result)
    variance = np.log(1 / 0.05) / 0.95 - 1  # of weight x masked: the mean of 1/t, less 1
    assert abs(loss - 1.0) < 4 * np.sqrt(variance / 200_000)


# --- what no objective can be made of ------------------------------------------------------------


@pytest.mark.parametrize("interval", [(-0.1, 1.0), (0.5, 0.5), (0.6, 0.4), (0.0, 1.1)])
def test_a_wrong_noise_interval_is_refused(interval: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="--noise-interval"):
        replace(OBJECTIVE, interval=interval)


@pytest.mark.parametrize("mask_id", [-1, 51])
def test_a_mask_id_outside_the_true_vocabulary_is_refused(mask_id: int) -> None:
    with pytest.raises(ValueError, match="--mask-token-id"):
        replace(OBJECTIVE, mask_token_id=mask_id)
