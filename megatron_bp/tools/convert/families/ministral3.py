"""Ministral 3, the trunk of Nemotron-Labs-Diffusion: YaRN, queries scaled by their position."""

from typing import Any

from megatron_bp.tools.convert.families.common import Family, one_window
from megatron_bp.tools.convert.refused import ConvertError


def _own(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if not beta or not length:
        raise ConvertError(
            f"rope_parameters with llama_4_scaling_beta {beta} and "
            f"original_max_position_embeddings {length}: ministral3 needs both for its queries"
        )
    return {"query_scale_beta": float(beta), "query_scale_length": int(length)}


FAMILY = Family("ministral3", "Ministral3ForCausalLM", own=_own, windows=one_window)
