"""What numbers of a config.json may be; it may say anything."""

from typing import Any

from megatron_bp.tools.convert.refused import ConvertError

# Name -> least and most; whole numbers where both are. Of rotary settings too, wherever they stand.
LIMITS: dict[str, tuple[float, float]] = {
    "num_hidden_layers": (1, 10_000),
    "num_experts": (1, 10_000),
    "num_experts_per_tok": (1, 10_000),
    "num_attention_heads": (1, 1 << 20),
    "num_key_value_heads": (1, 1 << 20),
    "head_dim": (1, 1 << 20),
    "hidden_size": (1, 1 << 24),
    "intermediate_size": (1, 1 << 24),
    "moe_intermediate_size": (1, 1 << 24),
    "vocab_size": (1, 1 << 30),
    "max_position_embeddings": (1, 1 << 40),
    "original_max_position_embeddings": (1, 1 << 40),
    "decoder_sparse_step": (1, 1 << 20),
    "sliding_window": (1, 1 << 40),
    "rms_norm_eps": (1e-30, 1.0),
    "initializer_range": (0.0, 1e3),
    "rope_theta": (2.0, 1e15),
    "factor": (1e-6, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
    "llama_4_scaling_beta": (1e-6, 1e6),
}
NESTED = ("rope_parameters", "rope_scaling")


def check_numbers(values: dict[str, Any]) -> None:
    """Refuse a config.json with a number that means nothing; null stands for a default.

    Raises:
        ConvertError: the name, its value and what it may be.
    """
    nested: dict[str, Any] = {f"{part}: ": values.get(part) for part in NESTED}
    for start, held in {"": values, **nested}.items():
        for name, limits in LIMITS.items() if isinstance(held, dict) else ():
            if held.get(name) is not None:
                _check(start + name, held[name], *limits)


def check_experts(config: Any) -> None:
    """Refuse more experts of a token than there are.

    Args:
        config: of transformers, with its defaults.
    """
    chosen, there = config.num_experts_per_tok, config.num_experts
    if chosen > there:
        raise ConvertError(
            f"config.json: num_experts_per_tok {chosen}: has to be at most num_experts, {there}"
        )


def _check(name: str, value: Any, least: float, most: float) -> None:
    whole = type(least) is int
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not least <= value <= most:  # so NaN is refused, too
        rule = f"whole number of {least} to {most}" if whole else f"number of {least:g} to {most:g}"
        raise ConvertError(f"config.json: {name} {value!r}: has to be a {rule}")
