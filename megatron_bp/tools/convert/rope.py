"""Rotary settings of a Hugging Face config as flags of this project."""

from typing import Any

from megatron_bp.tools.convert.refused import ConvertError

LLAMA3 = {
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def rope_flags(config: Any) -> dict[str, Any]:
    """Flag name -> value.

    Raises:
        ConvertError: a kind of scaling, or a value of one, that this project lacks.
    """
    rope = dict(config.rope_parameters)
    kind = rope.get("rope_type", rope.get("type", "default"))
    base, part = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
    if base != int(base):
        raise ConvertError(f"rope_theta {base}: Megatron's --rotary-base is a whole number")
    if part != 1.0:
        raise ConvertError(
            f"partial_rotary_factor {part}: no family here turns a part of the channels"
        )
    flags = {"position_embedding_type": "rope", "rotary_base": int(base)}
    if kind == "default":
        return flags
    if kind == "linear":
        return flags | _linear(rope)
    if kind == "llama3":
        return flags | _llama3(rope)
    if kind == "yarn":
        return flags | _yarn(rope, config)
    raise ConvertError(
        f"rope_type {kind}: this project has default, linear, llama3 and yarn; a model of another "
        f"kind cannot be converted"
    )


def _linear(rope: dict[str, Any]) -> dict[str, Any]:
    factor = rope["factor"]
    if factor != int(factor):
        raise ConvertError(
            f"linear rope factor {factor}: --rotary-seq-len-interpolation-factor is a whole number"
        )
    return {"rotary_seq_len_interpolation_factor": int(factor)}


def _llama3(rope: dict[str, Any]) -> dict[str, Any]:
    for name, value in LLAMA3.items():
        if rope[name] != value:
            raise ConvertError(
                f"{name} {rope[name]}: --use-rope-scaling has the value of Llama 3, {value}"
            )
    return {"use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}


def _yarn(rope: dict[str, Any], config: Any) -> dict[str, Any]:
    if rope.get("attention_factor") is not None:
        raise ConvertError(
            f"yarn attention_factor {rope['attention_factor']}: here it follows from factor, "
            f"mscale and mscale_all_dim; a model that sets it apart cannot be converted"
        )
    length = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    # Both are in use, or neither is.
    one, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    if not one or not all_dims:
        one, all_dims = 1.0, 0.0
    flags = {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": float(rope["factor"]),
        "yarn_original_max_position_embeddings": int(length),
        "yarn_beta_fast": float(rope.get("beta_fast") or 32.0),
        "yarn_beta_slow": float(rope.get("beta_slow") or 1.0),
        "mscale": float(one),
        "mscale_all_dim": float(all_dims),
    }
    rounded = "" if rope.get("truncate", True) else "no_"
    return flags | {f"{rounded}yarn_correction_range_round_to_int": True}
