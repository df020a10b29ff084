"""Each preset on two small packed chats: every id, label, weight and count, written by hand.

    packed     0  1  2  3  4  5  6  7  8  9 | 10 11 12 13 14 | 15
    id        10 11 12 13 14 15 16 17 18 19 | 30 31 32 33 34 | padding
    response            x  x  x  x     x  x |        x  x  x |

Blocks of 4. On the grid "document" they are [0,4) [4,7) [7,8) [8,10) | [10,14) [14,15): a block is
cut at 7, where a response ends. On the grid "response" [0,3) [3,7) [7,8) [8,10) | [10,12) [12,15).
"""

import functools
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
import whole
from numpy.typing import NDArray
from ranks import run_ranks

from megatron_bp.data.document import Document
from megatron_bp.diffusion import corruption, levels
from megatron_bp.diffusion.corruption import Corruption, corrupt
from megatron_bp.diffusion.loss import term_scales
from megatron_bp.diffusion.noise import NoiseKey, Purpose
from megatron_bp.diffusion.objective import Objective
from megatron_bp.model.output import weighted_cross_entropy
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan

M = 98  # the mask
T = 16
NAMES = ["block_diffusion", "fast_dllm_v2", "nemotron", "diffusion_gemma"]
# Draws by document key: a block's level is t = 1 - LEVEL, of the document's k-th block; a token
# is corrupted if MASK < p(t); under uniform noise it becomes id floor(99 x REPLACEMENT).
DRAWS: dict[tuple[Purpose, int], list[float]] = {
    (Purpose.LEVEL, 1): [0.5, 0.75, 0.25, 0.5],  # t = 1/2, 1/4, 3/4, 1/2
    (Purpose.LEVEL, 2): [0.75, 0.0],  # t = 1/4, 1
    (Purpose.MASK, 1): [0, 0, 0, 0.4, 0.1, 0.3, 0.2, 0, 0.6, 0.45],
    (Purpose.MASK, 2): [0, 0, 0.2, 0.9, 0.99],
    (Purpose.REPLACEMENT, 1): [0.5] * 10,  # id 49
    (Purpose.REPLACEMENT, 2): [0.25] * 5,  # id 24
}


def chats() -> Sample:
    first = np.array([0, 0, 0, 1, 1, 1, 1, 0, 1, 1], dtype=bool)
    second = np.array([0, 0, 1, 1, 1], dtype=bool)
    return pack(
        [
            Document(np.arange(10, 20, dtype=np.int32), first, 1),
            Document(np.arange(30, 35, dtype=np.int32), second, 2),
        ],
        T,
    )


def recipe_on_rank(rank: int, world: int, preset: str) -> tuple[Objective, SequenceOptions]:
    """What the flags of a preset, and nothing else but sizes, make."""
    from megatron_bp import arguments
    from megatron_bp.arguments.flags import full_parser
    from megatron_bp.arguments.parse import preset_flags

    given = ["--mask-token-id", str(M), "--noise-interval", "0", "1", "--seed", "7"]
    given += ["--num-attention-heads", "4", "--hidden-size", "32", "--diffusion-block-size", "4"]
    given += ["--objective", preset]
    args = full_parser().parse_args(given + preset_flags(preset, given))
    args.bdlm_clean_shard_size, args.bdlm_vocabulary = 1, 99
    args.kv_channels, args.ffn_hidden_size = 8, 64
    args.params_dtype = torch.float32
    settings = arguments.settings(args)
    return settings.objective, settings.sequence


@functools.cache
def recipe(preset: str) -> tuple[Objective, SequenceOptions]:
    return run_ranks(1, recipe_on_rank, preset)[0]


def drawn(key: NoiseKey, purpose: Purpose, start: int, stop: int) -> NDArray[np.float64]:
    assert key.copy == 0  # the second view of a pair draws nothing of its own
    return np.array(DRAWS[purpose, key.document][start:stop], dtype=np.float64)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(plan, corruption) of a preset with the draws above."""
    monkeypatch.setattr(corruption, "uniform", drawn)
    monkeypatch.setattr(levels, "uniform", drawn)

    def made(preset: str) -> tuple[SequencePlan, Corruption]:
        objective, sequence = recipe(preset)
        plan = make_plan(chats(), sequence)
        return plan, corrupt(chats(), plan, objective)

    return made


def units(plan: SequencePlan) -> list[tuple[int, int, int]]:
    u = plan.units
    return list(zip(u.copy.tolist(), u.start.tolist(), u.stop.tolist(), strict=True))


def total(made: Corruption) -> float:
    """The loss if every cross-entropy is 1."""
    terms = made.terms
    scales = term_scales(
        [t.count for t in terms], [t.factor for t in terms], [t.joint for t in terms]
    )
    scaled = sum(s * float(t.weights.sum()) for s, t in zip(scales.scales, terms, strict=True))
    return scaled / sum(terms[k].count for k in scales.reference)


@pytest.mark.ranks
def test_block_diffusion_by_hand(by_hand: Any) -> None:
    plan, made = by_hand("block_diffusion")
    # [7,8) holds no response, so it has no corrupted rows
    assert units(plan) == [(0, 0, 4), (0, 4, 7), (0, 8, 10), (0, 10, 14), (0, 14, 15)]
    # t = 1/2: 0.4 is masked. t = 1/4: 0.1 is, 0.3 is not, 0.2 is. t = 1/2: 0.6 is not, 0.45 is.
    # The second chat, t = 1/4: 0.2 is, 0.9 is not; t = 1: 0.99 is.
    assert made.tokens.tolist() == [10, 11, 12, M, M, 15, M, 18, M, 30, 31, M, 33, M]
    (term,) = made.terms
    labels = [10, 11, 12, 13, 14, 15, 16, 18, 19, 30, 31, 32, 33, 34]  # the row's own token
    assert term.labels[T:].tolist() == labels
    # 1/t of the masked: 2, 4, 4, 2, 4, 1
    assert term.weights[T:].tolist() == [0, 0, 0, 2, 4, 0, 4, 0, 2, 0, 0, 4, 0, 1]
    assert term.count == 9  # supervised: 13 to 16, 18, 19, 32 to 34
    assert not term.weights[:T].any()
    assert total(made) == pytest.approx(17 / 9)


@pytest.mark.ranks
def test_fast_dllm_v2_by_hand(by_hand: Any) -> None:
    plan, made = by_hand("fast_dllm_v2")
    # Rows 2 3 | 4 5 | 7 | 8 and 11 12 13 score a response's token, the one after them. So the
    # prompt [7,8) is computed, and [14,15) is not.
    blocks = [(0, 4), (4, 7), (7, 8), (8, 10), (10, 14)]
    assert units(plan) == [(copy, *block) for block in blocks for copy in (0, 1)]
    # Masked in the first view: 13, 14, 16, 19, 32, 34; in the second all others: 15, 18, 33.
    assert made.tokens.tolist() == [
        *(10, 11, 12, M),
        *(10, 11, 12, 13),
        *(M, 15, M),
        *(14, M, 16),
        *(17,),
        *(17,),
        *(18, M),
        *(M, 19),
        *(30, 31, M, 33),
        *(30, 31, 32, M),
    ]
    (term,) = made.terms
    of_block = [
        ([11, 12, 13, 14], [0, 0, 1, 1], [0, 0, 0, 0]),  # rows 2 and 3 score 13 and 14
        ([15, 16, 17], [0, 1, 0], [1, 0, 0]),  # 16 in the first view, 15 in the second
        ([18], [0], [1]),  # the prompt's row scores 18, masked in the second
        ([19, 0], [1, 0], [0, 0]),  # the last row of a document scores nothing
        ([31, 32, 33, 34], [0, 1, 0, 1], [0, 0, 1, 0]),
    ]
    labels, weights = [], []
    for label, first, second in of_block:
        labels += label * 2
        weights += first + second
    assert term.labels[T:].tolist() == labels
    assert term.weights[T:].tolist() == weights
    assert term.count == 9  # each supervised token once, though there are two views
    assert sum(weights) == 9
    assert total(made) == pytest.approx(1.0)


@pytest.mark.ranks
def test_nemotron_by_hand(by_hand: Any) -> None:
    plan, made = by_hand("nemotron")
    assert units(plan) == [(0, 0, 4), (0, 4, 7), (0, 8, 10), (0, 10, 14), (0, 14, 15)]
    # One level a document: t = 1/2 masks 0.4, 0.1, 0.3, 0.2, 0.45; t = 1/4 masks 0.2.
    assert made.tokens.tolist() == [10, 11, 12, M, M, M, M, 18, M, 30, 31, M, 33, 34]
    diffusion, ar = made.terms
    assert diffusion.weights[T:].tolist() == [0, 0, 0, 2, 2, 2, 2, 0, 2, 0, 0, 4, 0, 0]
    # Next tokens that are supervised: 13 14 15 16, 18 19, 32 33 34.
    scored = [0, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0]
    assert ar.weights[:T].tolist() == scored
    assert ar.labels[:T].tolist() == [0, 0, 13, 14, 15, 16, 0, 18, 19, 0, 0, 32, 33, 34, 0, 0]
    assert (diffusion.count, ar.count) == (6, 9)  # masked tokens, pairs
    assert (diffusion.joint, ar.joint) == (True, True)
    # One count for both: (0.3 x (5 x 2 + 4) + 1.0 x 9) / (6 + 9)
    assert total(made) == pytest.approx((0.3 * 14 + 9) / 15)


@pytest.mark.ranks
def test_diffusion_gemma_by_hand(by_hand: Any) -> None:
    plan, made = by_hand("diffusion_gemma")
    assert recipe("diffusion_gemma")[0].self_conditioning == 0.5
    # Responses [3,7), [8,10), [12,15), each on a grid of its own.
    assert units(plan) == [(0, 3, 7), (0, 8, 10), (0, 12, 15)]
    # t of the documents' blocks [0,3) [3,7) [7,8) [8,10) is 1/2, 1/4, 3/4, 1/2: of 0.4 0.1 0.3 0.2
    # the second and last are replaced by 49, of 0.6 0.45 the last. [10,12) has 1/4, [12,15) has 1:
    # all are replaced, by 24.
    assert made.tokens.tolist() == [13, 49, 15, 49, 18, 49, 24, 24, 24]
    diffusion, ar = made.terms
    assert diffusion.labels[T:].tolist() == [13, 14, 15, 16, 18, 19, 32, 33, 34]
    assert diffusion.weights[T:].tolist() == [1] * 9  # corrupted or not
    assert diffusion.count == 9
    # All next tokens of both chats, prompts' too: 9 + 4 pairs, a count of their own.
    assert ar.weights[:T].tolist() == [1] * 9 + [0] + [1] * 4 + [0, 0]
    assert ar.labels[:14].tolist() == [*range(11, 20), 0, *range(31, 35)]
    assert ar.count == 13
    assert total(made) == pytest.approx(1.0 + 1.0)
    assert (plan.scorer[:15] == 0).all()  # clean rows up to the end are computed for that


@pytest.mark.ranks
def test_views_of_a_pair_under_uniform_noise(by_hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is replaced in one view; p of the second view is 1 - p of the first."""
    objective, sequence = recipe("fast_dllm_v2")
    same = replace(objective, noise="uniform", alignment="same")
    plan = make_plan(chats(), replace(sequence, alignment="same"))
    made = corrupt(chats(), plan, same)
    # [0,4): 13 in the first view. [4,7): 14 and 16, then 15. [8,10): 19, then 18. [10,14): 32, then
    # 33. [14,15): 34, then nothing. Ids become 49 and 24.
    assert made.tokens.tolist() == [
        *(10, 11, 12, 49),
        *(10, 11, 12, 13),
        *(49, 15, 49),
        *(14, 49, 16),
        *(18, 49),
        *(49, 19),
        *(30, 31, 24, 33),
        *(30, 31, 32, 24),
        24,
        34,
    ]
    t = [[0.5] * 4, [0.25] * 3, [0.5] * 2, [0.25] * 4, [1.0]]
    assert made.p.tolist() == [p for block in t for p in (*block, *(1 - x for x in block))]


# --- packed or alone -----------------------------------------------------------------------------


def chat(key: int) -> Document:
    rng = np.random.default_rng(key)
    length = int(rng.integers(2, 40))
    supervised = np.repeat(rng.random(12) < 0.5, 4)[:length]
    supervised[-1] = True
    return Document(rng.integers(0, 90, length).astype(np.int32), supervised, key)


def of_document(sample: Sample, made: Corruption, plan: SequencePlan, ordinal: int) -> list[bytes]:
    """Everything that noise and loss of one document depend on."""
    sizes = plan.units.stop - plan.units.start
    rows = np.repeat(plan.units.document, sizes) == ordinal
    clean = sample.document == ordinal
    columns = [made.tokens, made.p, made.scored_p, made.corrupted, made.corruptible]
    out = [column[rows].tobytes() for column in columns]
    for term in made.terms:
        keep = np.concatenate([clean, rows])
        out += [column[keep].tobytes() for column in (term.labels, term.weights, term.counted)]
    return out


@pytest.mark.ranks
@pytest.mark.parametrize("preset", NAMES)
@pytest.mark.parametrize("degrees", [(1, 1), (4, 2), (1, 2)])
def test_noise_and_loss_of_a_chat_are_bitwise_the_same_packed_or_alone(
    preset: str, degrees: tuple[int, int]
) -> None:
    objective, sequence = recipe(preset)
    bp, cp = degrees
    other = replace(sequence, block_parallel_size=bp, context_parallel_size=cp)
    documents = [chat(key) for key in range(7)]
    for order in ([*range(7)], [6, 2, 0, 5, 1, 3, 4]):
        packed = pack([documents[i] for i in order], 300, epoch=2)
        plan = make_plan(packed, other)
        made = corrupt(packed, plan, objective)
        for ordinal, i in enumerate(order):
            alone = pack([documents[i]], 64, epoch=2)
            plan_alone = make_plan(alone, sequence)
            want = of_document(alone, corrupt(alone, plan_alone, objective), plan_alone, 0)
            assert of_document(packed, made, plan, ordinal) == want


# --- presets are defaults, no more ---------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("preset", list(whole.PRESETS))
def test_the_models_recipes_are_the_presets(preset: str) -> None:
    """What tests/whole.py compares with the oracle on ranks is what the flags make."""
    objective, sequence = recipe(preset)
    shape = whole.PRESETS[preset]
    tested = whole.settings_of(shape.rows[0], shape, 1, 1)
    own = {"mask_token_id", "vocabulary", "seed", "interval", "self_conditioning"}
    want, got = asdict(objective), asdict(tested.objective)
    assert {k: want[k] for k in want.keys() - own} == {k: got[k] for k in got.keys() - own}
    assert asdict(sequence) == asdict(tested.sequence) | {"row_cost": sequence.row_cost}


def flags_on_rank(rank: int, world: int, preset: str, given: list[str]) -> list[str]:
    from megatron_bp.arguments.parse import preset_flags

    return preset_flags(preset, given)


@pytest.mark.ranks
def test_a_flag_that_is_given_wins_over_the_preset() -> None:
    given = ["--alignment", "--no-complementary-copies", "--loss-weighting"]
    (left,) = run_ranks(1, flags_on_rank, "fast_dllm_v2", given)
    assert left == ["--corrupted-copies=2"]
    (left,) = run_ranks(1, flags_on_rank, "block_diffusion", [])
    assert left == []


# --- case 9 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alignment", "want", "count"),
    [("next", [0.0, 0.0, 0.0], 3), ("same", [50.0, 50.0, 50.0, 2.302585], 4)],
)
def test_case_9_alignment_by_hand(alignment: Any, want: list[float], count: int) -> None:
    """Tokens 5 6 7 8; a logit of 50 at the next token in rows 0 to 2, zeros in row 3."""
    tokens = np.array([5, 6, 7, 8], dtype=np.int32)
    sample = pack([Document(tokens, np.ones(4, dtype=bool), 0)], 4)
    objective = Objective(0, 10, 1, alignment=alignment, scored="all", weighting="one")
    plan = make_plan(sample, SequenceOptions(4, alignment=alignment))
    (term,) = corrupt(sample, plan, objective).terms
    logits = torch.zeros(4, 10)
    for row, following in enumerate((6, 7, 8)):
        logits[row, following] = 50
    rows = torch.from_numpy(np.flatnonzero(term.weights[4:]))
    _, ce = weighted_cross_entropy(
        logits[rows],
        torch.eye(10),
        torch.from_numpy(term.labels[4:])[rows],
        torch.ones(len(rows)),
        10,
    )
    assert ce.tolist() == pytest.approx(want, abs=1e-6)
    assert term.count == count


@pytest.mark.ranks
def test_case_9_blocks_of_one_with_nothing_masked_are_the_autoregressive_loss() -> None:
    """Every token scored, weight 1, token-causal, next alignment; all masked it is not."""
    rows = tuple(replace(c, block_size=1) for c in whole.chats(clean_relation="token"))
    recipe = {"alignment": "next", "scored": "all", "interval": (0.0, 1e-300)}
    shape = whole.Shape(whole.LLAMA, rows, weighting="one", objective=recipe)
    ar = replace(shape, objective={"ar_weight": 1.0, "diffusion_weight": 0.0})
    (one,) = run_ranks(1, whole.step_on_rank, shape, 1)
    (other,) = run_ranks(1, whole.step_on_rank, ar, 1)
    assert one["count"] == other["count"]
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    error, name = whole.worst_gradient(one["grads"], other["grads"])
    assert error < 1e-5, name
    masked = replace(shape, objective=recipe | {"interval": (0.999, 1.0)})
    (noised,) = run_ranks(1, whole.step_on_rank, masked, 1)
    assert abs(noised["loss"] - other["loss"]) > 1e-3
