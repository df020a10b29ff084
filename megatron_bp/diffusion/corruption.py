"""Corruption: the noised ids, and what each row is scored on.

A pure function of (objective, seed, sample, plan); it knows no ranks.
"""

from dataclasses import dataclass
from itertools import pairwise

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
    """

    name: str
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]
    counted: NDArray[np.bool_]
    factor: float

    @property
    def count(self) -> int:
        """Rows counted, over the whole sample."""
        return int(np.count_nonzero(self.counted))


@dataclass(frozen=True, eq=False)
class Corruption:
    """What the X corrupted rows hold and what all rows are scored on.

    Attributes:
        tokens: int64[X], ids in the corrupted order.
        p: float32[X], probability with which each row's token was corrupted.
        corrupted: bool[X], whether it was.
        terms: the loss terms of the objective.
    """

    tokens: NDArray[np.int64]
    p: NDArray[np.float32]
    corrupted: NDArray[np.bool_]
    terms: tuple[Term, ...]


def corrupt(sample: Sample, plan: SequencePlan, objective: Objective) -> Corruption:
    """The corruption of every target unit of the sample.

    Token i of block b is corrupted iff it is supervised and u_i < p(t_b). Splits other than
    training draw t from (0, 1], so that their loss is a bound, and their noise never changes.
    """
    if objective.noise == "absorbing" and (sample.tokens == objective.mask_token_id).any():
        ordinal = int(sample.document[np.argmax(sample.tokens == objective.mask_token_id)])
        raise ValueError(
            f"the text holds the mask token: id {objective.mask_token_id} stands in the document "
            f"with key {sample.document_keys[ordinal]}, where it could not be told from noise; "
            f"choose a --mask-token-id that no text holds, or clean the data"
        )
    positions = corrupted_positions(plan)
    t, draw, other = _draws(sample, plan, objective, positions)
    exact_p, slope = probability(t, objective.schedule)
    p = exact_p.astype(np.float32)
    truth = sample.tokens[positions].astype(np.int64)
    supervised = sample.supervised[positions]
    corrupted = (draw < p) & supervised
    noise = np.int64(objective.mask_token_id) if other is None else other
    weight = {
        "bound": lambda: slope.astype(np.float32) / p,
        "one": lambda: np.ones_like(p),
        "inverse_p": lambda: np.float32(1.0) / p,
    }[objective.weighting]()
    length = len(sample.tokens)
    terms = []
    if objective.diffusion_weight > 0:
        terms.append(
            Term(
                name="diffusion",
                labels=np.concatenate([np.zeros(length, dtype=np.int64), truth]),
                weights=np.concatenate(
                    [np.zeros(length, np.float32), np.where(corrupted, weight, np.float32(0))]
                ),
                counted=np.concatenate([np.zeros(length, dtype=np.bool_), supervised]),
                factor=objective.diffusion_weight,
            )
        )
    if objective.ar_weight > 0:
        terms.append(_next_token(sample, len(positions), objective.ar_weight))
    return Corruption(np.where(corrupted, noise, truth), p, corrupted, tuple(terms))


def _next_token(sample: Sample, corrupted_rows: int, factor: float) -> Term:
    """The autoregressive term: each clean row predicts its document's next, supervised token."""
    nothing = np.zeros(corrupted_rows, dtype=np.bool_)
    follows = np.append(sample.document[:-1] == sample.document[1:], False)
    scored = follows & np.append(sample.supervised[1:], False) & (sample.document >= 0)
    labels = np.where(scored, np.append(sample.tokens[1:], 0), 0).astype(np.int64)
    counted = np.concatenate([scored, nothing])
    return Term(
        name="ar",
        labels=np.concatenate([labels, nothing.astype(np.int64)]),
        weights=counted.astype(np.float32),
        counted=counted,
        factor=factor,
    )


def _draws(
    sample: Sample, plan: SequencePlan, objective: Objective, positions: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64] | None]:
    """(t, u, replacement id or None) of each of the X corrupted rows."""
    level = np.empty(len(positions))
    draw = np.empty(len(positions))
    uniform_noise = objective.noise == "uniform"
    other = np.empty(len(positions), dtype=np.int64) if uniform_noise else None
    interval = objective.interval if sample.split == TRAIN else (0.0, 1.0)
    units, offset = plan.units, plan.units.offset
    blocks_of = np.bincount(sample.document[plan.block_start], minlength=1)
    group = units.document.astype(np.int64) << 32 | units.copy
    edges = np.flatnonzero(np.diff(group, prepend=-1, append=-1))
    for first, last in pairwise(edges):
        unit = units[int(first)]
        key = NoiseKey(
            seed=objective.seed,
            split=sample.split,
            epoch=int(sample.document_epochs[unit.document]),
            document=int(sample.document_keys[unit.document]),
            copy=unit.copy,
        )
        rows = slice(offset[first], offset[last])
        place = sample.position[positions[rows]]
        draw[rows] = _at(key, Purpose.MASK, place)
        if other is not None:
            ids = _at(key, Purpose.REPLACEMENT, place) * objective.vocabulary
            other[rows] = ids.astype(np.int64)
        t = levels(key, int(blocks_of[unit.document]), objective, interval)
        sizes = units.stop[first:last] - units.start[first:last]
        level[rows] = np.repeat(t[plan.block_index[plan.unit_block[first:last]]], sizes)
    return level, draw, other


def _at(key: NoiseKey, purpose: Purpose, index: NDArray[np.int32]) -> NDArray[np.float64]:
    """float64[n]: the draws at the given places (at least one) of one stream."""
    start, stop = int(index.min()), int(index.max()) + 1
    return uniform(key, purpose, start, stop)[index - start]
