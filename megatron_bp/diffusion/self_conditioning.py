"""Self-conditioning: which corrupted rows see a prediction of a first pass, and whose.

Chen et al., Analog Bits (arXiv 2208.04202). Pure functions of sample, plan and objective; no ranks.
"""

import numpy as np
from numpy.typing import NDArray

from megatron_bp.diffusion.noise import NoiseKey, Purpose, uniform
from megatron_bp.diffusion.objective import Objective
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequencePlan
from megatron_bp.sequence.units import Alignment


def conditioned_documents(sample: Sample, objective: Objective) -> NDArray[np.bool_]:
    """bool[D]: each document's coin, one for all its blocks and copies."""
    keys = [
        NoiseKey(objective.seed, sample.split, int(epoch), int(document), copy=0)
        for document, epoch in zip(sample.document_keys, sample.document_epochs, strict=True)
    ]
    draws = [uniform(key, Purpose.SELF_CONDITIONING, 0, 1)[0] for key in keys]
    return np.array(draws) < objective.self_conditioning


def source_places(
    plan: SequencePlan, documents: NDArray[np.bool_], alignment: Alignment
) -> NDArray[np.int64]:
    """int64[X]: the corrupted row whose prediction conditions each corrupted row; -1 for none.

    It is the row that predicts the token of the row to be conditioned, in the same unit: with
    alignment "same" the row itself, with "next" the one before, so that the first row of a unit has
    none. One unit of three rows, places 4, 5, 6:

        same    4 5 6        next    -1 4 5

    Args:
        plan: the row's plan.
        documents: bool[D], which are conditioned.
        alignment: which row predicts a token.
    """
    units = plan.units
    on = np.repeat(documents[units.document], units.stop - units.start)
    place = np.arange(len(on), dtype=np.int64)
    if alignment == "next":
        place -= 1
        place[units.offset[:-1]] = -1
    return np.where(on, place, -1)
