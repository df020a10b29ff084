"""Command line and YAML to Megatron's arguments and this project's own settings.

Order: config file and command line -> one list of flags -> what is derived -> what is refused ->
handed to Megatron. Stands outside the order of the folders: it imports them, none imports it.
"""

import argparse
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_bp import cpu
from megatron_bp.arguments.config_file import ConfigError, read_config, to_flags
from megatron_bp.arguments.flags import USAGE, add_block_diffusion_flags, full_parser
from megatron_bp.arguments.rules import RefusedError, refuse, refuse_world
from megatron_bp.arguments.versions import VersionError, check_versions
from megatron_bp.diffusion.objective import Objective
from megatron_bp.model.config import BDLMModelConfig
from megatron_bp.sequence.plan import SequenceOptions
from megatron_bp.training.metrics import Metrics
from megatron_bp.training.step import StepSettings

__all__ = [
    "ConfigError",
    "RefusedError",
    "VersionError",
    "model_config",
    "parse",
    "resolve",
    "settings",
]

# Megatron's defaults that do not fit block diffusion, or the local spec without Apex.
DEFAULTS: dict[str, str | None] = {
    "--transformer-impl": "local",
    "--micro-batch-size": "1",
    "--attention-dropout": "0",
    "--hidden-dropout": "0",
    "--no-rope-fusion": None,
    "--no-persist-layer-norm": None,
    "--no-masked-softmax-fusion": None,
    "--no-gradient-accumulation-fusion": None,
}


def parse(argv: list[str]) -> Namespace:
    """Megatron's validated arguments for a command line; exits with one clear line on bad input.

    Also sets Megatron's globals, as its own entry does. Our own values in it: `bdlm_seq_length`
    (the real row length; Megatron's is rounded up), `bdlm_clean_shard_size` (CP in our sense) and
    `bdlm_vocabulary` (the true ids).
    """
    from megatron.training import arguments as megatron
    from megatron.training import get_tokenizer

    try:
        check_versions()
        flags, real_length, clean_shard_size = resolve(argv, int(os.environ.get("WORLD_SIZE", "1")))
        before, sys.argv = sys.argv, [sys.argv[0], *flags]
        try:
            args: Namespace = megatron.parse_and_validate_args(
                extra_args_provider=add_block_diffusion_flags
            )
        finally:
            sys.argv = before
        args.bdlm_seq_length = real_length
        args.bdlm_clean_shard_size = clean_shard_size
        args.bdlm_vocabulary = get_tokenizer().vocab_size
        _check_mask(args)
    except (ValueError, NotImplementedError) as error:
        print(f"pretrain_bdlm.py: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error
    return args


def resolve(argv: list[str], world_size: int | None = None) -> tuple[list[str], int, int]:
    """(flags for Megatron, real row length, CP in our sense) from our own command line.

    Args:
        argv: a config file or none, then flags.
        world_size: ranks that were started, if they are to be checked against the degrees.

    Raises:
        ConfigError, RefusedError: bad input, before anything is started.
    """
    parser = full_parser()
    flags = _join(argv, parser)
    given = {token.split("=", 1)[0] for token in flags if token.startswith("--")}
    for name, value in (DEFAULTS | (cpu.FLAGS if cpu.needed() else {})).items():
        if name not in given:
            flags += [name] if value is None else [name, value]
    args = parser.parse_args(flags)
    if "--context-parallel-size" not in given:
        args.context_parallel_size = args.block_parallel_size
    refuse(args)
    if world_size is not None:
        refuse_world(args, world_size)
    slot = max(args.block_parallel_size, args.context_parallel_size)
    # Megatron wants a length that its own context parallelism can cut: 2 x slot.
    rounded = -(-args.seq_length // (2 * slot)) * 2 * slot
    positions = args.max_position_embeddings or rounded
    if args.position_embedding_type == "learned_absolute" and positions < args.seq_length:
        raise RefusedError(
            f"--max-position-embeddings {positions}: the table of learned positions must hold the "
            f"--seq-length of {args.seq_length}"
        )
    flags += ["--context-parallel-size", str(slot)]
    flags += ["--seq-length", str(rounded)]
    flags += ["--max-position-embeddings", str(max(positions, rounded))]
    flags += ["--calculate-per-token-loss"]
    return flags, args.seq_length, args.context_parallel_size


def settings(args: Namespace, metrics: Metrics | None = None) -> StepSettings:
    """What a training step needs, from Megatron's validated arguments."""
    return StepSettings(
        sequence=SequenceOptions(
            block_size=args.diffusion_block_size,
            block_parallel_size=args.block_parallel_size,
            context_parallel_size=args.bdlm_clean_shard_size,
            clean_relation=args.clean_relation,
            own_relation=args.own_relation,
            row_cost=_row_cost(args),
        ),
        objective=Objective(
            mask_token_id=args.mask_token_id,
            vocabulary=args.bdlm_vocabulary,
            seed=args.seed,
            interval=(args.noise_interval[0], args.noise_interval[1]),
            weighting=args.loss_weighting,
        ),
        metrics=metrics,
        check_for_nan=args.check_for_nan_in_loss_and_grad,
    )


def model_config(args: Namespace) -> BDLMModelConfig:
    """The model's config, from Megatron's validated arguments."""
    from megatron.training.argument_utils import gpt_config_from_args

    config: BDLMModelConfig = gpt_config_from_args(args, model_config_cls=BDLMModelConfig)
    config.block_parallel_size = args.block_parallel_size
    config.clean_shard_size = args.bdlm_clean_shard_size
    return config


def metrics_path(args: Namespace) -> Path | None:
    """Where the metrics go: --metrics-file, else the --save folder, else nowhere."""
    if args.metrics_file is not None:
        return Path(args.metrics_file)
    return Path(args.save) / "metrics.jsonl" if args.save else None


def dataset_config(args: Namespace) -> Any:
    """Megatron's GPTDatasetConfig for rows of the real length, without its shifted labels."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.training import get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
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
    )


def _join(argv: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The config file's flags, then the command line's, which win."""
    if not argv or argv[0].startswith("-"):
        return list(argv)
    if len(argv) > 1 and not argv[1].startswith("-"):
        raise ConfigError(f"two files given, {argv[0]} and {argv[1]}; usage: {USAGE}")
    values = read_config(Path(argv[0]))
    return to_flags(values, parser, argv[0]) + argv[1:]


def _check_mask(args: Namespace) -> None:
    from megatron.training import get_tokenizer

    tokenizer = get_tokenizer()
    for name in ("pad", "eod", "eos"):
        try:
            special = getattr(tokenizer, name, None)
        except (AttributeError, NotImplementedError):
            continue
        if special == args.mask_token_id:
            raise RefusedError(
                f"--mask-token-id {args.mask_token_id} is the tokenizer's {name} id: the model "
                f"could not tell noise from text; choose an id of its own"
            )
    settings(args)  # the objective checks the rest


def _row_cost(args: Namespace) -> int:
    """Linear work of one row, in visible pairs: FLOPs of a layer's matrices over 4 d Q a pair."""
    heads, dim = args.num_attention_heads, args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else heads
    attention = args.hidden_size * dim * (2 * heads + 2 * groups)
    mlp = args.hidden_size * args.ffn_hidden_size * (3 if args.swiglu else 2)
    cost: int = round(2 * (attention + mlp) / (4 * dim * heads))
    return cost
