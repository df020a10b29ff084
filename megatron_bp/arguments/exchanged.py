"""Bytes that attention sends, as --print-config tells them before anything runs."""

from argparse import Namespace
from collections import Counter
from dataclasses import dataclass

from megatron_bp.arguments.attention import attention_options
from megatron_bp.attention.core_attention import layer_window
from megatron_bp.attention.exchange.count import over_heads, sending
from megatron_bp.sequence.plan import RankRows, SequencePlan


@dataclass(frozen=True)
class Exchanged:
    """What the rank that sends most sends, of one sequence, in all layers of a stage.

    Attributes:
        form: how it goes; two names where layers with a window go another way.
        row_bytes: K|V of a row in one layer.
        in_a_forward: bytes of a forward alone.
        in_training: bytes of a forward and a backward.
    """

    form: str
    row_bytes: int
    in_a_forward: int
    in_training: int


def exchanged(args: Namespace, plan: SequencePlan, shards: list[RankRows]) -> Exchanged:
    """Counted in a plan.

    Args:
        args: Megatron's validated arguments.
        plan: of one sequence.
        shards: the rows of each rank of its slot.
    """
    options, tp = attention_options(args), args.tensor_model_parallel_size
    heads = args.num_attention_heads
    groups = (args.num_query_groups if args.group_query_attention else heads) // tp
    dtype, dim = args.params_dtype, args.kv_channels
    row = 2 * groups * dim
    layers = _layers_of_a_stage(args)
    if options.over_heads:
        every = tuple(shards)
        numbers = max(
            over_heads(every, rank, heads // tp, groups, dim) for rank in range(len(shards))
        )
        forward = layers * numbers * dtype.itemsize
        again = 2 if args.recompute_granularity == "full" else 1
        return Exchanged("a2a", row * dtype.itemsize, forward, (1 + again) * forward)
    windows = Counter(layer_window(args, number) for number in range(1, layers + 1))
    forms = []
    forward = [0] * len(shards)
    training = [0] * len(shards)
    for window, count in windows.items():
        for rank in range(len(shards)):
            group = tuple(shards[peer] for peer in plan.shard_group(rank))
            sent = sending(plan, group, rank, window, options.exchange)
            fetches = 1 if options.keep_gathered else 2
            forward[rank] += count * sent.bytes(row, dtype, 1, 0)
            training[rank] += count * sent.bytes(row, dtype, fetches, 1)
            forms.append(sent.form)
    names = " and ".join(dict.fromkeys(forms))
    return Exchanged(names, row * dtype.itemsize, max(forward), max(training))


def _layers_of_a_stage(args: Namespace) -> int:
    """Of the pipeline rank that has most; all, where a layout is written out by hand."""
    if args.pipeline_model_parallel_layout is not None:
        return int(args.num_layers)
    ends = (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
    given = [int(layers) for layers in ends if layers is not None]
    between = args.pipeline_model_parallel_size - len(given)
    rest = -(-(args.num_layers - sum(given)) // between) if between else 0
    return max([*given, rest])
