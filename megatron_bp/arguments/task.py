"""Megatron's arguments to what the planner knows of a run: its task and its layout.

The planner, --dry-run and the report of a run all come this way. Arguments may be Megatron's, which
are validated, or parsed alone (`parse.parsed`): what validation would fill in is filled in here.
"""

import math
from argparse import Namespace

from megatron_bp.arguments.attention import aligns_chunks, exchange_options
from megatron_bp.arguments.build import moe_layers, sequence_options
from megatron_bp.arguments.exchanged import split_of
from megatron_bp.attention.core_attention import layer_window
from megatron_bp.parallel.mode import parallel_mode
from megatron_bp.planning.layout import Layout, Recompute
from megatron_bp.planning.shape import Attention, Layer, Mlp, Shape
from megatron_bp.planning.task import Precision, Task


def task_of(args: Namespace) -> Task:
    """What is to be trained.

    Raises:
        ValueError: it is no block diffusion, or the size of the vocabulary is not known.
    """
    if args.objective == "ar":
        raise ValueError(
            "--objective ar: that is Megatron's own model and parallelism, which the planner does "
            "not count; plan the block diffusion run that follows"
        )
    args = filled(args)
    return Task(
        shape=_shape(args),
        sequence=sequence_options(args),
        length=args.bdlm_seq_length,
        global_batch=args.global_batch_size,
        precision=_precision(args),
        distributed_optimizer=args.use_distributed_optimizer,
        fused=args.transformer_impl == "transformer_engine",
        scored=0.5 if args.scored_tokens == "corrupted" else 1.0,
    )


def layout_of(args: Namespace, gpus: int | None = None) -> Layout:
    """How its ranks share a step.

    Args:
        args: see the top of this file.
        gpus: how many, where validation has not told it: then by default as few as the degrees
            allow.

    Raises:
        ValueError: the degrees do not multiply to `gpus`, or the batch cannot be dealt out.
    """
    args = filled(args)
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    bp, cp = args.block_parallel_size, args.bdlm_clean_shard_size
    together = tp * pp * max(bp, cp)
    dp = getattr(args, "data_parallel_size", None)
    if dp is None or gpus is not None:
        gpus = gpus or together
        dp = gpus // together
        if gpus % together or dp == 0:
            raise ValueError(
                f"{gpus} GPUs, and the degrees TP {tp}, PP {pp}, BP {bp}, CP {cp} take "
                f"{together}: give a multiple of it"
            )
    rows = dp * args.micro_batch_size
    if args.global_batch_size % rows:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size}: {dp} replicas work on {rows} rows at a "
            f"time (--micro-batch-size {args.micro_batch_size}); make it a multiple of {rows}"
        )
    return Layout(
        tp=tp,
        pp=pp,
        ep=args.expert_model_parallel_size,
        dp=dp,
        bp=bp,
        cp=cp,
        sequence_parallel=args.sequence_parallel and tp > 1,
        exchange=exchange_options(args),
        over_heads=parallel_mode(bp, cp) == "CP" and args.bdlm_cp_comm_type == "a2a",
        aligned=aligns_chunks(args),
        recompute=_recompute(args),
        keep_attention=args.recompute_keep_attention,
        keep_gathered=args.keep_gathered_kv,
        split=split_of(args),
        micro_batch=args.micro_batch_size,
        micro_batches=args.global_batch_size // rows,
    )


def filled(args: Namespace) -> Namespace:
    """A copy in which what Megatron's validation fills in is there."""
    out = Namespace(**vars(args))
    if not hasattr(out, "bdlm_seq_length"):
        out.bdlm_seq_length = out.seq_length
    if not hasattr(out, "bdlm_clean_shard_size"):
        out.bdlm_clean_shard_size = out.context_parallel_size
    if out.ffn_hidden_size is None:
        wide = 4 * out.hidden_size
        out.ffn_hidden_size = int(wide * 2 / 3 / 64) * 64 if out.swiglu else wide
    if out.kv_channels is None:
        out.kv_channels = out.hidden_size // out.num_attention_heads
    if out.num_experts and out.moe_ffn_hidden_size is None:
        out.moe_ffn_hidden_size = out.ffn_hidden_size
    if out.global_batch_size is None:
        out.global_batch_size = out.micro_batch_size * (getattr(out, "data_parallel_size", 0) or 1)
    if not hasattr(out, "virtual_pipeline_model_parallel_size"):
        size = out.num_layers_per_virtual_pipeline_stage
        chunks = size and out.num_layers // out.pipeline_model_parallel_size // size
        out.virtual_pipeline_model_parallel_size = (
            out.num_virtual_stages_per_pipeline_rank or chunks
        )
    if getattr(out, "recompute_activations", False):
        out.recompute_granularity = "selective"
    return out


def _shape(args: Namespace) -> Shape:
    window_of = Namespace(**vars(args))  # Megatron's names of what layer_window reads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    sparse = moe_layers(args)

    def layer(number: int) -> Layer:
        attention = Attention(
            query_heads=args.num_attention_heads,
            key_heads=groups,
            head_dim=args.kv_channels,
            window=layer_window(window_of, number),
            output_gate=bool(getattr(args, "attention_output_gate", False)),
            norms=args.qk_layernorm,
            bias=args.add_qkv_bias,
        )
        if not sparse[number - 1]:
            return Layer(attention, Mlp(args.ffn_hidden_size, gated=args.swiglu))
        mlp = Mlp(
            width=args.moe_shared_expert_intermediate_size or 0,
            experts=args.num_experts,
            top_k=args.moe_router_topk,
            expert_width=args.moe_ffn_hidden_size,
            gated=args.swiglu,
        )
        return Layer(attention, mlp)

    return Shape(
        name=f"{args.num_layers} layers of {args.hidden_size}",
        hidden=args.hidden_size,
        vocabulary=_padded_vocabulary(args),
        tied=not args.untie_embeddings_and_output_weights,
        layers=tuple(layer(number) for number in range(1, args.num_layers + 1)),
        norm_vectors=2 if args.normalization == "LayerNorm" else 1,
        bias=args.add_bias_linear,
    )


def _padded_vocabulary(args: Namespace) -> int:
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    true = getattr(args, "bdlm_vocabulary", None) or args.vocab_size
    if true is None:
        true = _vocabulary_of_tokenizer(args)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(math.ceil(true / multiple) * multiple)


def _vocabulary_of_tokenizer(args: Namespace) -> int:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    try:
        return int(build_tokenizer(Namespace(**vars(args))).vocab_size)
    except Exception as error:  # of whatever library reads it
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type}, --tokenizer-model {args.tokenizer_model}: "
            f"cannot be read here ({type(error).__name__}: {error}), and --vocab-size is not "
            f"given; give one of them"
        ) from error


def _precision(args: Namespace) -> Precision:
    moments = 8 if args.optimizer == "adam" else 4 * (args.sgd_momentum > 0)
    if not (args.bf16 or args.fp16):
        return Precision(model=4, gradient=4, optimizer=moments)
    return Precision(2, 2 if args.grad_reduce_in_bf16 else 4, 4 + moments)


def _recompute(args: Namespace) -> Recompute:
    """What is recomputed; some layers of a stage alone (method block) count as all of them."""
    if args.recompute_granularity == "full":
        return "full"
    if args.recompute_granularity != "selective":
        return "none"
    return "attention" if "core_attn" in (args.recompute_modules or ["core_attn"]) else "none"
