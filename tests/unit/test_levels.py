"""Noise levels, their schedules and weights, and what a token becomes under uniform noise."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_bp.data.document import Document
from megatron_bp.diffusion.corruption import Corruption, corrupt
from megatron_bp.diffusion.levels import levels, probability
from megatron_bp.diffusion.noise import NoiseKey
from megatron_bp.diffusion.objective import Objective
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.sequence.visibility import corrupted_positions

VOCABULARY = 51
MASK_ID, EOD_ID = 50, 49
OBJECTIVE = Objective(mask_token_id=MASK_ID, vocabulary=VOCABULARY, seed=3)
ANTITHETIC = replace(OBJECTIVE, antithetic=True)
PER_DOCUMENT = replace(OBJECTIVE, noise_per="document")
TRAIN, VALIDATION, TEST = 0, 1, 2
KEY = NoiseKey(seed=3, split=0, epoch=0, document=7, copy=0)
SPREADS = pytest.mark.parametrize(
    "objective",
    [OBJECTIVE, PER_DOCUMENT, ANTITHETIC],
    ids=["per block", "per document", "antithetic"],
)


def ks_distance(draws: NDArray[np.float64]) -> float:
    """Kolmogorov-Smirnov distance from the uniform distribution on [0, 1), times sqrt(n)."""
    n, ordered = len(draws), np.sort(draws)
    above = np.arange(1, n + 1) / n - ordered
    return float(max(above.max(), (1 / n - above).max()) * np.sqrt(n))


def document(length: int, key: int = 7, prompt: int = 0) -> Document:
    """Tokens below the mask and end ids; the first `prompt` of them are not supervised."""
    tokens = np.random.default_rng(key).integers(0, EOD_ID, length).astype(np.int32)
    return Document(tokens, np.arange(length) >= prompt, key)


def noised(
    documents: Sequence[Document],
    objective: Objective,
    block_size: int = 4,
    split: int = TRAIN,
    ranks: int = 1,
) -> tuple[Sample, SequencePlan, Corruption]:
    sample = pack(documents, sum(len(d.tokens) for d in documents), split)
    plan = make_plan(sample, SequenceOptions(block_size, ranks, ranks))
    return sample, plan, corrupt(sample, plan, objective)


def loss(result: Corruption, ce: NDArray[np.float64]) -> float:
    """The diffusion loss where the cross-entropy of each corrupted row is `ce`."""
    (term,) = result.terms
    weights = term.weights[len(term.weights) - len(ce) :].astype(np.float64)
    return float((weights * ce).sum()) / term.count


# --- schedules -----------------------------------------------------------------------------------


def test_linear_is_the_level_itself() -> None:
    t = np.linspace(0.001, 1, 50)
    p, slope = probability(t, "linear")
    assert p.tolist() == t.tolist()
    assert slope.tolist() == [1.0] * 50


def test_cosine_is_its_formula_and_exact_where_the_formula_cancels() -> None:
    t = np.linspace(0.01, 1, 100)
    np.testing.assert_allclose(probability(t, "cosine")[0], 1 - np.cos(np.pi / 2 * t), rtol=1e-11)
    tiny = np.array([1e-3, 1e-6, 1e-9, 2.0**-53])
    x = np.pi / 2 * tiny
    np.testing.assert_allclose(probability(tiny, "cosine")[0], x**2 / 2 - x**4 / 24, rtol=1e-12)
    assert probability(np.array([1.0]), "cosine")[0].astype(np.float32).item() == 1.0


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_slope_is_that_of_the_probability(schedule: str) -> None:
    t, h = np.linspace(0.01, 0.99, 99), 1e-6
    up, down = (probability(t + s, schedule)[0] for s in (h, -h))
    np.testing.assert_allclose(probability(t, schedule)[1], (up - down) / (2 * h), rtol=1e-7)


# --- objectives.md section 5, case 11: CE = 1 + p under the cosine schedule ----------------------


def expected(weighting: str, low: float, high: float = 1.0, n: int = 200_000) -> float:
    """Mean over t of p x weight x (1 + p), by the midpoint rule."""
    t = low + (np.arange(n) + 0.5) / n * (high - low)
    p, slope = probability(t, "cosine")
    return float((p * {"bound": slope / p, "inverse_p": 1 / p}[weighting] * (1 + p)).mean())


def test_case_11_by_quadrature() -> None:
    assert expected("bound", 0.0) == pytest.approx(1.5, abs=1e-6)
    assert expected("inverse_p", 0.0) == pytest.approx(1.363, abs=4e-4)
    assert expected("inverse_p", 0.0) == pytest.approx(2 - 2 / np.pi, abs=1e-6)


@pytest.mark.parametrize(
    ("weighting", "split", "low", "want"),
    [
        ("bound", VALIDATION, 0.0, 1.5),
        ("bound", TRAIN, 0.2, expected("bound", 0.2)),
        ("inverse_p", TRAIN, 0.2, expected("inverse_p", 0.2)),  # from 0 its variance is infinite
    ],
)
def test_case_11_by_what_corrupt_draws(weighting: str, split: int, low: float, want: float) -> None:
    objective = replace(
        OBJECTIVE, schedule="cosine", weighting=weighting, interval=(low or 1e-3, 1.0)
    )
    losses = []
    for key in range(200):
        _, _, result = noised([document(1000, key)], objective, block_size=1, split=split)
        losses.append(loss(result, 1 + result.p.astype(np.float64)))
    error = np.std(losses) / np.sqrt(len(losses))
    assert error < 0.01
    assert abs(np.mean(losses) - want) < 4 * error


@pytest.mark.parametrize("weighting", ["bound", "one", "inverse_p"])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_weight_of_each_corrupted_token(schedule: str, weighting: str) -> None:
    objective = replace(OBJECTIVE, schedule=schedule, weighting=weighting)
    _, _, result = noised([document(400)], objective)
    p = result.p.astype(np.float64)
    slope = 1.0 if schedule == "linear" else np.pi / 2 * np.sqrt(1 - (1 - p) ** 2)  # sin of arccos
    want = {"bound": slope / p, "one": np.ones_like(p), "inverse_p": 1 / p}[weighting]
    got = result.terms[0].weights[400:]
    np.testing.assert_allclose(got, np.where(result.corrupted, want, 0), rtol=1e-5)


# --- what shares a level -------------------------------------------------------------------------


def test_per_document_has_one_level_a_document() -> None:
    texts = [document(37, key) for key in range(300)]
    sample, plan, result = noised(texts, PER_DOCUMENT)
    of_row = sample.document[corrupted_positions(plan)]
    found = [set(result.p[of_row == d].tolist()) for d in range(300)]
    assert {len(levels_of_one) for levels_of_one in found} == {1}
    p = np.array([p for one in found for p in one])
    assert len(np.unique(p)) == 300
    assert ks_distance((p - 1e-3) / (1 - 1e-3)) < 1.95


@SPREADS
@pytest.mark.parametrize("noise", ["absorbing", "uniform"])
def test_packed_equals_alone_on_any_number_of_ranks(objective: Objective, noise: str) -> None:
    objective = replace(objective, noise=noise)
    texts = [document(length, key) for key, length in enumerate((5, 16, 1, 30))]
    sample, plan, packed = noised(texts, objective)
    of_row = sample.document[corrupted_positions(plan)]
    for ordinal, text in enumerate(texts):
        rows = of_row == ordinal
        for ranks in (1, 4):
            _, _, alone = noised([text], objective, ranks=ranks)
            assert packed.tokens[rows].tolist() == alone.tokens.tolist()
            assert packed.p[rows].tobytes() == alone.p.tobytes()
            assert packed.corrupted[rows].tobytes() == alone.corrupted.tobytes()


@SPREADS
def test_levels_depend_on_the_document_and_not_on_what_of_it_is_computed(
    objective: Objective,
) -> None:
    _, _, whole = noised([document(40)], objective)
    _, _, part = noised([document(40, prompt=24)], objective)
    assert part.p.tobytes() == whole.p[24:].tobytes()


@SPREADS
def test_levels_depend_on_every_part_of_the_key(objective: Objective) -> None:
    changes = [{}, {"seed": 4}, {"split": 1}, {"epoch": 1}, {"document": 8}, {"copy": 1}]
    found = [levels(replace(KEY, **change), 8, objective, (0.0, 1.0)) for change in changes]
    assert len({t for one in found for t in one.tolist()}) == sum(len(set(one)) for one in found)
    again = levels(KEY, 8, objective, (0.0, 1.0))
    assert again.tobytes() == found[0].tobytes()


@SPREADS
@pytest.mark.parametrize("interval", [(0.3, 0.4), (0.0, 1.0), (1e-3, 1.0)])
def test_levels_fill_the_interval_of_training(
    objective: Objective, interval: tuple[float, float]
) -> None:
    low, high = interval
    keys = [replace(KEY, document=number) for number in range(4000)]
    first = np.array([levels(key, 5, objective, interval) for key in keys])
    assert first.min() > low
    assert first.max() <= high
    for block in range(5):  # whatever is shared, each block's own level is uniform
        assert ks_distance((first[:, block] - low) / (high - low)) < 1.95


@SPREADS
@pytest.mark.parametrize("split", [VALIDATION, TEST])
def test_evaluation_levels_fill_0_to_1(objective: Objective, split: int) -> None:
    objective = replace(objective, interval=(0.3, 0.4))
    texts = [document(4, key) for key in range(4000)]
    _, _, result = noised(texts, objective, split=split)
    p = result.p[::4].astype(np.float64)
    assert p.min() > 0.0
    assert p.max() <= 1.0
    assert ks_distance(p) < 1.95


# --- antithetic levels ---------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 2, 7, 64])
def test_antithetic_levels_hit_each_of_n_equal_bins_once(blocks: int) -> None:
    low, high = interval = (0.2, 0.7)
    for number in range(50):
        t = levels(replace(KEY, document=number), blocks, ANTITHETIC, interval)
        place = (t - low) / (high - low)
        bins = np.ceil(place * blocks).astype(int)  # (a, b] in N half-open parts
        assert sorted(bins.tolist()) == list(range(1, blocks + 1))
        gaps = np.diff(np.sort(place))
        np.testing.assert_allclose(gaps, np.full(blocks - 1, 1 / blocks), rtol=0, atol=1e-12)


def test_antithetic_levels_are_not_tied_to_position() -> None:
    """Every order of 4 blocks is as likely as every other."""
    keys = [replace(KEY, document=number) for number in range(4800)]
    orders = [tuple(np.argsort(levels(key, 4, ANTITHETIC, (0.0, 1.0)))) for key in keys]
    assert len(set(orders)) == 24
    counts = np.array([orders.count(order) for order in set(orders)])
    assert abs(counts - 200).max() < 5 * np.sqrt(200)


def test_antithetic_levels_of_documents_differ() -> None:
    keys = [replace(KEY, document=number) for number in range(500)]
    found = np.array([levels(key, 8, ANTITHETIC, (0.0, 1.0)) for key in keys])
    assert len(np.unique(found)) == found.size
    shifts = found.min(axis=1) * 8
    assert ks_distance(shifts) < 1.95


def test_antithetic_levels_make_a_mean_over_a_document_vary_less() -> None:
    texts = [document(64, key) for key in range(400)]
    spread = []
    for objective in (OBJECTIVE, ANTITHETIC):
        means = [noised([text], objective)[2].p.mean() for text in texts]
        spread.append(np.std(means))
    assert spread[1] < spread[0] / 3


# --- uniform noise -------------------------------------------------------------------------------


def uniform_rows(
    interval: tuple[float, float] = (1 - 1e-9, 1.0), documents: int = 400
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """(truth, corrupted token, was it corrupted) of rows of uniform noise; documents of 100."""
    objective = replace(OBJECTIVE, noise="uniform", interval=interval)
    sample, plan, result = noised([document(100, key) for key in range(documents)], objective)
    truth = sample.tokens[corrupted_positions(plan)].astype(np.int64)
    return truth, result.tokens, result.corrupted


def test_uniform_noise_draws_every_true_id_alike() -> None:
    _, tokens, corrupted = uniform_rows()
    assert corrupted.all()
    assert (tokens.min(), tokens.max()) == (0, VOCABULARY - 1)
    counts = np.bincount(tokens, minlength=VOCABULARY)
    mean = len(tokens) / VOCABULARY
    assert abs(counts - mean).max() < 4.5 * np.sqrt(mean)  # mask and end ids among them
    assert abs(counts[[MASK_ID, EOD_ID]] - mean).max() < 4 * np.sqrt(mean)


def test_uniform_noise_may_draw_the_original_and_still_corrupts() -> None:
    truth, tokens, _ = uniform_rows()
    same = (truth == tokens).mean()
    assert abs(same - 1 / VOCABULARY) < 4 * np.sqrt(1 / VOCABULARY / len(truth))
    objective = replace(OBJECTIVE, noise="uniform", interval=(0.5, 1.0))
    _, plan, result = noised([document(4000)], objective)
    weights = result.terms[0].weights[4000:]
    assert ((weights > 0) == result.corrupted).all()
    sample = pack([document(4000)], 4000)
    unchanged = result.corrupted & (result.tokens == sample.tokens[corrupted_positions(plan)])
    assert unchanged.sum() > 10
    assert (weights[unchanged] > 0).all()


def test_uniform_noise_has_nothing_to_do_with_the_token_or_the_mask_draw() -> None:
    truth, tokens, corrupted = uniform_rows(interval=(0.4999, 0.5))
    assert 0.49 < corrupted.mean() < 0.51
    assert (tokens[~corrupted] == truth[~corrupted]).all()
    # rows whose mask draw is small are the corrupted ones: their ids must still be all ids
    counts = np.bincount(tokens[corrupted], minlength=VOCABULARY)
    mean = corrupted.sum() / VOCABULARY
    assert abs(counts - mean).max() < 4.5 * np.sqrt(mean)
    assert abs(np.corrcoef(truth[corrupted], tokens[corrupted])[0, 1]) < 0.03


def test_the_same_tokens_are_corrupted_by_either_noise() -> None:
    text = document(400)
    _, _, absorbing = noised([text], OBJECTIVE)
    _, _, uniform = noised([text], replace(OBJECTIVE, noise="uniform"))
    assert absorbing.corrupted.tobytes() == uniform.corrupted.tobytes()
    assert absorbing.terms[0].weights.tobytes() == uniform.terms[0].weights.tobytes()
    assert (absorbing.tokens[absorbing.corrupted] == MASK_ID).all()


def test_uniform_noise_leaves_prompts_alone() -> None:
    objective = replace(OBJECTIVE, noise="uniform", interval=(1 - 1e-9, 1.0))
    texts = [document(50, key, prompt=1 + key % 7) for key in range(40)]
    sample, plan, result = noised(texts, objective)
    at = corrupted_positions(plan)
    prompt = ~sample.supervised[at]
    assert prompt.sum() > 50
    assert not result.corrupted[prompt].any()
    assert result.tokens[prompt].tolist() == sample.tokens[at][prompt].tolist()
    assert result.corrupted[~prompt].all()


# --- what no objective can be made of, and what is a bound ---------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"antithetic": True, "noise_per": "document"}, "--antithetic"),
        ({"diffusion_weight": -1.0}, "--diffusion-loss-weight -1.0"),
        ({"ar_weight": float("inf")}, "--ar-loss-weight inf"),
        ({"ar_weight": float("nan")}, "--ar-loss-weight nan"),
        ({"diffusion_weight": 0.0}, "nothing is trained"),
    ],
)
def test_an_objective_that_cannot_be_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(OBJECTIVE, **change)


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({}, True),
        ({"schedule": "cosine"}, True),
        ({"noise_per": "document"}, True),
        ({"antithetic": True}, True),
        ({"ar_weight": 1.0}, True),
        ({"noise": "uniform"}, False),
        ({"weighting": "one"}, False),
        ({"weighting": "inverse_p"}, False),
        ({"schedule": "cosine", "weighting": "inverse_p"}, False),
        ({"alignment": "next"}, False),
        ({"scored": "all"}, False),
        ({"count": "corrupted"}, False),
        ({"count": "joint"}, False),
        ({"never_corrupt": (3,)}, False),
        ({"exclude_mask_logit": True}, True),
        ({"self_conditioning": 0.5}, True),
    ],
)
def test_what_is_a_bound(change: dict[str, object], bound: bool) -> None:
    assert replace(OBJECTIVE, **change).is_bound == bound


def test_without_a_diffusion_term_there_is_no_bound() -> None:
    """The first term, which evaluate.as_row reads, is then the next-token term."""
    assert not replace(OBJECTIVE, diffusion_weight=0.0, ar_weight=1.0).is_bound
