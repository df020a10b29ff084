"""Corruption: the noised ids, and what each row is scored on.

A pure function of (objective, seed, sample, plan); it knows no ranks. First every position of each
copy gets its draw (`_noise_of`), then rows take what their own position and the one they are scored
on say.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp.diffusion.levels import levels, probability
from megatron_bp.diffusion.noise import NoiseKey, Purpose, uniform
from megatron_bp.diffusion.objective import Objective
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequencePlan
from megatron_bp.sequence.visibility import corrupted_positions

TRAIN = 0


@dataclass(frozen=True, eq=False)
class Term:
    """One loss term over the T clean and X corrupted rows, clean positions first.

    Attributes:
        name: "diffusion" or "ar".
        labels: int64[T + X], id that each row predicts.
        weights: float32[T + X], weight of its cross-entropy, without the term's factor in the
            total; 0 = not scored.
        counted: bool[T + X], rows that the term's count counts: its sum over all rows and all
            samples of a step divides the term's sum.
        factor: of the term in the total.
        joint: the counts of all joint terms are added up to the one that divides each.
    """

    name: str
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]
    counted: NDArray[np.bool_]
    factor: float
    joint: bool = False

    @property
    def count(self) -> int:
        """Rows counted, over the whole sample."""
        return int(np.count_nonzero(self.counted))


@dataclass(frozen=True, eq=False)
class Corruption:
    """What the X corrupted rows hold and what all rows are scored on.

    Attributes:
        tokens: int64[X], ids in the corrupted order.
        p: float32[X], probability with which each row's own token was corrupted, if it can be.
        scored_p: float32[X], the same of the token that the row is scored on; 0 without one.
        corruptible: bool[X], whether its own token can be corrupted.
        corrupted: bool[X], whether it was.
        terms: the loss terms of the objective.
    """

    tokens: NDArray[np.int64]
    p: NDArray[np.float32]
    scored_p: NDArray[np.float32]
    corruptible: NDArray[np.bool_]
    corrupted: NDArray[np.bool_]
    terms: tuple[Term, ...]


@dataclass(frozen=True, eq=False)
class _Noise:
    """The noise of each of C copies of a row with T positions and N blocks.

    Attributes:
        p: float32[C, N], probability of corruption.
        weight: float32[C, N], of a scored token.
        corrupted: bool[C, T].
        other: int64[C, T], what a corrupted token becomes.
    """

    p: NDArray[np.float32]
    weight: NDArray[np.float32]
    corrupted: NDArray[np.bool_]
    other: NDArray[np.int64]


def corrupt(sample: Sample, plan: SequencePlan, objective: Objective) -> Corruption:
    """The corruption of every target unit of the sample.

    Token i of block b is corrupted iff it is supervised, its id may be, and u_i < p(t_b). Splits
    other than training draw t from (0, 1], so that their loss is a bound, and their noise never
    changes. The row of token i is scored on token i, or on i + 1 (alignment "next"), whose own
    block, level and corruption, in the row's copy, then say whether and with what weight.
    """
    _refuse_mask_in_text(sample, objective)
    positions = corrupted_positions(plan)
    copy = np.repeat(plan.units.copy, plan.units.stop - plan.units.start)
    corruptible = sample.supervised & ~np.isin(sample.tokens, objective.never_corrupt)
    noise = _noise_of(sample, plan, objective, corruptible)
    corrupted = noise.corrupted[copy, positions]
    truth = sample.tokens.astype(np.int64)
    tokens = np.where(corrupted, noise.other[copy, positions], truth[positions])
    target, inside = positions, np.ones(len(positions), dtype=np.bool_)
    if objective.alignment == "next":
        target = np.minimum(positions + 1, len(truth) - 1)
        inside = (target > positions) & (sample.position[target] > 0)
    can = corruptible[target] & inside
    block = plan.block_of[target]
    scored_p = np.where(can, noise.p[copy, block], np.float32(0))
    was = noise.corrupted[copy, target] & inside
    scored = can if objective.scored == "all" else was
    if objective.count == "supervised":
        # Each token is corrupted in exactly one view of a complementary pair.
        counted = can & (copy % 2 == 0) if objective.complementary else can
    else:
        counted = was
    length, joint = len(truth), objective.count == "joint"
    terms = []
    if objective.diffusion_weight > 0:
        weights = np.where(scored, noise.weight[copy, block], np.float32(0))
        terms.append(
            Term(
                name="diffusion",
                labels=_after(length, np.where(inside, truth[target], 0)),
                weights=_after(length, weights),
                counted=_after(length, counted),
                factor=objective.diffusion_weight,
                joint=joint,
            )
        )
    if objective.ar_weight > 0:
        terms.append(_next_token(sample, plan, objective, len(positions)))
    p = noise.p[copy, plan.block_of[positions]]
    return Corruption(tokens, p, scored_p, corruptible[positions], corrupted, tuple(terms))


def _refuse_mask_in_text(sample: Sample, objective: Objective) -> None:
    there = (sample.tokens == objective.mask_token_id) & (sample.document >= 0)
    if objective.noise == "absorbing" and there.any():
        ordinal = int(sample.document[np.argmax(there)])
        raise ValueError(
            f"the text holds the mask token: id {objective.mask_token_id} stands in the document "
            f"with key {sample.document_keys[ordinal]}, where it could not be told from noise; "
            f"choose a --mask-token-id that no text holds, or clean the data"
        )


def _after(length: int, of_corrupted: NDArray[Any]) -> NDArray[Any]:
    """Zeros of `length` clean positions, then the corrupted rows'."""
    return np.concatenate([np.zeros(length, dtype=of_corrupted.dtype), of_corrupted])


def _next_token(
    sample: Sample, plan: SequencePlan, objective: Objective, corrupted_rows: int
) -> Term:
    """The autoregressive term: each clean row predicts its document's next token.

    Those scored are the supervised ones, or all of documents that have a target block.
    """
    nothing = np.zeros(corrupted_rows, dtype=np.bool_)
    scored = np.append(sample.document[:-1] == sample.document[1:], False) & (sample.document >= 0)
    if objective.ar_scored == "all":
        scored &= np.isin(sample.document, plan.units.document)
    else:
        scored &= np.append(sample.supervised[1:], False)
    labels = np.where(scored, np.append(sample.tokens[1:], 0), 0).astype(np.int64)
    counted = np.concatenate([scored, nothing])
    return Term(
        name="ar",
        labels=np.concatenate([labels, nothing.astype(np.int64)]),
        weights=counted.astype(np.float32),
        counted=counted,
        factor=objective.ar_weight,
        joint=objective.count == "joint",
    )


def _noise_of(
    sample: Sample, plan: SequencePlan, objective: Objective, corruptible: NDArray[np.bool_]
) -> _Noise:
    """The noise of every document that has a target block, in every copy."""
    copies, length = plan.options.copies, len(sample.tokens)
    t = np.ones((copies, len(plan.block_start)))
    corrupted = np.zeros((copies, length), dtype=np.bool_)
    other = np.full((copies, length), objective.mask_token_id, dtype=np.int64)
    interval = objective.interval if sample.split == TRAIN else (0.0, 1.0)
    block_document = sample.document[plan.block_start]
    for document in np.unique(plan.units.document).tolist():
        first, stop = np.searchsorted(block_document, [document, document + 1])
        begin, end = plan.block_start[first], plan.block_stop[stop - 1]
        place = np.flatnonzero(corruptible[begin:end])
        for copy in range(0, copies, 2 if objective.complementary else 1):
            key = NoiseKey(
                seed=objective.seed,
                split=sample.split,
                epoch=int(sample.document_epochs[document]),
                document=int(sample.document_keys[document]),
                copy=copy,
            )
            t[copy, first:stop] = levels(key, int(stop - first), objective, interval)
            if len(place) == 0:
                continue
            level = t[copy, plan.block_of[begin + place]]
            p = probability(level, objective.schedule)[0].astype(np.float32)
            hit = _at(key, Purpose.MASK, place) < p
            corrupted[copy, begin + place] = hit
            if objective.complementary:
                corrupted[copy + 1, begin + place] = ~hit
            if objective.noise == "uniform":
                ids = _at(key, Purpose.REPLACEMENT, place) * objective.vocabulary
                other[copy : copy + 1 + objective.complementary, begin + place] = ids
    exact, slope = probability(t, objective.schedule)
    p = exact.astype(np.float32)
    if objective.complementary:
        p[1::2] = 1 - p[::2]
    weight = {
        "bound": lambda: slope.astype(np.float32) / p,
        "one": lambda: np.ones_like(p),
        "inverse_p": lambda: np.float32(1.0) / p,
    }[objective.weighting]()
    return _Noise(p, weight, corrupted, other)


def _at(key: NoiseKey, purpose: Purpose, index: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64[n]: the draws at the given places (at least one) of one stream."""
    start, stop = int(index.min()), int(index.max()) + 1
    return uniform(key, purpose, start, stop)[index - start]
