"""What the families share: flags of the model's sizes, and names of its weights."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_bp.tools.convert.refused import ConvertError
from megatron_bp.tools.convert.rope import rope_flags
from megatron_bp.tools.convert.weights import Heads, Weight


@dataclass(frozen=True)
class Family:
    """Models of one kind.

    Attributes:
        model_type: in config.json.
        architecture: the class of transformers that has the language model's head.
        qk_norm: queries and keys of each head are normed.
        qkv_bias: q, k and v have a bias (and nothing else has).
        experts: layers may be mixtures of experts.
        own: flags beyond those of all families.
        windows: of each layer, the keys that a query sees, itself included; None for all.
        read_as: the model type of transformers that it is, where its own class is in its folder.
        trunk, head: how the names of its tensors start, and the head's name.
    """

    model_type: str
    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: bool = False
    own: Callable[[Any], dict[str, Any]] = lambda config: {}
    windows: Callable[[Any], list[int | None]] = lambda config: [None] * config.num_hidden_layers
    read_as: str | None = None
    trunk: str = "model."
    head: str = "lm_head.weight"


def heads_of(config: Any) -> Heads:
    """Of attention."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Heads(config.num_attention_heads, config.num_key_value_heads, dim)


def model_flags(family: Family, config: Any) -> dict[str, Any]:
    """Flag name (snake case) -> value, of the model.

    Raises:
        ConvertError: something of the config that this project lacks.
    """
    _refuse(config)
    heads = heads_of(config)
    flags: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": heads.queries,
        "group_query_attention": True,
        "num_query_groups": heads.groups,
        "kv_channels": heads.channels,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": float(config.rms_norm_eps),
        "disable_bias_linear": True,
        "init_method_std": float(config.initializer_range),
        "max_position_embeddings": config.max_position_embeddings,
        **rope_flags(config),
    }
    if family.qkv_bias:
        flags["add_qkv_bias"] = True
    if family.qk_norm:
        flags["qk_layernorm"] = True
    if not config.tie_word_embeddings:
        flags["untie_embeddings_and_output_weights"] = True
    return flags | _window_flags(family.windows(config)) | family.own(config)


def _refuse(config: Any) -> None:
    if config.hidden_act != "silu":
        raise ConvertError(f"hidden_act {config.hidden_act}: the families here have silu")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            raise ConvertError(
                f"{name} true: biases of this family's projections are not converted"
            )


def _window_flags(windows: list[int | None]) -> dict[str, Any]:
    sizes = {window for window in windows if window is not None}
    if not sizes:
        return {}
    if len(sizes) > 1:
        raise ConvertError(f"windows of {sorted(sizes)} keys: Megatron has one size for all layers")
    flags: dict[str, Any] = {"window_size": f"({sizes.pop() - 1},0)"}  # keys before the query
    if None in windows:
        flags["window_attn_skip_freq"] = pattern([window is not None for window in windows])
    return flags


def pattern(layers: list[bool]) -> str:
    """Which layers, as Megatron's flags have it: [0]*1+[1]*2."""
    runs = [(int(which), len(list(run))) for which, run in itertools.groupby(layers)]
    return "+".join(f"[{which}]*{length}" for which, length in runs)


def layer_windows(config: Any) -> list[int | None]:
    """Of configs that list the kinds of their layers."""
    kinds = {"full_attention": None, "sliding_attention": config.sliding_window}
    strange = sorted(set(config.layer_types) - set(kinds))
    if strange:
        raise ConvertError(f"layer_types {', '.join(strange)}: has to be one of {', '.join(kinds)}")
    return [kinds[kind] for kind in config.layer_types]


def one_window(config: Any) -> list[int | None]:
    """Of configs with one window for all layers, or none."""
    return [config.sliding_window] * config.num_hidden_layers


def weights(family: Family, config: Any, experts_at: list[bool] | None = None) -> list[Weight]:
    """All weights of the model, in order.

    Args:
        family: of the model.
        config: its config.
        experts_at: whether each layer is a mixture of experts; None for none.
    """
    found = [Weight("embedding.word_embeddings.weight", (family.trunk + "embed_tokens.weight",))]
    for layer in range(config.num_hidden_layers):
        mixture = experts_at is not None and experts_at[layer]
        found += _attention(family, layer)
        ours, theirs = f"decoder.layers.{layer}.mlp.", f"{family.trunk}layers.{layer}.mlp."
        found += _experts(ours, theirs, config.num_experts) if mixture else _mlp(ours, theirs)
    found.append(Weight("decoder.final_layernorm.weight", (family.trunk + "norm.weight",)))
    if not config.tie_word_embeddings:
        found.append(Weight("output_layer.weight", (family.head,)))
    return found


def _attention(family: Family, layer: int) -> list[Weight]:
    ours, theirs = f"decoder.layers.{layer}.", f"{family.trunk}layers.{layer}."
    own, attention = ours + "self_attention.", theirs + "self_attn."
    found = [Weight(ours + "input_layernorm.weight", (theirs + "input_layernorm.weight",))]
    for what in ("weight", "bias") if family.qkv_bias else ("weight",):
        sources = tuple(f"{attention}{part}_proj.{what}" for part in "qkv")
        found.append(Weight(f"{own}linear_qkv.{what}", sources, "qkv"))
    if family.qk_norm:
        for part in "qk":
            name = f"{own}{part}_layernorm.weight"
            found.append(Weight(name, (f"{attention}{part}_norm.weight",)))
    found.append(Weight(own + "linear_proj.weight", (attention + "o_proj.weight",)))
    norm = theirs + "post_attention_layernorm.weight"
    return [*found, Weight(ours + "pre_mlp_layernorm.weight", (norm,))]


def _experts(ours: str, theirs: str, experts: int) -> list[Weight]:
    found = [Weight(ours + "router.weight", (theirs + "gate.weight",))]
    for expert in range(experts):
        found += _mlp(f"{ours}experts.local_experts.{expert}.", f"{theirs}experts.{expert}.")
    return found


def _mlp(ours: str, theirs: str) -> list[Weight]:
    sources = (theirs + "gate_proj.weight", theirs + "up_proj.weight")
    return [
        Weight(ours + "linear_fc1.weight", sources, "stack"),
        Weight(ours + "linear_fc2.weight", (theirs + "down_proj.weight",)),
    ]
