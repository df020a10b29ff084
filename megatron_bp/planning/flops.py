"""FLOPs of one GPU in one micro-batch: products with weights, attention and the loss head.

Model FLOPs: what a kernel computes beyond visible pairs, elementwise work and the recurrence of a
mixer that is no softmax attention are not in them.
"""

from collections import Counter
from dataclasses import dataclass

from megatron_bp.planning.counts import SlotCounts
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.stages import stages
from megatron_bp.planning.task import Task

BACKWARD_ATTENTION = 2.5  # products of a pair: five in the backward, two in the forward


@dataclass(frozen=True)
class Part:
    """FLOPs by when they are computed.

    Attributes:
        forward: in the forward.
        again: in the backward, what the forward did already.
        backward: in the backward.
    """

    forward: float
    again: float
    backward: float

    @property
    def total(self) -> float:
        """All."""
        return self.forward + self.again + self.backward


@dataclass(frozen=True)
class Flops:
    """By what is computed.

    Attributes:
        products: of rows with weights; of experts the mean over the ranks that share them.
        attention: scores and their sums over visible pairs.
        head: logits of rows that carry a loss, and their gradients, which the forward forms.
    """

    products: Part
    attention: Part
    head: Part

    @property
    def total(self) -> float:
        """All."""
        return self.products.total + self.attention.total + self.head.total


def flops(task: Task, layout: Layout, counts: SlotCounts, stage: int, rank: int) -> Flops:
    """FLOPs of a GPU.

    Args:
        task: the model and its loss.
        layout: see `Layout`.
        counts: of the micro-batch, under this layout.
        stage: pipeline stage.
        rank: slot rank.
    """
    shape, mine = task.shape, counts.ranks[rank]
    products = attention = 0.0
    for layer, number in Counter(stages(shape, layout)[stage]).items():
        products += number * 2 * mine.rows * shape.active_parameters(layer) / layout.tp
        if layer.attention is not None:
            width = layer.attention.query_heads * layer.attention.head_dim / layout.tp
            attention += number * 4 * width * mine.pairs[layer.attention.window]
    whole = layout.recompute == "full"
    attends_again = layout.recompute != "none" and not (whole and layout.keep_attention)
    head = 0.0
    if stage == layout.pp - 1:
        head = 6 * scored_rows(task, counts, rank) * shape.hidden * shape.vocabulary / layout.tp
    return Flops(
        Part(products, products * whole, 2 * products),
        Part(attention, attention * attends_again, BACKWARD_ATTENTION * attention),
        Part(head, 0.0, 0.0),
    )


def scored_rows(task: Task, counts: SlotCounts, rank: int) -> float:
    """Rows of a slot rank that carry a loss, on average; one for each term that scores it."""
    mine = counts.ranks[rank]
    return task.scored * mine.corrupted + mine.scored - mine.corrupted
