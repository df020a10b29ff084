"""What cannot work, and why: every refusal names the value, the rule and the way out.

Checked on the parsed flags before Megatron sees them, before anything is started. Single values
are in `ranges.py`, parallel degrees in `degrees.py`, mixtures of experts in `experts.py`.
"""

import importlib
import signal
from argparse import Namespace
from collections.abc import Collection

from megatron_bp import cpu
from megatron_bp.arguments.absent import Absent
from megatron_bp.arguments.ar import refuse_ar
from megatron_bp.arguments.chats import refuse_chats
from megatron_bp.arguments.data_paths import (
    AbsentError,
    data_prefixes,
    lacking,
    prefixes_here,
)
from megatron_bp.arguments.degrees import refuse_degrees
from megatron_bp.arguments.flags import full_parser
from megatron_bp.arguments.ranges import out_of_range
from megatron_bp.arguments.refused import no
from megatron_bp.arguments.self_conditioning import conditioning_refusal


def refuse(args: Namespace, given: Collection[str] = (), absent: Absent = no) -> None:
    """Check what Megatron's own rules do not know of.

    Args:
        args: flags as parsed, with block_parallel_size and context_parallel_size (in this project's
            sense) resolved.
        given: names of the flags that were given.
        absent: told of what a run needs and this machine lacks.

    Raises:
        RefusedError: with the reason.
    """
    for message in out_of_range(args, full_parser()):
        no(message)
    refuse_degrees(args, given, absent)
    if (reason := conditioning_refusal(args)) is not None:
        no(reason)
    if args.objective == "ar":
        refuse_ar(args, given)
    _model(args, absent)
    _training(args)
    _data(args, given, absent)


def _model(args: Namespace, absent: Absent) -> None:
    if args.transformer_impl == "transformer_engine":
        missing = transformer_engine_missing()
        if missing is not None:
            absent(
                f"--transformer-impl transformer_engine: {missing}; use local, which needs nothing"
            )
    elif args.transformer_impl != "local":
        no(f"--transformer-impl {args.transformer_impl}: use local or transformer_engine")
    if args.transformer_impl == "local" and args.layernorm_zero_centered_gamma:
        no(
            "--apply-layernorm-1p: the local layers have no zero-centered norm; leave it out, or "
            "use --transformer-impl transformer_engine"
        )
    if args.spec is not None:
        no(f"--spec {args.spec}: the layer spec is this plugin's own; leave it out")
    if args.attention_backend.name == "local":
        no(
            "--attention-backend local makes Megatron overwrite the core attention that block "
            "diffusion needs; leave it out and choose with --attention-kernel"
        )
    if args.attention_backend.name != "auto":
        no(
            f"--attention-backend {args.attention_backend.name}: chooses among the attentions of "
            f"Transformer Engine, which block diffusion replaces; leave it out"
        )
    if args.bf16 and args.fp32_residual_connection:
        no(
            "--fp32-residual-connection with --bf16: the norms of Megatron's local layer spec take "
            "one dtype only; leave it out"
        )
    if "layernorm" in (args.recompute_modules or ()) and args.transformer_impl == "local":
        no("--recompute-modules layernorm: Megatron's local layer spec has no such norm; leave out")
    if args.cross_entropy_loss_fusion:
        no(
            "--cross-entropy-loss-fusion: of Megatron's own output step, which is replaced by one "
            "that never keeps logits; leave it out"
        )
    if args.check_for_spiky_loss:
        no(
            "--check-for-spiky-loss: of Megatron's own loss function, which is replaced; NaN and "
            "infinite losses are caught by --on-nonfinite; leave it out"
        )
    for name in ("attention_dropout", "hidden_dropout"):
        if getattr(args, name) > 0:
            no(
                f"--{name.replace('_', '-')} {getattr(args, name)}: the ranks that share a "
                f"sequence share one seed, so dropout would depend on the layout; set 0"
            )
    if args.mtp_num_layers:
        no(
            f"--mtp-num-layers {args.mtp_num_layers}: multi-token prediction shifts rows against "
            f"each other, which corrupted blocks do not allow; leave it out"
        )
    if args.multi_latent_attention:
        no("--multi-latent-attention: exchanging latent K/V is not implemented; leave it out")
    if args.experimental_attention_variant:
        no(
            f"--experimental-attention-variant {args.experimental_attention_variant}: a corrupted "
            f"block has no prefix state or index to read from; leave it out"
        )
    if args.cuda_graph_impl != "none" or args.enable_cuda_graph or args.external_cuda_graph:
        no("CUDA graphs fix the row counts, which vary from sample to sample; leave them out")
    if args.softmax_type != "vanilla":
        no(f"--softmax-type {args.softmax_type}: attention sinks are not implemented; use vanilla")
    if args.position_embedding_type not in ("rope", "yarn", "none", "learned_absolute"):
        no(
            f"--position-embedding-type {args.position_embedding_type}: not implemented; use rope, "
            f"yarn, none or learned_absolute"
        )
    if args.fp16:
        no("--fp16: the loss head forms gradients before the loss scale is applied; use --bf16")
    if args.use_mup:
        no("--use-mup: scales the logits in Megatron's own output step, which is replaced")
    if args.hybrid_layer_pattern or args.hybrid_override_pattern or args.is_hybrid_model:
        no("hybrid (Mamba) models: a corrupted block needs the prefix's state; use a GPT model")
    if args.window_size is not None and (args.window_size[0] < 0 or args.window_size[1] != 0):
        no(
            f"--window-size {args.window_size}: the first number is the window minus 1, at least "
            f"0; the second, tokens to the right, must be 0: what a row sees there is its block's"
        )
    _heads(args)
    if args.qk_l2_norm:
        no("--qk-l2-norm: Megatron's local layer spec leaves it out; use --qk-layernorm")
    if not 0 < args.rotary_percent <= 1:
        no(f"--rotary-percent {args.rotary_percent}: must be above 0 and at most 1")
    if args.fp8 or args.fp4:
        no("--fp8-format / --fp4-format: not tried with block diffusion; use --bf16")


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
        no(
            f"--num-query-groups {groups}: {heads} query heads (--num-attention-heads) cannot be "
            f"shared out evenly; choose a divisor of {heads}"
        )
    if args.kv_channels is None and args.hidden_size % heads:
        no(
            f"--hidden-size {args.hidden_size} with --num-attention-heads {heads}: does not "
            f"divide; change one, or give the size of a head with --kv-channels"
        )
    dim = int((args.kv_channels or args.hidden_size // heads) * args.rotary_percent)
    if args.position_embedding_type in ("rope", "yarn") and (dim < 2 or dim % 2):
        no(
            f"rotary turns pairs of {dim} channels a head: make that an even number, at least 2 "
            f"(--kv-channels, or --hidden-size / --num-attention-heads, x --rotary-percent)"
        )


def _training(args: Namespace) -> None:
    if args.optimizer not in ("adam", "sgd"):
        no(f"--optimizer {args.optimizer}: not implemented; use adam or sgd")
    decay = args.lr_decay_iters or args.train_iters
    if decay is not None and args.lr_warmup_iters and args.lr_warmup_iters >= decay:
        no(
            f"--lr-warmup-iters {args.lr_warmup_iters}: must be below the {decay} steps in which "
            f"the learning rate decays (--lr-decay-iters, else --train-iters)"
        )
    if args.exit_signal in (signal.SIGKILL, signal.SIGSTOP):
        no(
            f"--exit-signal {signal.Signals(args.exit_signal).name}: no process can act on it; "
            f"choose one such as SIGTERM or SIGUSR1"
        )
    if args.wandb_project and not args.wandb_exp_name:
        no(f"--wandb-project {args.wandb_project} needs --wandb-exp-name")


def _data(args: Namespace, given: Collection[str], absent: Absent) -> None:
    if args.diffusion_block_size < 1:
        no(f"--diffusion-block-size {args.diffusion_block_size}: must be at least 1")
    if args.mask_token_id is None and args.objective != "ar":
        no(
            "--mask-token-id is not set: corrupted tokens become this id; give the id of the "
            "tokenizer's mask token, an id that no text holds"
        )
    if args.ar_loss_weight > 0 and args.clean_relation != "token":
        no(
            f"--ar-loss-weight {args.ar_loss_weight} with --clean-relation {args.clean_relation}: "
            f"a clean row sees the rest of its block, so it would see the token it predicts; use "
            f"--clean-relation token"
        )
    if args.complementary_copies and args.corrupted_copies % 2:
        no(
            f"--complementary-copies with --corrupted-copies {args.corrupted_copies}: copies come "
            f"in pairs, of which the second corrupts what the first left; give an even number"
        )
    if args.seq_length is None or args.seq_length < 1:
        no(f"--seq-length {args.seq_length}: give the packed length of a row in clean tokens")
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "fim_data"):
        if getattr(args, name, False):
            no(
                f"--{name.replace('_', '-')}: is of Megatron's own samples; here every document "
                f"has its own positions, sees itself alone and is scored whole: leave it out"
            )
    if args.full_validation:
        no("--full-validation: not implemented yet; set --eval-iters to the rows of the split")
    if args.dataloader_type not in (None, "single"):
        no(
            f"--dataloader-type {args.dataloader_type}: rows come from --data-path, shuffled there "
            f"once an epoch, and evaluations read theirs in order; leave it out"
        )
    if args.yaml_cfg is not None:
        no(f"--yaml-cfg {args.yaml_cfg}: give the config file as the first argument")
    if args.ckpt_format != "torch_dist":
        no(f"--ckpt-format {args.ckpt_format}: only torch_dist is supported; leave it out")
    if args.save and not args.save_interval:
        no(f"--save {args.save} without --save-interval: say how many steps lie between saves")
    if args.train_samples is not None and args.train_iters is not None:
        no(
            f"--train-samples {args.train_samples} with --train-iters {args.train_iters}: both say "
            f"how long the run is; give one"
        )
    if args.multiple_validation_sets:
        no("--multiple-validation-sets: not implemented yet; give one blend of validation data")
    if args.sft:
        no("--sft: Megatron's own fine-tuning averages means of micro-batches; not supported")
    if args.mock_data:
        no("--mock-data: there is no made-up data; prepare some with megatron_bp.tools.prepare")
    try:
        prefixes = data_prefixes(args)
    except AbsentError as error:
        return absent(str(error))
    except ValueError as error:
        no(str(error))
    if not prefixes:
        no(
            "no data: give --data-path PREFIX of a .bin/.idx pair; "
            "`python -m megatron_bp.tools.prepare` makes one"
        )
    if (missing := lacking(args)) is not None:
        absent(missing)
    refuse_chats(args, prefixes_here(args), given)
