"""Megatron's validated arguments to this project's own values, frozen objects of their folders."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.training.models.gpt import GPTModelConfig

from megatron_bp.arguments.attention import aligns_chunks, attention_options
from megatron_bp.arguments.chats import chat_policy
from megatron_bp.arguments.from_checkpoint import NewRun
from megatron_bp.diffusion.objective import Objective
from megatron_bp.model.config import BDLMModelConfig
from megatron_bp.model.moe import BALANCE_LOSSES, Z_LOSS
from megatron_bp.model.reference import reference_model
from megatron_bp.sequence.plan import SequenceOptions
from megatron_bp.training import journal
from megatron_bp.training.ar import ArSettings
from megatron_bp.training.auxiliary import Auxiliary
from megatron_bp.training.conversion import Conversion
from megatron_bp.training.metrics import Metrics
from megatron_bp.training.nonfinite import NonFinite
from megatron_bp.training.step import StepSettings


def settings(
    args: Namespace, metrics: Metrics | None = None, nonfinite: NonFinite | None = None
) -> StepSettings:
    """What a training step needs, from Megatron's validated arguments."""
    return StepSettings(
        attention=attention_options(args),
        sequence=sequence_options(args),
        objective=Objective(
            mask_token_id=args.mask_token_id,
            vocabulary=args.bdlm_vocabulary,
            seed=args.seed,
            interval=(args.noise_interval[0], args.noise_interval[1]),
            weighting=args.loss_weighting,
            noise=args.noise,
            noise_per=args.noise_per,
            schedule=args.noise_schedule,
            antithetic=args.antithetic,
            complementary=args.complementary_copies,
            never_corrupt=tuple(args.never_corrupt_ids),
            alignment=args.alignment,
            scored=args.scored_tokens,
            count=args.loss_count,
            exclude_mask_logit=args.exclude_mask_logit,
            diffusion_weight=args.diffusion_loss_weight,
            ar_weight=args.ar_loss_weight,
            ar_scored=args.ar_scored_tokens,
            self_conditioning=args.self_conditioning,
        ),
        micro_batches=partial(_micro_batches, args),
        metrics=metrics,
        nonfinite=nonfinite,
        count_rows=args.num_experts is not None,
    )


def sequence_options(args: Namespace) -> SequenceOptions:
    """How rows are planned, from Megatron's validated arguments."""
    return SequenceOptions(
        block_size=args.diffusion_block_size,
        block_parallel_size=args.block_parallel_size,
        context_parallel_size=args.bdlm_clean_shard_size,
        clean_relation=args.clean_relation,
        own_relation=args.own_relation,
        row_cost=_row_cost(args),
        score_clean=args.ar_scored_tokens if args.ar_loss_weight > 0 else "none",
        grid=args.block_grid,
        response_end=args.response_end,
        alignment=args.alignment,
        copies=args.corrupted_copies,
        window_anchor=args.window_anchor,
        max_imbalance=args.max_imbalance,
        align_chunks=aligns_chunks(args),
    )


def ar_settings(
    args: Namespace, metrics: Metrics | None = None, nonfinite: NonFinite | None = None
) -> ArSettings:
    """What a training step of the autoregressive mode needs."""
    return ArSettings(
        packed=args.transformer_impl == "transformer_engine",
        multiple=args.tensor_model_parallel_size if args.sequence_parallel else 1,
        metrics=metrics,
        nonfinite=nonfinite,
    )


def model_config(args: Namespace) -> GPTModelConfig:
    """The model's config, from Megatron's validated arguments; in mode "ar" Megatron's own."""
    from megatron.training.argument_utils import gpt_config_from_args

    if args.objective == "ar":
        plain: GPTModelConfig = gpt_config_from_args(args)
        plain.rope_scaling_factor = args.rope_scaling_factor
        # The parser has no flag for it, and rows are as long as they are.
        plain.transformer.variable_seq_lengths = args.pipeline_model_parallel_size > 1
        return plain
    config: BDLMModelConfig = gpt_config_from_args(args, model_config_cls=BDLMModelConfig)
    config.rope_scaling_factor = args.rope_scaling_factor  # which Megatron leaves at its default
    config.block_parallel_size = args.block_parallel_size
    config.clean_shard_size = args.bdlm_clean_shard_size
    if args.self_conditioning > 0:
        config.self_conditioning_width = args.self_conditioning_width or args.hidden_size
        config.self_conditioning_fresh = getattr(args, "bdlm_fresh_conditioning", False)
    return config


def conversion(args: Namespace, run: NewRun | None, settings: StepSettings) -> Conversion | None:
    """The check that a new run makes before it trains; None for none."""
    if run is None or not run.converts or args.skip_train:
        return None
    if args.check_conversion == "off":
        if args.rank == 0:
            journal.warn("the conversion is not checked (--check-conversion off)")
        return None

    def reference(wide: bool) -> list[Any]:
        own = {"bf16": False, "params_dtype": torch.float32} if wide else {}
        config = model_config(Namespace(**vars(run.trained_with) | own))
        return list(reference_model(config, run.folder))

    return Conversion(settings, run.ids.old, reference, run.changed)


def nonfinite(args: Namespace) -> NonFinite:
    """The watch over losses; its files go to the --save folder."""
    folder = Path(args.save) if args.save else None
    return NonFinite(args.on_nonfinite, folder, lambda: steps_done(args) + 1)


def auxiliary(args: Namespace) -> Auxiliary | None:
    """The auxiliary losses to be reported; None without experts, or where they are Megatron's."""
    if args.num_experts is None or args.objective == "ar":
        return None
    types, coefficients = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    if not isinstance(types, list):
        types, coefficients = [types], [coefficients]
    losses = {
        f"moe_{name}": BALANCE_LOSSES[name]
        for name, coefficient in zip(types, coefficients, strict=True)
        if coefficient > 0
    }
    if args.moe_z_loss_coeff is not None:
        losses["moe_z_loss"] = Z_LOSS
    return Auxiliary(losses, tuple(moe_layers(args)))


def steps_done(args: Namespace) -> int:
    """Steps done; an evaluation alone (--skip-train) has only the checkpoint's."""
    return int(getattr(args, "curr_iteration", getattr(args, "iteration", 0)))


def metrics_path(args: Namespace) -> Path | None:
    """Where the metrics go: --metrics-file, else the --save folder, else nowhere."""
    if args.metrics_file is not None:
        return Path(args.metrics_file)
    return Path(args.save) / "metrics.jsonl" if args.save else None


def evaluation_samples(args: Namespace) -> int | None:
    """Samples of one draw of one evaluation; None for all of the split."""
    if args.full_validation:
        return None
    return int(args.eval_iters * args.eval_global_batch_size // args.eval_draws)


def dataset_config(args: Namespace) -> Any:
    """Megatron's GPTDatasetConfig for rows of the real length, without its shifted labels.

    Of chats a `ChatConfig`.
    """
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.training import get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    from megatron_bp.data.sft import ChatConfig

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    kind, more = GPTDatasetConfig, {}
    if args.chats:
        policy = chat_policy(args, _row_cost(args))
        kind, more = ChatConfig, {"policy": policy, "global_batch": args.global_batch_size}
    return kind(
        random_seed=args.seed,
        sequence_length=args.bdlm_seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        add_extra_token_to_sequence=False,
        **more,
    )


def _micro_batches(args: Namespace, training: bool) -> int:
    """Micro-batches of this rank in a step of training or of an evaluation, as Megatron counts."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    if training:
        return int(get_num_microbatches())
    samples = args.eval_micro_batch_size * args.data_parallel_size
    return int(args.eval_global_batch_size // samples)


def _row_cost(args: Namespace) -> int:
    """Linear work of one row, in visible pairs: FLOPs of a layer's matrices over 4 d Q a pair."""
    heads, dim = args.num_attention_heads, args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else heads
    attention = args.hidden_size * dim * (2 * heads + 2 * groups)
    mlp = args.hidden_size * _ffn_width(args) * (3 if args.swiglu else 2)
    cost: int = round(2 * (attention + mlp) / (4 * dim * heads))
    return cost


def _ffn_width(args: Namespace) -> float:
    """Hidden units of the MLP that a row passes, the mean over layers."""
    if args.num_experts is None:
        return float(args.ffn_hidden_size)
    shared = args.moe_shared_expert_intermediate_size or 0
    sparse = args.moe_router_topk * args.moe_ffn_hidden_size + shared
    part = sum(moe_layers(args)) / args.num_layers
    return float(part * sparse + (1 - part) * args.ffn_hidden_size)


def moe_layers(args: Namespace) -> list[bool]:
    """Whether each layer is an MoE layer, as Megatron reads --moe-layer-freq."""
    if args.num_experts is None:
        return [False] * args.num_layers
    if isinstance(args.moe_layer_freq, int):
        return [layer % args.moe_layer_freq == 0 for layer in range(args.num_layers)]
    return [bool(layer) for layer in args.moe_layer_freq]
