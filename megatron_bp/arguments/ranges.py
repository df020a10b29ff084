"""What values single flags may have, where Megatron itself would fail later and less clearly.

Rules on combinations are in `rules.py`.
"""

import argparse
import math
from argparse import Namespace
from collections.abc import Iterator

# Flag -> smallest value, where one is set.
LEAST: dict[str, float] = {
    "train_iters": 1,
    "train_samples": 1,
    "global_batch_size": 1,
    "micro_batch_size": 1,
    "eval_global_batch_size": 1,
    "eval_iters": 0,
    "eval_interval": 1,
    "eval_draws": 1,
    "max_imbalance": 1,
    "corrupted_copies": 1,
    "log_interval": 1,
    "save_interval": 1,
    "ckpt_step": 1,
    "exit_interval": 1,
    "num_layers": 1,
    "num_virtual_stages_per_pipeline_rank": 1,
    "num_layers_per_virtual_pipeline_stage": 1,
    "hidden_size": 1,
    "ffn_hidden_size": 1,
    "num_attention_heads": 1,
    "num_query_groups": 1,
    "kv_channels": 1,
    "rotary_base": 1,
    "lr": 0,
    "min_lr": 0,
    "lr_warmup_iters": 0,
    "weight_decay": 0,
    "clip_grad": 0,
    "init_method_std": 0,
    "layernorm_epsilon": 0,
    "num_workers": 0,
    "print_samples": 0,
}
# Flag -> bound that values must stay below.
BELOW: dict[str, float] = {
    "adam_beta1": 1,
    "adam_beta2": 1,
    "diffusion_block_size": 2**31,
    "seq_length": 2**31,
}
# Megatron's flags of other models or backends -> why they cannot be set here.
UNUSABLE = {
    "apply_residual_connection_post_layernorm": "megatron-core's layers do not read it",
    "vision_pretraining": "there are no images",
    "linear_attention_freq": "linear attention has no prefix that a corrupted block could read",
    "iterations_to_skip": "a skipped step would leave no row in the metrics",
    "init_method_xavier_uniform": "fails in Megatron 0.19.2; use --init-method-std",
    "batch_invariant_mode": "its kernels are of Megatron's own attention",
    "use_precision_aware_optimizer": "needs Transformer Engine's optimizer, which is not used yet",
    "config_logger_dir": "cannot write down a block diffusion model; config.yaml is in --save",
}


def out_of_range(args: Namespace, parser: argparse.ArgumentParser) -> Iterator[str]:
    """What is wrong with single flags, one message each.

    Args:
        args: flags as parsed by `parser`.
        parser: knows their defaults.
    """
    for action in parser._actions:
        name, value = action.dest, getattr(args, action.dest, None)
        flag = f"--{name.replace('_', '-')}"
        if value is None or value == action.default:
            continue
        numbers = value if isinstance(value, list | tuple) else [value]
        if not all(math.isfinite(x) for x in numbers if isinstance(x, float)):
            yield f"{flag} {value}: must be a finite number"
        elif name in LEAST and value < LEAST[name]:
            yield f"{flag} {value}: must be at least {LEAST[name]}"
        elif name in BELOW and value >= BELOW[name]:
            yield f"{flag} {value}: must be below {BELOW[name]}"
        elif name in UNUSABLE:
            yield f"{flag}: {UNUSABLE[name]}; leave it out"
    if not 1 <= args.seed < 2**32:
        yield f"--seed {args.seed}: must be at least 1 and below 2^32"
    if args.split is not None and (message := _split(args.split)) is not None:
        yield f"--split {args.split}: {message}; such as 95,5,0 for training, validation and test"


def _split(text: str) -> str | None:
    """What is wrong with a --split; None if nothing is."""
    try:
        parts = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        return "must be numbers with commas between them"
    if len(parts) > 3 or not all(math.isfinite(part) and part >= 0 for part in parts):
        return "must be at most three numbers, none negative"
    return None if sum(parts) > 0 else "must not be all zero"
