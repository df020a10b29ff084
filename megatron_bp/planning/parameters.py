"""Parameters that one GPU holds: those that replicas and slot share, and its experts."""

from dataclasses import dataclass

from megatron_bp.planning.layout import Layout
from megatron_bp.planning.shape import Layer, Shape
from megatron_bp.planning.stages import stages


@dataclass(frozen=True)
class Parameters:
    """Parameters of a GPU.

    Attributes:
        dense: of all but experts.
        experts: of experts.
        largest: of the largest matrix.
        replicas: GPUs that hold the same dense ones.
        expert_replicas: GPUs that hold the same experts.
    """

    dense: float
    experts: float
    largest: float
    replicas: int
    expert_replicas: int

    @property
    def total(self) -> float:
        """All."""
        return self.dense + self.experts

    @property
    def sharded(self) -> float:
        """Those whose optimizer state a GPU holds if all that hold them share it."""
        return self.dense / self.replicas + self.experts / self.expert_replicas


def parameters(shape: Shape, layout: Layout, stage: int) -> Parameters:
    """Of a GPU of a pipeline stage."""
    first, last = stage == 0, stage == layout.pp - 1
    table = shape.vocabulary * shape.hidden / layout.tp
    # Of a tied table the last stage has a copy of its own.
    tables = first + (last and not (shape.tied and first))
    layers = stages(shape, layout)[stage]
    dense = tables * table + sum(_dense(shape, layer, layout.tp) for layer in layers)
    dense += shape.norm_vectors * shape.hidden * last
    experts = sum(shape.expert_parameters(layer) for layer in layers) / layout.ep
    matrices = [_largest(shape, layer, layout) for layer in layers]
    return Parameters(
        dense=dense,
        experts=experts,
        largest=max([*matrices, table * (first or last)]),
        replicas=layout.dp * layout.slot,
        expert_replicas=layout.tp * layout.dp * layout.slot // layout.ep,
    )


def _dense(shape: Shape, layer: Layer, tp: int) -> float:
    """Of a layer: matrices are cut by TP, norms, biases and the router are not."""
    router = shape.hidden * layer.mlp.experts
    cut = shape.attention_parameters(layer) + shape.dense_parameters(layer) - router
    return cut / tp + router + shape.small_parameters(layer)


def _largest(shape: Shape, layer: Layer, layout: Layout) -> float:
    mlp, sides = layer.mlp, 2 if layer.mlp.gated else 1
    attention = layer.attention.qkv_numbers if layer.attention is not None else 0
    one = max(sides * mlp.width, attention) / layout.tp
    return shape.hidden * max(one, sides * mlp.expert_width if mlp.experts else 0)
