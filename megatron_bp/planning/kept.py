"""What a layer keeps of a row from its forward to its backward, and what its backward adds.

Counted as autograd saves it: every distinct tensor once, views with the whole that they hold.
Numbers are of one GPU and of the model's dtype, unless they are said to be wide. Megatron's local
layers keep more than Transformer Engine's.
"""

# Shapes: H hidden size, F hidden units of the MLP, Q query heads, K key heads, D head dimension.

from dataclasses import dataclass

from megatron_bp.planning.layout import Layout
from megatron_bp.planning.shape import Attention, Layer, Mlp, Shape
from megatron_bp.planning.task import Task


@dataclass(frozen=True)
class Numbers:
    """Numbers of a row.

    Attributes:
        hidden: of the hidden state as it stands between layers: H, or a TP rank's rows of it.
        attention: kept by norm and attention, the layer's input included.
        wide: kept by attention in the accumulation dtype: the log-sum-exp.
        mlp: kept by norm and MLP, or experts, their input included.
        queries: Q x D, of this rank.
        keys: numbers of K|V, of this rank.
        mlp_backward: what the backward of the MLP holds at its peak beyond what is kept.
    """

    hidden: float
    attention: float
    wide: float
    mlp: float
    queries: float
    keys: float
    mlp_backward: float

    @property
    def kept(self) -> float:
        """All of the layer that is of the model's dtype."""
        return self.attention + self.mlp


def numbers(task: Task, layout: Layout, layer: Layer) -> Numbers:
    """The numbers of a layer's row on one GPU."""
    shape, tp = task.shape, layout.tp
    hidden = hidden_numbers(shape, layout)
    norm = norm_numbers(task, layout)
    attention, wide, queries, keys = norm, 0.0, 0.0, 0.0
    if layer.attention is not None:
        own, wide = _attention(task, layer.attention, tp)
        attention += own
        queries = layer.attention.query_heads * layer.attention.head_dim / tp
        keys = key_numbers(layer.attention, tp)
    elif layer.mixer:
        # Unknown in detail: input and output of each of its matrices, about its weights over H.
        attention += layer.mixer / shape.hidden / tp
    return Numbers(
        hidden=hidden,
        attention=attention,
        wide=wide,
        mlp=norm + _mlp(task, layer.mlp, tp),
        queries=queries,
        keys=keys,
        mlp_backward=_mlp_backward(task, layout, layer.mlp),
    )


def hidden_numbers(shape: Shape, layout: Layout) -> float:
    """The hidden state of a row between layers."""
    return shape.hidden / (layout.tp if layout.sequence_parallel else 1)


def norm_numbers(task: Task, layout: Layout) -> float:
    """Kept by a norm: its input, its output (which the next product keeps), and what is between.

    Torch's RMSNorm on a CPU is no kernel of its own: it keeps its input and the rows before the
    scale in the accumulation dtype.
    """
    hidden = hidden_numbers(task.shape, layout)
    if task.fused or task.shape.norm_vectors > 1:
        return 2 * hidden
    return (1 + 2 * max(4, task.precision.model) / task.precision.model) * hidden


def key_numbers(attention: Attention, tp: int) -> float:
    """K|V of a row on one GPU: every TP rank has a key head at least."""
    return 2 * max(1, attention.key_heads // tp) * attention.head_dim


def _attention(task: Task, attention: Attention, tp: int) -> tuple[float, float]:
    """(numbers, wide numbers) that attention keeps of a row."""
    queries = attention.query_heads * attention.head_dim / tp
    keys = key_numbers(attention, tp)
    kept: float = 4 * attention.head_dim  # cosines and sines, once for queries and once for keys
    kept += queries + keys / 2  # rotated
    kept += queries * (2 if attention.output_gate else 1) + keys  # as projected: values are a view
    kept += queries  # the output, which the next product keeps as well
    if attention.norms:
        # Queries are copied for their norm; what is between is kept as above.
        kept += queries + (0 if task.fused else queries + keys / 2)
    if attention.output_gate:
        kept += 2 * queries  # the gate after its sigmoid, and what is gated
    return kept, attention.query_heads / tp


def _mlp(task: Task, mlp: Mlp, tp: int) -> float:
    """Of the MLP, the norm apart.

    Shared experts are cut by TP. Routed ones are not, but each TP rank brings its own rows to them.
    """
    kept = _units(task, mlp, routed=False) * mlp.width / tp
    if mlp.experts:
        routed = mlp.top_k * (task.shape.hidden + _units(task, mlp, True) * mlp.expert_width)
        kept += routed / tp
    return kept


def _units(task: Task, mlp: Mlp, routed: bool) -> int:
    """Numbers that are kept for each hidden unit.

    Fused: what the activation takes (two where it is gated), and what it gives. Else also the
    activated half, and the other with its offset added; and of a routed one before it is weighted.
    """
    if task.fused:
        return 3 if mlp.gated else 2
    return (5 if mlp.gated else 2) + routed


def _mlp_backward(task: Task, layout: Layout, mlp: Mlp) -> float:
    """Beyond what is kept, when the activation's gradient is formed.

    The gradient of the layer's output, which also goes round the MLP, and two gradients of the
    hidden units more than what has been let go by then. Of experts also what goes back to each;
    fused ones are computed together, others one by one.
    """
    held = hidden_numbers(task.shape, layout) + 2 * mlp.width / layout.tp
    if layout.sequence_parallel and layout.tp > 1:
        held += task.shape.hidden  # rows of all TP ranks, gathered for the product
    if mlp.experts:
        at_once = 1 if task.fused else layout.ep / mlp.experts
        routed = mlp.top_k * (task.shape.hidden + 2 * at_once * mlp.expert_width)
        held += routed / layout.tp
    return held
