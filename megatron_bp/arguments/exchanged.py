"""Bytes that attention sends, as --print-config tells them before anything runs."""

from argparse import Namespace
from collections import Counter
from dataclasses import dataclass

from megatron_bp.arguments.attention import attention_options
from megatron_bp.attention.core_attention import layer_window
from megatron_bp.attention.exchange.count import over_heads, sending
from megatron_bp.planning.layout import Split
from megatron_bp.planning.stages import deal
from megatron_bp.sequence.plan import RankRows, SequencePlan


@dataclass(frozen=True)
class Exchanged:
    """What the rank that sends most sends, of one sequence, in all its layers.

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
    stages = [
        Counter((layer_window(args, layer), again) for layer, again in stage)
        for stage in _layers_of_stages(args)
    ]
    if options.over_heads:
        every = tuple(shards)
        numbers = dtype.itemsize * max(
            over_heads(every, rank, heads // tp, groups, dim) for rank in range(len(shards))
        )
        forward = numbers * max(stage.total() for stage in stages)
        passes = max(sum((2 + again) * n for (_, again), n in s.items()) for s in stages)
        return Exchanged("a2a", row * dtype.itemsize, forward, numbers * passes)
    forms: list[str] = []
    in_a_forward = in_training = 0
    for stage in stages:
        for rank in range(len(shards)):
            group = tuple(shards[peer] for peer in plan.shard_group(rank))
            forward = training = 0
            for (window, again), count in stage.items():
                sent = sending(plan, group, rank, window, options.exchange)
                # What a forward keeps that will be recomputed is not there in the backward.
                fetches = 1 if options.keep_gathered and not again else 2
                forward += count * sent.bytes(row, dtype, 1, 0)
                training += count * sent.bytes(row, dtype, fetches, 1)
                forms.append(sent.form)
            in_a_forward, in_training = max(in_a_forward, forward), max(in_training, training)
    names = " and ".join(dict.fromkeys(forms))
    return Exchanged(names, row * dtype.itemsize, in_a_forward, in_training)


def _layers_of_stages(args: Namespace) -> list[list[tuple[int, bool]]]:
    """(number, whether attention is recomputed) of the layers of each pipeline rank.

    One rank with all of them, where a layout is written out by hand.
    """
    if args.pipeline_model_parallel_layout is not None:
        dealt = deal(args.num_layers, 1, Split())
    else:
        dealt = deal(args.num_layers, args.pipeline_model_parallel_size, split_of(args))
    return [
        [
            (number + 1, i < _recomputed(args, len(chunk)))
            for chunk in stage
            for i, number in enumerate(chunk)
        ]
        for stage in dealt
    ]


def split_of(args: Namespace) -> Split:
    """How Megatron's arguments say that stages share layers."""
    return Split(
        chunks=args.virtual_pipeline_model_parallel_size or 1,
        first=args.decoder_first_pipeline_num_layers,
        last=args.decoder_last_pipeline_num_layers,
        embedding=bool(args.account_for_embedding_in_pipeline_split),
        loss=bool(args.account_for_loss_in_pipeline_split),
    )


def _recomputed(args: Namespace, layers: int) -> int:
    """How many of so many layers of a chunk run attention's forward again: the first ones."""
    if args.recompute_granularity == "selective":
        return layers if "core_attn" in (args.recompute_modules or ["core_attn"]) else 0
    if args.recompute_granularity != "full":
        return 0
    return int(args.recompute_num_layers) if args.recompute_method == "block" else layers
