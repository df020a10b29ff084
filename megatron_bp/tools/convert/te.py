"""What layers of Transformer Engine have in a checkpoint that local ones lack or name otherwise.

A norm that stands alone has an extra state, empty without FP8. The norm before experts stands alone
too, where the local layers count it to the experts' first matrix by name.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

LOCAL, ALONE = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
NORMS = ("q_layernorm.weight", "k_layernorm.weight", "final_layernorm.weight", ALONE)


def with_both(state: dict[str, Any]) -> dict[str, Any]:
    """A sharded state dict of local layers, from which both kinds of layers can be loaded."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        twins = [value]
        if name.endswith(ALONE) and name.replace(ALONE, "mlp.router.weight") in state:
            twins.append(dataclasses.replace(value, key=value.key.replace(LOCAL, ALONE)))
        found[name] = twins if len(twins) > 1 else value
        if twins[-1].key.endswith(NORMS):
            extra = _extra_state(twins[-1])
            found[name.removesuffix("weight") + "_extra_state"] = extra
    return found


def _extra_state(weight: ShardedTensor) -> ShardedObject:
    stacked = weight.prepend_axis_num
    return ShardedObject(
        weight.key.removesuffix("weight") + "_extra_state",
        None,
        tuple(weight.global_shape[:stacked]) or (1,),
        tuple(weight.global_offset[:stacked]) or (0,),
        weight.replica_id,
    )


def stored(key: str, there: Callable[[str], bool]) -> str:
    """The key of a checkpoint's tensor, whichever layers wrote it.

    Args:
        key: of local layers.
        there: whether the checkpoint has a key.
    """
    alone = key.replace(LOCAL, ALONE)
    return alone if not there(key) and there(alone) else key
