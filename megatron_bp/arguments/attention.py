"""How attention is computed and what crosses ranks: its flags, what is refused, and the options."""

import argparse
import os
from argparse import Namespace
from collections.abc import Callable, Collection
from typing import Any

import torch

from megatron_bp.arguments.refused import no
from megatron_bp.attention.exchange import te
from megatron_bp.attention.exchange.choose import FORMS, ExchangeOptions, Form
from megatron_bp.attention.heads import refuse_heads
from megatron_bp.attention.kernels.choose import NAMES, choose
from megatron_bp.attention.kernels.self_test import self_test
from megatron_bp.attention.layout import AttentionOptions
from megatron_bp.attention.query_scale import QueryScale
from megatron_bp.parallel.mode import parallel_mode

CP_FORMS = ("all_gather", "p2p", "a2a", "clean_all_gather")


def add_attention_flags(group: Any) -> None:
    """The flags, into a group of Megatron's parser."""
    add = group.add_argument
    # Megatron has a flag of this name. Ours takes its place; Megatron's value keeps its default.
    group.conflict_handler = "resolve"
    add(
        "--cp-comm-type",
        dest="bdlm_cp_comm_type",
        choices=CP_FORMS,
        default="all_gather",
        help="How K/V cross ranks in mode CP (BP 1, CP above 1).",
    )
    group.conflict_handler = "error"
    add(
        "--clean-kv-exchange",
        choices=FORMS,
        default="auto",
        help="How clean K/V cross ranks. auto is needed_rows where that moves much less.",
    )
    add(
        "--clean-kv-rows",
        type=int,
        default=None,
        help="Rows of other ranks whose K/V arrive at once, then the next. Default: all at once.",
    )
    add(
        "--needed-rows-fraction",
        type=float,
        default=0.75,
        help="auto is needed_rows where no rank then sends or gets more than this part of all.",
    )
    add(
        "--keep-gathered-kv",
        action="store_true",
        help="Keep K/V of other ranks from forward to backward instead of fetching them again.",
    )
    add(
        "--recompute-keep-attention",
        action="store_true",
        help="Under full recompute, keep what attention made: its output and log-sum-exp.",
    )
    add(
        "--query-scale-beta",
        type=float,
        default=None,
        help="Queries are scaled by 1 + beta log(1 + floor(position / length)), as in Ministral 3.",
    )
    add(
        "--query-scale-length",
        type=int,
        default=None,
        help="The length above: the model's context before it was extended, in tokens.",
    )
    add(
        "--attention-kernel",
        choices=NAMES,
        default="auto",
        help="Attention kernel. auto: sdpa on CPUs; on GPUs flash, or flex where flash cannot.",
    )


def megatron_defaults(parser: argparse.ArgumentParser) -> None:
    """What Megatron's own value of a flag that we took is."""
    parser.set_defaults(cp_comm_type=["p2p"])


def refuse_attention(
    args: Namespace, given: Collection[str], absent: Callable[[str], None] = no
) -> None:
    """Check the flags above.

    Args:
        args: as for `rules.refuse`.
        given: flags that were given.
        absent: as for `rules.refuse`.

    Raises:
        RefusedError: with the reason.
    """
    mode = parallel_mode(args.block_parallel_size, args.context_parallel_size)
    form = args.bdlm_cp_comm_type
    if "--cp-comm-type" in given and mode != "CP":
        no(
            f"--cp-comm-type {form}: says how mode CP exchanges (--block-parallel-size 1 and "
            f"--context-parallel-size above 1), and this run is {mode}; leave it out (clean K/V go "
            f"by --clean-kv-exchange)"
        )
    if mode == "CP":
        for flag in ("--clean-kv-exchange", "--needed-rows-fraction"):
            if flag in given:
                no(
                    f"{flag}: says how clean K/V cross ranks where blocks are whole, and this run "
                    f"is mode CP (--block-parallel-size 1); use --cp-comm-type, or set "
                    f"--block-parallel-size {args.context_parallel_size}"
                )
    if mode == "CP" and form == "a2a":
        _a2a(args)
    elif args.clean_kv_rows is not None and _form(args, mode) == "ring":
        no(
            f"--clean-kv-rows {args.clean_kv_rows}: a ring brings the rows of one rank at a time, "
            f"however many they are; leave it out, or choose another form"
        )
    if args.keep_gathered_kv and _all_recomputed(args):
        no(
            "--keep-gathered-kv: attention is recomputed in every layer, and K/V are fetched for "
            "that anyway and then kept until its backward; leave it out"
        )
    try:
        ExchangeOptions("auto", args.clean_kv_rows, args.needed_rows_fraction)
        _query_scale(args)
    except ValueError as error:
        no(str(error))
    try:
        if args.clean_kv_exchange == "te":
            te.collectives()
    except ValueError as error:
        absent(str(error))
    if args.recompute_keep_attention and args.recompute_granularity != "full":
        no(
            "--recompute-keep-attention: keeps attention's result where whole layers are "
            "recomputed; set --recompute-granularity full, or leave it out"
        )


def _all_recomputed(args: Namespace) -> bool:
    """Whether no forward of attention is followed by its backward."""
    if args.recompute_granularity == "full":
        return bool(args.recompute_method == "uniform")
    modules = args.recompute_modules or ["core_attn"]
    return args.recompute_granularity == "selective" and "core_attn" in modules


def _form(args: Namespace, mode: str) -> Form:
    """The form of exchange that is asked for."""
    if mode == "CP":
        return "ring" if args.bdlm_cp_comm_type == "p2p" else "all_gather"
    form: Form = args.clean_kv_exchange
    return form


def _a2a(args: Namespace) -> None:
    for flag, value in (
        ("--keep-gathered-kv", args.keep_gathered_kv),
        ("--clean-kv-rows", args.clean_kv_rows),
    ):
        if value:
            no(f"{flag} with --cp-comm-type a2a: no K/V are gathered there; leave it out")
    heads = args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    if heads is None:
        return  # refused elsewhere
    tp = args.tensor_model_parallel_size
    try:
        refuse_heads(heads // tp, groups // tp, args.context_parallel_size)
    except ValueError as error:
        no(str(error))


def aligns_chunks(args: Namespace) -> bool:
    """Whether this is mode CP with whole blocks."""
    mode = parallel_mode(args.block_parallel_size, args.bdlm_clean_shard_size)
    return mode == "CP" and args.bdlm_cp_comm_type == "clean_all_gather"


def exchange_options(args: Namespace) -> ExchangeOptions:
    """How K/V of other ranks come."""
    mode = parallel_mode(args.block_parallel_size, args.bdlm_clean_shard_size)
    return ExchangeOptions(_form(args, mode), args.clean_kv_rows, args.needed_rows_fraction)


def attention_options(args: Namespace) -> AttentionOptions:
    """What the attention module needs, from Megatron's validated arguments.

    Raises:
        ValueError: the kernel cannot do what the run needs.
    """
    mode = parallel_mode(args.block_parallel_size, args.bdlm_clean_shard_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernel = choose(args.attention_kernel, device, args.params_dtype, args.kv_channels)
    return AttentionOptions(
        kernel=kernel,
        exchange=exchange_options(args),
        over_heads=mode == "CP" and args.bdlm_cp_comm_type == "a2a",
        keep_gathered=args.keep_gathered_kv,
        keep_results=args.recompute_keep_attention,
        query_scale=_query_scale(args),
    )


def _query_scale(args: Namespace) -> QueryScale | None:
    """Of the queries.

    Raises:
        ValueError: one of its two numbers is not given, or means nothing.
    """
    beta, length = args.query_scale_beta, args.query_scale_length
    if beta is None and length is None:
        return None
    if beta is None or length is None:
        raise ValueError(
            f"--query-scale-beta {beta} with --query-scale-length {length}: the scale has both "
            f"numbers; give the other one too (llama_4_scaling_beta and "
            f"original_max_position_embeddings of a Hugging Face config)"
        )
    return QueryScale(beta, length)


def test_kernel(args: Namespace, options: AttentionOptions) -> None:
    """Compare the kernel with a dense softmax on this rank's device.

    Raises:
        RuntimeError: it is wrong there.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    heads, tp = args.num_attention_heads, args.tensor_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else heads
    shared = args.context_parallel_size if options.over_heads else 1
    self_test(
        options.kernel,
        device,
        args.params_dtype,
        args.kv_channels,
        heads // tp // shared,
        max(1, groups // tp // shared),
    )
