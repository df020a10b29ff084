"""Corruption: the noised ids, labels and weights of a packed row.

A pure function of (objective, seed, sample, plan); it knows no ranks.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_bp.diffusion.noise import NoiseKey, Purpose, uniform
from megatron_bp.diffusion.objective import Objective
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequencePlan
from megatron_bp.sequence.visibility import corrupted_positions

TRAIN = 0


@dataclass(frozen=True, eq=False)
class Corruption:
    """What the X corrupted rows hold and what each of T clean + X corrupted rows is scored on.

    Attributes:
        tokens: int64[X], ids in the corrupted order.
        p: float32[X], probability with which each row's token was corrupted.
        labels: int64[T + X], id each row predicts; clean positions first.
        weights: float32[T + X], weight of each row's cross-entropy; 0 = not scored.
        count: what the summed loss is divided by: the supervised tokens of the row.
    """

    tokens: NDArray[np.int64]
    p: NDArray[np.float32]
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]
    count: int


def corrupt(sample: Sample, plan: SequencePlan, objective: Objective) -> Corruption:
    """The corruption of every target unit of the sample.

    Token i of block b is masked iff u_i < p(t_b). Only supervised tokens are ever masked, and only
    masked ones are scored. Splits other than training draw t from (0, 1], so that their loss is a
    bound, and their noise never changes.
    """
    positions = corrupted_positions(plan)
    level, draw = _draws(sample, plan, objective, positions)
    low, high = objective.interval if sample.split == TRAIN else (0.0, 1.0)
    t = low + (1.0 - level) * (high - low)
    p = t.astype(np.float32)  # linear schedule: p(t) = t, p'(t) = 1
    truth = sample.tokens[positions].astype(np.int64)
    supervised = sample.supervised[positions]
    masked = (draw < p) & supervised
    weight = np.float32(1.0) / p if objective.weighting == "bound" else np.ones_like(p)
    length = len(sample.tokens)
    labels = np.zeros(length + len(positions), dtype=np.int64)
    weights = np.zeros(length + len(positions), dtype=np.float32)
    labels[length:] = truth
    weights[length:] = np.where(masked, weight, np.float32(0.0))
    return Corruption(
        tokens=np.where(masked, np.int64(objective.mask_token_id), truth),
        p=p,
        labels=labels,
        weights=weights,
        count=int(np.count_nonzero(supervised)),
    )


def _draws(
    sample: Sample, plan: SequencePlan, objective: Objective, positions: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """float64[X], float64[X]: each corrupted row's draw for its block's level and for itself."""
    level = np.empty(len(positions))
    draw = np.empty(len(positions))
    units, offset = plan.units, plan.units.offset
    group = units.document.astype(np.int64) << 32 | units.copy
    edges = np.flatnonzero(np.diff(group, prepend=-1, append=-1))
    for first, last in pairwise(edges):
        unit = units[int(first)]
        key = NoiseKey(
            seed=objective.seed,
            split=sample.split,
            epoch=sample.epoch,
            document=int(sample.document_keys[unit.document]),
            copy=unit.copy,
        )
        rows = slice(offset[first], offset[last])
        place = sample.position[positions[rows]]
        draw[rows] = _at(key, Purpose.MASK, place)
        blocks = plan.block_index[plan.unit_block[first:last]]
        sizes = units.stop[first:last] - units.start[first:last]
        level[rows] = np.repeat(_at(key, Purpose.LEVEL, blocks), sizes)
    return level, draw


def _at(key: NoiseKey, purpose: Purpose, index: NDArray[np.int32]) -> NDArray[np.float64]:
    """float64[n]: the draws at the given places (at least one) of one stream."""
    start, stop = int(index.min()), int(index.max()) + 1
    return uniform(key, purpose, start, stop)[index - start]
