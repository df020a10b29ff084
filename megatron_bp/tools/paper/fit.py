"""Rates that make counted work the paper's seconds, fitted on Nemotron 14B at 256K alone.

Eight figures: step, forward, backward and exposed communication, of CP8 and of CSBP8. Three unknown
rates. Products and attention get one part of the peak together: at one context and model their
FLOPs are in the same ratio in all figures, so these cannot tell them apart.
"""

import numpy as np

from megatron_bp.planning.rates import Rates
from megatron_bp.tools.paper.counting import Counted, counted
from megatron_bp.tools.paper.figures import CELLS, NETWORK, PEAK, TIMES, Cell, K, Scheme, Times

MODEL, LENGTH = "Nemotron 14B", 256 * K


def cell() -> Cell:
    """The one cell that is fitted on."""
    (found,) = (one for one in CELLS if (one.model, one.length) == (MODEL, LENGTH))
    return found


def fit(apart: bool = False) -> Rates:
    """The rates whose relative errors over the eight figures have the least sum of squares.

    Args:
        apart: products and attention have a rate each.
    """
    rows = []
    for scheme, times in TIMES[MODEL].items():
        for parts, seconds in equations(counted(cell(), scheme), scheme, times):
            linear, pairs, combined, sent = np.array(parts) / seconds
            common = (linear, pairs) if apart else (linear + pairs,)
            rows.append((*common, combined, sent))
    matrix = np.array(rows)
    scale = np.linalg.norm(matrix, axis=0)
    inverse = np.linalg.lstsq(matrix / scale, np.ones(len(rows)), rcond=None)[0] / scale
    *common_rates, combined, link = (1 / inverse).tolist()
    products, attention = common_rates[0], common_rates[-1]
    return Rates(products / PEAK, attention / PEAK, combined / PEAK, link / NETWORK)


def equations(
    counts: Counted, scheme: Scheme, times: Times
) -> list[tuple[tuple[float, float, float, float], float]]:
    """(FLOPs of products, of attention, of attention over combined rows, bytes), seconds.

    K/V come once in the forward, once again and their gradients once in the backward.
    """
    work = counts.work
    attention = work.attention
    forward = work.products.forward + work.head.forward
    back = work.products.again + work.products.backward
    parts = [
        (forward + back, attention.total, 1.0, times.step),
        (forward, attention.forward, 1 / 3, times.forward),
        (back, attention.again + attention.backward, 2 / 3, times.backward),
        (0.0, 0.0, 1.0, times.exposed),
    ]
    return [
        (
            (
                linear,
                0.0 if scheme == "CP" else pairs,
                pairs if scheme == "CP" else 0.0,
                part * counts.sent,
            ),
            seconds,
        )
        for linear, pairs, part, seconds in parts
    ]
