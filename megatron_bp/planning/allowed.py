"""Which layouts training accepts, told from the model and the degrees alone.

The same rules as arguments/degrees.py, attention.py and experts.py, where they are told in flags; a
test holds the two together. Only keeping TP inside a node is the planner's own.
"""

from megatron_bp.attention.heads import refuse_heads
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.stages import deal
from megatron_bp.planning.task import Task


def refusal(task: Task, layout: Layout, gpus_per_node: int) -> str | None:
    """Why a layout cannot be trained with, in a few words; None if it can.

    Args:
        task: the model and the global batch.
        layout: its `micro_batches` are not looked at.
        gpus_per_node: ranks of a node.
    """
    return (
        _tensor_parallel(task, layout, gpus_per_node)
        or _pipeline(task, layout)
        or _experts(task, layout)
        or _heads(task, layout)
        or _batch(task, layout)
    )


def _tensor_parallel(task: Task, layout: Layout, gpus_per_node: int) -> str | None:
    tp = layout.tp
    if tp == 1:
        return "sequence parallelism without TP" if layout.sequence_parallel else None
    if gpus_per_node % tp:
        return f"TP {tp} would leave a node of {gpus_per_node} GPUs"
    for layer in task.shape.layers:
        counts = {"hidden units of an MLP": layer.mlp.width}
        if layer.attention is not None:
            counts["query heads"] = layer.attention.query_heads
            counts["key heads"] = layer.attention.key_heads
        for name, number in counts.items():
            if number % tp:
                return f"TP {tp} does not divide {number:,} {name}"
        if layer.mlp.experts and not layout.sequence_parallel:
            return "experts with TP need sequence parallelism"
    return None


def _pipeline(task: Task, layout: Layout) -> str | None:
    layers = len(task.shape.layers)
    try:
        deal(layers, layout.pp, layout.split)
    except ValueError:
        return f"PP {layout.pp} does not divide {layers} layers"
    return None


def _experts(task: Task, layout: Layout) -> str | None:
    ep, ranks = layout.ep, layout.tp * layout.slot * layout.dp
    if ep == 1:
        return None
    experts = {layer.mlp.experts for layer in task.shape.layers} - {0}
    if not experts:
        return "EP without experts"
    for number in sorted(experts):
        if number % ep:
            return f"EP {ep} does not divide {number} experts"
    if ranks % ep:
        return f"EP {ep} does not divide the ranks of a pipeline stage"
    return None


def _heads(task: Task, layout: Layout) -> str | None:
    if not layout.over_heads:
        return None
    for attention in {layer.attention for layer in task.shape.layers if layer.attention}:
        queries, keys = attention.query_heads // layout.tp, attention.key_heads // layout.tp
        try:
            refuse_heads(queries, keys, layout.cp)
        except ValueError:
            return f"a2a over {layout.cp} ranks with {queries} query and {keys} key heads of a rank"
    return None


def _batch(task: Task, layout: Layout) -> str | None:
    rows = layout.dp * layout.micro_batch
    if task.global_batch % rows:
        return (
            f"{rows} rows at a time (replicas x micro-batch) do not divide a global batch of "
            f"{task.global_batch}"
        )
    return None
