"""The run's contract: what a checkpoint and a run that goes on from it must agree on.

Megatron saves its arguments, ours among them, in every checkpoint. Going on with any field of the
contract changed would train another model on the same weights: an error. A new run that starts from
a checkpoint (--finetune, --pretrained-checkpoint) begins a new contract and prints the differences.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_bp.training import journal

# What the weights, and the optimizer's state of them, mean.
MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "qk_layernorm",
    "swiglu",
    "squared_relu",
    "attention_output_gate",
    "add_bias_linear",
    "add_qkv_bias",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
    "mscale",
    "mscale_all_dim",
    "query_scale_beta",
    "query_scale_length",
    "no_rope_freq",
    "window_size",
    "window_attn_skip_freq",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_router_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_enable_expert_bias",
    "optimizer",
    "bf16",
)
FIELDS = (
    "objective",
    "diffusion_block_size",
    "mask_token_id",
    "bdlm_vocabulary",
    "noise",
    "noise_per",
    "noise_schedule",
    "noise_interval",
    "antithetic",
    "loss_weighting",
    "diffusion_loss_weight",
    "ar_loss_weight",
    "ar_scored_tokens",
    "block_grid",
    "response_end",
    "corrupted_copies",
    "complementary_copies",
    "never_corrupt_ids",
    "alignment",
    "scored_tokens",
    "loss_count",
    "exclude_mask_logit",
    "self_conditioning",
    "self_conditioning_width",
    "clean_relation",
    "own_relation",
    "window_anchor",
    "answer_fill",
    "untie_embeddings_and_output_weights",
    *MODEL,
)

# What a run may change on the way, but should not change without a word.
TOLD = (
    "seed",
    "bdlm_seq_length",
    "split",
    "data_path",
    "data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "per_split_data_args_path",
    "chats",
    "overlong_chats",
)
OF_CHATS = ("global_batch_size",)  # their order is made for it
# What Megatron takes where the flag is not given, which leaves None in its arguments.
UNSET = {
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": True,
}
AGAIN = "copy the checkpoint again, or start from another step (--ckpt-step)"
SHOWN = {
    "bdlm_seq_length": "--seq-length",
    "bdlm_vocabulary": "the tokenizer's vocabulary",
    "layernorm_epsilon": "--norm-epsilon",
}


class ContractError(ValueError):
    """A resumed run differs from its checkpoint in a field of the contract."""


def check_contract(args: Namespace) -> None:
    """Compare with the checkpoint that the run is about to go on from, if there is one.

    Raises:
        ContractError: naming the field, the saved value and the new one.
    """
    step = getattr(args, "ckpt_step", None)
    folder = newest_checkpoint(args.load, step)
    goes_on = folder is not None
    folder = folder or newest_checkpoint(args.pretrained_checkpoint, step)
    if folder is None:
        return
    saved = saved_arguments(folder)
    ordered = getattr(args, "chats", False) and not args.skip_train
    changed = differences(saved, args, (*TOLD, *(OF_CHATS if ordered else ())))
    if changed and args.rank == 0 and goes_on and not args.finetune:
        journal.warn(
            f"goes on from {folder} with {told(changed)}: the data, their order, noise or the rows "
            f"of evaluations are others from here on"
        )
    found = differences(saved, args)
    if not found:
        return
    text = told(found)
    if args.finetune or not goes_on:
        if args.rank == 0:
            print(f"megatron_bp: a new run from {folder}: {text}", flush=True)
        return
    raise ContractError(
        f"{folder} was trained with another contract: {text}. Set them as they were to go on, or "
        f"start a new run from its weights with --finetune"
    )


def told(found: list[tuple[str, Any, Any]]) -> str:
    """The differences in words."""
    return "; ".join(
        f"{SHOWN.get(name, '--' + name.replace('_', '-'))} was {old}, is {new}"
        for name, old, new in found
    )


def differences(
    saved: Namespace, args: Namespace, fields: tuple[str, ...] = FIELDS
) -> list[tuple[str, Any, Any]]:
    """(field, saved value, new value) of each field that both know and that differs."""
    found = []
    for name in fields:
        if hasattr(saved, name):
            old, new = _value(saved, name), _value(args, name)
            if _plain(old) != _plain(new):
                found.append((name, old, new))
    return found


def _value(args: Namespace, name: str) -> Any:
    """The value; key heads are as many as query heads where groups are off, whatever is set."""
    if name == "num_query_groups" and not getattr(args, "group_query_attention", True):
        name = "num_attention_heads"
    value = getattr(args, name, None)
    return UNSET.get(name) if value is None else value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def newest_checkpoint(source: str | None, step: int | None) -> Path | None:
    """The folder of the checkpoint that Megatron would load; None if there is none yet."""
    if not source:
        return None
    load = Path(source)
    tracker = load / "latest_checkpointed_iteration.txt"
    if step is not None:
        folder = load / f"iter_{step:07d}"
        return folder if folder.is_dir() else None
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    folder = load / (text if text == "release" else f"iter_{int(text):07d}")
    return folder if folder.is_dir() else None


def saved_arguments(folder: Path) -> Namespace:
    """The arguments in a checkpoint; an empty Namespace if it holds none.

    Raises:
        ContractError: it cannot be read.
    """
    import warnings

    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a single process loads, as it should
            common = dist_checkpointing.load_common_state_dict(str(folder))
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        *_, last = ["", *str(error).strip().splitlines()]
        raise ContractError(
            f"{folder}: cannot be read ({type(error).__name__}: {last}); {AGAIN}"
        ) from error
    saved: Namespace = common.get("args", Namespace())
    return saved
