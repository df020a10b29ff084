"""Seconds of a step from counts and rates: the paper's schemes, and this project's exchange."""

from collections import Counter
from dataclasses import dataclass, replace

from megatron_bp.planning.flops import BACKWARD_ATTENTION
from megatron_bp.planning.rates import Rates
from megatron_bp.planning.shape import Attention
from megatron_bp.planning.traffic import DTYPES
from megatron_bp.tools.paper.counting import Counted, counted
from megatron_bp.tools.paper.figures import NETWORK, PEAK, Cell, K, Scheme
from megatron_bp.tools.paper.fit import cell


@dataclass(frozen=True)
class Seconds:
    """Of a step, part by part.

    Attributes:
        products: rows times weights.
        attention: visible pairs.
        head: logits and their gradients.
        exposed: K/V and their gradients that are waited for.
        beside: sums over tensor-parallel ranks, and rows to experts.
        tokens: of the step.
    """

    products: float
    attention: float
    head: float
    exposed: float
    beside: float
    tokens: int

    @property
    def total(self) -> float:
        """The step."""
        return self.products + self.attention + self.head + self.exposed + self.beside

    @property
    def rate(self) -> float:
        """Tokens a second of all GPUs."""
        return self.tokens / self.total


def paper(cell: Cell, scheme: Scheme, rates: Rates) -> Seconds:
    """The paper's scheme: what K/V are waited for is in proportion to their bytes."""
    counts = counted(cell, scheme)
    combined = rates.combined_attention if scheme == "CP" else rates.attention
    return _seconds(counts, rates, combined, counts.sent / (rates.link * NETWORK))


def series(rates: Rates) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Tokens/s of the model that is fitted on, from 64K to 512K, by model and scheme in words."""
    found = cell()
    lengths = [2**power * K for power in range(6, 10)]
    names: dict[Scheme, str] = {"CP": "best CP baseline", "CSBP": "CSBP"}
    return {
        found.model: {
            f"{name}, predicted from one fit at 256K": [
                (length, paper(replace(found, length=length), scheme, rates).rate)
                for length in lengths
            ]
            for scheme, name in names.items()
        }
    }


def ours(cell: Cell, rates: Rates) -> Seconds:
    """This project's CSBP: one pass, needed rows for windows, K/V beside own keys.

    Its kernels are given the rate that CSBP's have in the paper, and its collectives a link on
    which the bytes take as long as the paper's are waited for, as if nothing had been hidden there.
    """
    counts = counted(cell, "CSBP", one_pass=True)
    exposed = max(_waited(counts, rank, rates) for rank in range(counts.layout.slot))
    return _seconds(counts, rates, rates.attention, exposed)


def _seconds(counts: Counted, rates: Rates, attention: float, exposed: float) -> Seconds:
    work = counts.work
    return Seconds(
        products=work.products.total / (rates.products * PEAK),
        attention=work.attention.total / (attention * PEAK),
        head=work.head.total / (rates.products * PEAK),
        exposed=exposed,
        beside=counts.beside / (rates.link * NETWORK),
        tokens=counts.tokens,
    )


def _waited(counts: Counted, rank: int, rates: Rates) -> float:
    """Seconds of a step that a rank waits for K/V and their gradients."""
    kinds = Counter(x.attention for x in counts.task.shape.layers if x.attention is not None)
    return sum(
        number * _waited_in_layer(counts, rank, attention, rates)
        for attention, number in kinds.items()
    )


def _waited_in_layer(counts: Counted, rank: int, attention: Attention, rates: Rates) -> float:
    """See `ours`; forward and recomputed forward hide one pass each, the backward the gradients.

    While K/V come, all pairs with own keys are computed; while gradients leave, those with own
    clean keys, which are half of them or more: a corrupted row sees but a block of its own.
    """
    mine, tp = counts.counts.ranks[rank], counts.layout.tp
    row = 2 * max(1, attention.key_heads // tp) * attention.head_dim
    sent, dtype = mine.sent[attention.window], DTYPES[counts.task.precision.model]
    link, speed = rates.link * NETWORK, rates.attention * PEAK
    pair = 4 * attention.query_heads / tp * attention.head_dim / speed
    local = mine.local_pairs[attention.window]
    clean = max(0, local - mine.corrupted * counts.task.sequence.block_size)
    fetch, back = sent.bytes(row, dtype, 1, 0) / link, sent.bytes(row, dtype, 0, 1) / link
    return 2 * max(0.0, fetch - local * pair) + max(0.0, back - BACKWARD_ATTENTION * clean * pair)
