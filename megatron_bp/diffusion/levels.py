"""Noise levels: t of each block, and p(t) with its derivative.

Pure functions of a document's noise key; no ranks.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_bp.diffusion.noise import NoiseKey, Purpose, uniform
from megatron_bp.diffusion.objective import Objective, Schedule


def levels(
    key: NoiseKey, blocks: int, objective: Objective, interval: tuple[float, float]
) -> NDArray[np.float64]:
    """float64[blocks]: t in (a, b] of each block of one document.

    Args:
        key: whose noise it is.
        blocks: blocks of the document, whether they are targets or not.
        objective: tells what shares a level, and whether levels are antithetic.
        interval: (a, b).
    """
    if objective.noise_per == "document":
        draw = np.repeat(uniform(key, Purpose.LEVEL, 0, 1), blocks)
    elif objective.antithetic:
        # One draw a document, shifted by k/N for its k-th block in a random order (Kingma et al.,
        # arXiv 2107.00630, appendix I): level is spread evenly and not tied to position.
        place = np.argsort(uniform(key, Purpose.ORDER, 0, blocks), kind="stable")
        draw = (uniform(key, Purpose.LEVEL, 0, 1) + place / blocks) % 1.0
    else:
        draw = uniform(key, Purpose.LEVEL, 0, blocks)
    low, high = interval
    return low + (1.0 - draw) * (high - low)


def probability(
    t: NDArray[np.float64], schedule: Schedule
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(p(t), p'(t)): the probability that a token is corrupted, and its derivative."""
    if schedule == "linear":
        return t, np.ones_like(t)
    angle = np.pi / 2 * t
    # 1 - cos a, without its cancellation at small a
    return 2 * np.sin(angle / 2) ** 2, np.pi / 2 * np.sin(angle)
