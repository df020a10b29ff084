"""--tiny: the user's config made small, its structure kept.

Kept: kind of norm, biases, activation, tied or not, several query heads a group or not, windows and
which layers have one, objective, vocabulary, MoE routing. Made small: sizes and counts.
"""

import math
from collections.abc import Sequence
from typing import Any

from megatron_bp.tools.verify.configuration import Values
from megatron_bp.tools.verify.topology import Topology

LAYERS, HEAD, LENGTH, BLOCK, WINDOW = 4, 16, 64, 8, 16
EXPERTS, EXPERT_SIZE = 4, 32


def shrink(values: Values, layouts: Sequence[Topology]) -> tuple[Values, list[str]]:
    """The small config, which all the layouts can cut, and what was changed, in words.

    Returns:
        The values, and "name old -> new" of each that differs.
    """
    tp = math.lcm(*(t.tp for t in layouts))
    micro = int(values.get("micro_batch_size") or 1)
    small: Values = {"global_batch_size": _multiple(2, (micro * t.batch_divisor for t in layouts))}
    small |= _rows(values)
    small |= _layers(values, layouts)
    small |= _width(values, tp)
    if values.get("num_experts"):
        small |= _experts(values, math.lcm(*(t.ep for t in layouts)))
    told = [
        f"{name} {values.get(name, 'unset')} -> {new}"
        for name, new in small.items()
        if str(values.get(name)) != str(new) and (new is not None or name in values)
    ]
    merged = values | small
    return {name: value for name, value in merged.items() if value is not None}, told


def _rows(values: Values) -> Values:
    block = min(int(values.get("diffusion_block_size", 32)), BLOCK)
    small: Values = {
        "diffusion_block_size": block,
        "seq_length": LENGTH - 1,  # 63: the last block is short
        "max_position_embeddings": None,
        "num_workers": 0,
    }
    if values.get("window_size") is not None:
        back = int(str(values["window_size"]).strip("()").split(",")[0])
        small["window_size"] = f"({min(back, WINDOW)},0)"
    return small


def _layers(values: Values, layouts: Sequence[Topology]) -> Values:
    from megatron.training.arguments import moe_freq_type

    layers = _multiple(LAYERS, (t.pp * t.vpp for t in layouts))
    small: Values = {
        "num_layers": layers,
        "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": None,
        "account_for_loss_in_pipeline_split": None,
    }
    for name in ("window_attn_skip_freq", "moe_layer_freq"):
        if values.get(name) is not None:
            small[name] = _pattern(moe_freq_type(values[name]), layers)
    return small


def _pattern(pattern: int | list[int], layers: int) -> Any:
    """Which of the layers: every n-th, or the first of a list, both kinds still there."""
    if isinstance(pattern, int):
        return min(pattern, layers)
    first = pattern[:layers] + pattern[-1:] * (layers - len(pattern))
    if len(set(pattern)) > 1 and len(set(first)) == 1:
        first[-1] = next(kind for kind in pattern if kind != first[0])
    return "[" + ",".join(map(str, first)) + "]"


def _width(values: Values, tp: int) -> Values:
    heads = int(values.get("num_attention_heads") or 1)
    grouped = bool(values.get("group_query_attention"))
    groups = int(values.get("num_query_groups") or 1) if grouped else heads
    small: Values = {}
    if not grouped or groups == heads:
        few = _multiple(4, [tp])
        small["num_attention_heads"] = few
        if grouped:
            small["num_query_groups"] = few
    else:
        few = 1 if groups == 1 else _multiple(2, [tp])
        small["num_query_groups"] = few
        small["num_attention_heads"] = _multiple(2 * few, [tp])
    hidden = small["num_attention_heads"] * HEAD
    return small | {
        "hidden_size": hidden,
        "kv_channels": HEAD,
        "self_conditioning_width": None,
        "ffn_hidden_size": _multiple(hidden + 32, [tp]),
    }


def _experts(values: Values, ep: int) -> Values:
    count = min(int(values["num_experts"]), _multiple(EXPERTS, [ep]))
    small: Values = {"num_experts": _multiple(count, [ep])}
    top = int(values.get("moe_router_topk") or 2)
    small["moe_router_topk"] = min(top, 2 if count > 2 else 1)
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        if values.get(name):
            small[name] = EXPERT_SIZE
    if values.get("moe_router_num_groups"):
        small |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk": 1}
    return small


def _multiple(least: int, of: Any) -> int:
    """The smallest common multiple of the numbers `of` that is at least `least`."""
    step = math.lcm(*of)
    return -(-least // step) * step
