"""Qwen3 with experts: each layer, or some, a mixture of them."""

from typing import Any

from megatron_bp.tools.convert.families.common import Family, one_window, pattern
from megatron_bp.tools.convert.refused import ConvertError


def experts_at(config: Any) -> list[bool]:
    """Whether each layer is a mixture."""
    return [
        layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    ]


def _own(config: Any) -> dict[str, Any]:
    layers = experts_at(config)
    if not any(layers):
        raise ConvertError("qwen3_moe with no layer of experts: name it qwen3 in config.json")
    flags = {
        "num_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
    }
    if not config.norm_topk_prob:  # the softmax is over all experts, and is not made to sum to 1
        flags["moe_router_pre_softmax"] = True
    if not all(layers):
        flags["moe_layer_freq"] = pattern(layers)
    return flags


FAMILY = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", qk_norm=True, experts=True, own=_own, windows=one_window
)
