"""A new run from a checkpoint: what of its vocabulary and weights goes on, and what is checked.

The checkpoint's true ids (Megatron's padded table does not tell) are in its saved arguments if this
project trained it; of any other, --pretrained-vocabulary says.
"""

import argparse
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from megatron_bp.arguments.contract import (
    MODEL,
    differences,
    newest_checkpoint,
    saved_arguments,
    told,
)
from megatron_bp.training.start import NewIds

# What decides which weights there are and how large they are.
SHAPES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "qk_layernorm",
    "swiglu",
    "attention_output_gate",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
)
TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file", "merge_file")
# What the weights were trained with, and Megatron's own model of them is built with.
TRAINED_WITH = tuple(name for name in MODEL if name not in ("optimizer", "bf16"))

# Of that what changes logits of any document, where it is in use; others may not be seen in the
# first tokens (a window), or within what is allowed (an epsilon).
SURE = ("position_embedding_type", "squared_relu")
SURE_OF_ROTARY = ("rotary_base", "rotary_percent", "rotary_interleaved")
SURE_OF_EXPERTS = ("moe_router_topk", "moe_router_score_function")


class NewRunError(ValueError):
    """A checkpoint that this run cannot start from."""


def add_new_run_flags(group: argparse._ArgumentGroup) -> None:
    """The flags of a new run from a checkpoint."""
    add = group.add_argument
    add(
        "--pretrained-vocabulary",
        type=int,
        default=None,
        metavar="N",
        help="True ids of the checkpoint that a new run starts from, if it does not tell.",
    )
    add(
        "--added-embeddings",
        choices=["mean", "random"],
        default="mean",
        help="Rows of ids that the checkpoint lacks: the mean of its rows, or Megatron's start.",
    )
    add(
        "--check-conversion",
        choices=["auto", "off"],
        default="auto",
        help="auto: a new run from an autoregressive checkpoint compares logits before it trains.",
    )


@dataclass(frozen=True, eq=False)
class NewRun:
    """A new run from a checkpoint's weights.

    Attributes:
        folder: the checkpoint.
        ids: how the vocabulary grows.
        converts: from an autoregressive model to block diffusion.
        trained_with: this run's arguments, where the checkpoint says how the model computes.
        changed: what of that is set otherwise here, in words; empty if nothing is.
        contradicts: what of that no check of the conversion can pass with, in words.
    """

    folder: Path
    ids: NewIds
    converts: bool
    trained_with: Namespace
    changed: str
    contradicts: str

    def is_checked(self, args: Namespace) -> bool:
        """Whether its conversion is compared with the checkpoint before it trains."""
        return self.converts and not args.skip_train and args.check_conversion != "off"


def new_run(args: Namespace) -> NewRun | None:
    """What a new run starts from; None if it goes on with one, or starts from nothing.

    Raises:
        NewRunError: with the value, the rule and the way out.
    """
    step = getattr(args, "ckpt_step", None)
    folder = newest_checkpoint(args.load, step)
    goes_on = folder is not None and not args.finetune
    folder = folder or newest_checkpoint(args.pretrained_checkpoint, step)
    if folder is None:
        return None
    saved = saved_arguments(folder)
    if goes_on:
        if not hasattr(saved, "bdlm_vocabulary"):
            raise NewRunError(
                f"{folder} was not trained by this project, so there is no run to go on with: "
                f"start a new one from its weights with --finetune, or name it with "
                f"--pretrained-checkpoint"
            )
        return None
    if found := differences(saved, args, SHAPES):
        raise NewRunError(
            f"{folder} holds the weights of another model: {told(found)}. A new run needs them as "
            f"they were"
        )
    old, new = _old_vocabulary(folder, saved, args), int(args.bdlm_vocabulary)
    if new < old:
        raise NewRunError(
            f"{folder} has {old} ids and the tokenizer {new}: ids cannot be taken away; use the "
            f"checkpoint's tokenizer, or one that adds to it"
        )
    if new > old and getattr(args, "load_main_params_from_ckpt", False):
        raise NewRunError(
            "--load-main-params-from-ckpt would overwrite the rows of added ids; leave it out"
        )
    return NewRun(
        folder=folder,
        ids=NewIds(old, new, args.added_embeddings),
        converts=args.objective != "ar" and getattr(saved, "objective", "ar") == "ar",
        trained_with=_overlaid(args, saved, old),
        changed=told(differences(saved, args, TRAINED_WITH)),
        contradicts=told(differences(saved, args, _sure(args))),
    )


def _sure(args: Namespace) -> tuple[str, ...]:
    rotary = getattr(args, "position_embedding_type", None) in ("rope", "yarn")
    experts = bool(getattr(args, "num_experts", None))
    return SURE + SURE_OF_ROTARY * rotary + SURE_OF_EXPERTS * experts


def _old_vocabulary(folder: Path, saved: Namespace, args: Namespace) -> int:
    known, given = getattr(saved, "bdlm_vocabulary", None), args.pretrained_vocabulary
    padded = getattr(saved, "padded_vocab_size", None)
    if known is not None and given is not None and known != given:
        raise NewRunError(
            f"--pretrained-vocabulary {given}: {folder} says that it has {known} true ids; leave "
            f"it out"
        )
    if known is None and given is None:
        same = [getattr(saved, name, None) == getattr(args, name, None) for name in TOKENIZER]
        if all(same) and hasattr(saved, "tokenizer_type"):
            return int(args.bdlm_vocabulary)
        raise NewRunError(
            f"{folder} does not tell how many true ids it has (its table of {padded} rows is "
            f"padded): give --pretrained-vocabulary, the size of the vocabulary it was trained "
            f"with"
        )
    old = int(known if known is not None else given)
    if old < 1 or (padded is not None and old > padded):
        raise NewRunError(
            f"--pretrained-vocabulary {old}: must be at least 1 and at most the {padded} rows of "
            f"the table in {folder}"
        )
    return old


def _overlaid(args: Namespace, saved: Namespace, old: int) -> Namespace:
    """The arguments, with the checkpoint's for what a model computes, of one rank a sequence."""
    trained = {name: getattr(saved, name) for name in TRAINED_WITH if hasattr(saved, name)}
    mine = vars(args) | trained | {"group_query_attention": args.group_query_attention}
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return Namespace(
        **mine
        | {
            "objective": "ar",
            "padded_vocab_size": -(-old // multiple) * multiple,
            "context_parallel_size": 1,
            "sequence_parallel": False,
            "recompute_granularity": None,
            "recompute_method": None,
            "recompute_num_layers": None,
        }
    )
