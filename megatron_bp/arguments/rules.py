"""What cannot work, and why: every refusal names the value, the rule and the way out.

Checked on the parsed flags before Megatron sees them, before anything is started.
"""

import importlib
import signal
from argparse import Namespace
from collections.abc import Collection
from typing import NoReturn

from megatron_bp import cpu
from megatron_bp.arguments.data_paths import data_prefixes, missing_files
from megatron_bp.arguments.experts import experts_refusal
from megatron_bp.arguments.flags import full_parser
from megatron_bp.arguments.ranges import out_of_range
from megatron_bp.parallel.state import parallel_mode


class RefusedError(ValueError):
    """A combination of flags that cannot be trained with."""


def refuse(args: Namespace, given: Collection[str] = ()) -> None:
    """Check what Megatron's own rules do not know of.

    Args:
        args: flags as parsed, with block_parallel_size and context_parallel_size (in this project's
            sense) resolved.
        given: names of the flags that were given.

    Raises:
        RefusedError: with the reason.
    """
    for message in out_of_range(args, full_parser()):
        _no(message)
    _parallel(args)
    _comm_type(args, given)
    _model(args)
    _training(args)
    _data(args)


def _no(message: str) -> NoReturn:
    raise RefusedError(message)


def _parallel(args: Namespace) -> None:
    try:
        parallel_mode(args.block_parallel_size, args.context_parallel_size)
    except ValueError as error:
        _no(str(error))
    _tensor_parallel(args)
    _pipeline(args)
    if (message := experts_refusal(args)) is not None:
        _no(message)
    if args.hybrid_context_parallel or args.hierarchical_context_parallel_sizes:
        _no(
            "--hybrid-context-parallel and --hierarchical-context-parallel-sizes shard rows in a "
            "way that block parallelism replaces; use --block-parallel-size"
        )
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if getattr(args, name, False):
            _no(f"--{name.replace('_', '-')}: not implemented yet; leave it out")
    for name in ("micro_batch_size", "eval_micro_batch_size"):
        if getattr(args, name) not in (None, 1):
            _no(
                f"--{name.replace('_', '-')} {getattr(args, name)}: a micro-batch is one packed "
                f"row; set 1 and raise --global-batch-size or --seq-length"
            )


def _comm_type(args: Namespace, given: Collection[str]) -> None:
    mode = parallel_mode(args.block_parallel_size, args.context_parallel_size)
    value = args.bdlm_cp_comm_type
    if "--cp-comm-type" in given and mode != "CP":
        _no(
            f"--cp-comm-type {value}: says how mode CP exchanges (--block-parallel-size 1 and "
            f"--context-parallel-size above 1), and this run is {mode}; leave it out (clean K/V go "
            f"by --clean-kv-exchange)"
        )
    if value != "all_gather":
        _no(f"--cp-comm-type {value}: not implemented yet; use all_gather, the default")


def _tensor_parallel(args: Namespace) -> None:
    tp = args.tensor_model_parallel_size
    if tp < 1:
        _no(f"--tensor-model-parallel-size {tp}: must be at least 1")
    if args.sequence_parallel and tp == 1:
        _no(
            "--sequence-parallel needs --tensor-model-parallel-size above 1: it shards rows over "
            "the tensor-parallel ranks; set that, or leave it out"
        )
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    counts = {
        "num_attention_heads": args.num_attention_heads,
        "num_query_groups": groups,
        "ffn_hidden_size": args.ffn_hidden_size,
    }
    for name, count in counts.items():
        if count is not None and count % tp:
            _no(
                f"--{name.replace('_', '-')} {count} with --tensor-model-parallel-size {tp}: each "
                f"of its ranks takes an equal share of them; choose a degree that divides {count}"
            )
    for name in ("defer_embedding_wgrad_compute", "tp_comm_overlap", "use_tp_pp_dp_mapping"):
        if getattr(args, name):
            _no(f"--{name.replace('_', '-')}: {_NOT_WITH_US[name]}; leave it out")


_NOT_WITH_US = {
    "defer_embedding_wgrad_compute": "the gradient of the output weight is formed with the loss",
    "tp_comm_overlap": "its buffers have one size, and row counts vary from sample to sample",
    "use_tp_pp_dp_mapping": "ranks of a sequence would no longer stand side by side",
}


def _pipeline(args: Namespace) -> None:
    pp, layers = args.pipeline_model_parallel_size, args.num_layers
    if pp < 1:
        _no(f"--pipeline-model-parallel-size {pp}: must be at least 1")
    uneven = (
        args.decoder_first_pipeline_num_layers,
        args.decoder_last_pipeline_num_layers,
        args.pipeline_model_parallel_layout,
        args.account_for_embedding_in_pipeline_split or None,
        args.account_for_loss_in_pipeline_split or None,
    )
    by_hand = any(value is not None for value in uneven)
    if layers is not None and layers % pp and not by_hand:
        _no(
            f"--num-layers {layers} with --pipeline-model-parallel-size {pp}: stages hold equally "
            f"many layers; choose a degree that divides {layers}, or say how many the first or "
            f"last holds with --decoder-first-pipeline-num-layers"
        )
    chunks = args.num_virtual_stages_per_pipeline_rank
    size = args.num_layers_per_virtual_pipeline_stage
    if chunks is None and size is None:
        return
    if pp == 1:
        _no(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
            "cut a pipeline stage in chunks, and --pipeline-model-parallel-size is 1; leave out"
        )
    if layers is not None and not by_hand and (layers // pp) % (size or chunks or 1):
        _no(
            f"--num-layers {layers} over {pp} stages makes {layers // pp} layers a stage, which "
            f"do not divide into chunks: --num-layers-per-virtual-pipeline-stage and "
            f"--num-virtual-stages-per-pipeline-rank must divide {layers // pp}"
        )


def refuse_world(args: Namespace, world_size: int) -> None:
    """Check the degrees against the number of ranks that were started.

    Raises:
        RefusedError: they do not multiply to it.
    """
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    slot = max(args.block_parallel_size, args.context_parallel_size)
    together = tp * pp * slot
    if world_size % together:
        _no(
            f"{world_size} ranks were started, and {together} work on a sequence "
            f"(--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} x "
            f"{slot} of --block-parallel-size {args.block_parallel_size} and "
            f"--context-parallel-size {args.context_parallel_size}): start a multiple of "
            f"{together} (torchrun --nproc-per-node), or change a degree"
        )
    if world_size % args.expert_model_parallel_size:
        _no(
            f"--expert-model-parallel-size {args.expert_model_parallel_size}: {world_size} ranks "
            f"were started, and that many share the experts; it must divide them"
        )
    data = world_size // together
    batch = args.global_batch_size
    if batch is not None and batch % data:
        _no(
            f"--global-batch-size {batch}: {world_size} ranks work on {data} "
            f"sequences at a time; make it a multiple of {data}"
        )
    chunks = args.num_virtual_stages_per_pipeline_rank or args.num_layers_per_virtual_pipeline_stage
    if batch is not None and chunks is not None and (batch // data) % pp:
        _no(
            f"--global-batch-size {batch}: interleaved stages take micro-batches in groups of "
            f"{pp}, and each of {data} data-parallel ranks has {batch // data}; make it a multiple "
            f"of {data * pp}"
        )


def _model(args: Namespace) -> None:
    if args.transformer_impl == "transformer_engine":
        missing = transformer_engine_missing()
        if missing is not None:
            _no(f"--transformer-impl transformer_engine: {missing}; use local, which needs nothing")
    elif args.transformer_impl != "local":
        _no(f"--transformer-impl {args.transformer_impl}: use local or transformer_engine")
    if args.transformer_impl == "local" and args.layernorm_zero_centered_gamma:
        _no(
            "--apply-layernorm-1p: the local layers have no zero-centered norm; leave it out, or "
            "use --transformer-impl transformer_engine"
        )
    if args.spec is not None:
        _no(f"--spec {args.spec}: the layer spec is this plugin's own; leave it out")
    if args.attention_backend.name == "local":
        _no(
            "--attention-backend local makes Megatron overwrite the core attention that block "
            "diffusion needs; leave it out and choose with --attention-kernel"
        )
    if args.attention_backend.name != "auto":
        _no(
            f"--attention-backend {args.attention_backend.name}: chooses among the attentions of "
            f"Transformer Engine, which block diffusion replaces; leave it out"
        )
    if args.bf16 and args.fp32_residual_connection:
        _no(
            "--fp32-residual-connection with --bf16: the norms of Megatron's local layer spec take "
            "one dtype only; leave it out"
        )
    if "layernorm" in (args.recompute_modules or ()) and args.transformer_impl == "local":
        _no(
            "--recompute-modules layernorm: Megatron's local layer spec has no such norm; leave out"
        )
    if args.cross_entropy_loss_fusion:
        _no(
            "--cross-entropy-loss-fusion: of Megatron's own output step, which is replaced by one "
            "that never keeps logits; leave it out"
        )
    if args.check_for_spiky_loss:
        _no(
            "--check-for-spiky-loss: of Megatron's own loss function, which is replaced; NaN and "
            "infinite losses are caught by --on-nonfinite; leave it out"
        )
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(args, name) > 0:
            _no(
                f"--{name.replace('_', '-')} {getattr(args, name)}: the ranks that share a "
                f"sequence share one seed, so dropout would depend on the layout; set 0"
            )
    if args.mtp_num_layers:
        _no(
            f"--mtp-num-layers {args.mtp_num_layers}: multi-token prediction shifts rows against "
            f"each other, which corrupted blocks do not allow; leave it out"
        )
    if args.multi_latent_attention:
        _no("--multi-latent-attention: exchanging latent K/V is not implemented; leave it out")
    if args.experimental_attention_variant:
        _no(
            f"--experimental-attention-variant {args.experimental_attention_variant}: a corrupted "
            f"block has no prefix state or index to read from; leave it out"
        )
    if args.cuda_graph_impl != "none" or args.enable_cuda_graph or args.external_cuda_graph:
        _no("CUDA graphs fix the row counts, which vary from sample to sample; leave them out")
    if args.softmax_type != "vanilla":
        _no(f"--softmax-type {args.softmax_type}: attention sinks are not implemented; use vanilla")
    if args.position_embedding_type not in ("rope", "none", "learned_absolute"):
        _no(
            f"--position-embedding-type {args.position_embedding_type}: not implemented; use rope, "
            f"none or learned_absolute"
        )
    if args.fp16:
        _no("--fp16: the loss head forms gradients before the loss scale is applied; use --bf16")
    if args.use_mup:
        _no("--use-mup: scales the logits in Megatron's own output step, which is replaced")
    if args.hybrid_layer_pattern or args.hybrid_override_pattern or args.is_hybrid_model:
        _no("hybrid (Mamba) models: a corrupted block needs the prefix's state; use a GPT model")
    if args.window_size is not None and (args.window_size[0] < 0 or args.window_size[1] != 0):
        _no(
            f"--window-size {args.window_size}: the first number is the window minus 1, at least "
            f"0; the second, tokens to the right, must be 0: what a row sees there is its block's"
        )
    _heads(args)
    if args.qk_l2_norm:
        _no("--qk-l2-norm: Megatron's local layer spec leaves it out; use --qk-layernorm")
    if not 0 < args.rotary_percent <= 1:
        _no(f"--rotary-percent {args.rotary_percent}: must be above 0 and at most 1")
    if args.fp8 or args.fp4:
        _no("--fp8-format / --fp4-format: not tried with block diffusion; use --bf16")


def transformer_engine_missing() -> str | None:
    """Why Transformer Engine cannot be used here, and the way to it; None if it can."""
    if cpu.needed():
        return "its layers run on GPUs alone, and torch finds no CUDA device"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # its own loader raises RuntimeError, OSError and others
        return (
            f"Transformer Engine does not import here ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}); install it for this torch and CUDA, "
            f"`pip install --no-build-isolation transformer-engine[pytorch]`"
        )
    return None


def _heads(args: Namespace) -> None:
    heads, groups = args.num_attention_heads, args.num_query_groups
    if heads is None or args.hidden_size is None:
        return  # Megatron names what is missing
    if args.group_query_attention and heads % groups:
        _no(
            f"--num-query-groups {groups}: {heads} query heads (--num-attention-heads) cannot be "
            f"shared out evenly; choose a divisor of {heads}"
        )
    if args.kv_channels is None and args.hidden_size % heads:
        _no(
            f"--hidden-size {args.hidden_size} with --num-attention-heads {heads}: does not "
            f"divide; change one, or give the size of a head with --kv-channels"
        )
    dim = int((args.kv_channels or args.hidden_size // heads) * args.rotary_percent)
    if args.position_embedding_type == "rope" and (dim < 2 or dim % 2):
        _no(
            f"rotary turns pairs of {dim} channels a head: make that an even number, at least 2 "
            f"(--kv-channels, or --hidden-size / --num-attention-heads, x --rotary-percent)"
        )


def _training(args: Namespace) -> None:
    if args.optimizer not in ("adam", "sgd"):
        _no(f"--optimizer {args.optimizer}: not implemented; use adam or sgd")
    decay = args.lr_decay_iters or args.train_iters
    if decay is not None and args.lr_warmup_iters and args.lr_warmup_iters >= decay:
        _no(
            f"--lr-warmup-iters {args.lr_warmup_iters}: must be below the {decay} steps in which "
            f"the learning rate decays (--lr-decay-iters, else --train-iters)"
        )
    if args.exit_signal in (signal.SIGKILL, signal.SIGSTOP):
        _no(
            f"--exit-signal {signal.Signals(args.exit_signal).name}: no process can act on it; "
            f"choose one such as SIGTERM or SIGUSR1"
        )
    if args.wandb_project and not args.wandb_exp_name:
        _no(f"--wandb-project {args.wandb_project} needs --wandb-exp-name")


def _data(args: Namespace) -> None:
    if args.diffusion_block_size < 1:
        _no(f"--diffusion-block-size {args.diffusion_block_size}: must be at least 1")
    if args.mask_token_id is None:
        _no(
            "--mask-token-id is not set: corrupted tokens become this id; give the id of the "
            "tokenizer's mask token, an id that no text holds"
        )
    if args.ar_loss_weight > 0 and args.clean_relation != "token":
        _no(
            f"--ar-loss-weight {args.ar_loss_weight} with --clean-relation {args.clean_relation}: "
            f"a clean row sees the rest of its block, so it would see the token it predicts; use "
            f"--clean-relation token"
        )
    if args.seq_length is None or args.seq_length < 1:
        _no(f"--seq-length {args.seq_length}: give the packed length of a row in clean tokens")
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "fim_data"):
        if getattr(args, name, False):
            _no(
                f"--{name.replace('_', '-')}: is of Megatron's own samples; here every document "
                f"has its own positions, sees itself alone and is scored whole: leave it out"
            )
    if args.full_validation:
        _no("--full-validation: not implemented yet; set --eval-iters to the rows of the split")
    if args.dataloader_type not in (None, "single"):
        _no(
            f"--dataloader-type {args.dataloader_type}: rows come from --data-path, shuffled there "
            f"once an epoch, and evaluations read theirs in order; leave it out"
        )
    if args.yaml_cfg is not None:
        _no(f"--yaml-cfg {args.yaml_cfg}: give the config file as the first argument")
    if args.ckpt_format != "torch_dist":
        _no(f"--ckpt-format {args.ckpt_format}: only torch_dist is supported; leave it out")
    if args.save and not args.save_interval:
        _no(f"--save {args.save} without --save-interval: say how many steps lie between saves")
    if args.train_samples is not None and args.train_iters is not None:
        _no(
            f"--train-samples {args.train_samples} with --train-iters {args.train_iters}: both say "
            f"how long the run is; give one"
        )
    if args.multiple_validation_sets:
        _no("--multiple-validation-sets: not implemented yet; give one blend of validation data")
    if args.sft:
        _no("--sft: Megatron's own fine-tuning averages means of micro-batches; not supported")
    if args.mock_data:
        _no("--mock-data: there is no made-up data; prepare some with megatron_bp.tools.prepare")
    try:
        prefixes = data_prefixes(args)
    except ValueError as error:
        _no(str(error))
    if not prefixes:
        _no(
            "no data: give --data-path PREFIX of a .bin/.idx pair; "
            "`python -m megatron_bp.tools.prepare` makes one"
        )
    if (missing := missing_files(prefixes)) is not None:
        _no(
            f"{missing}: no such file; --data-path takes the prefix of a .bin/.idx pair "
            f"(`python -m megatron_bp.tools.prepare` makes one)"
        )
