"""Published models: their config.json, as far as it makes the network, and what they count."""

from typing import Any


def nemotron(layers: int, hidden: int, width: int, theta: float = 1e6) -> dict[str, Any]:
    """Of huggingface.co/nvidia/Nemotron-Labs-Diffusion-3B, -8B and -14B."""
    return {
        "model_type": "nemotron_labs_diffusion",
        "vocab_size": 131072,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "max_position_embeddings": 262144,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "auto_map": {"AutoModel": "modeling_nemotron_labs_diffusion.NemotronLabsDiffusionModel"},
        "block_size": 32,
        "bos_token_id": 1,
        "eos_token_id": 11,
        "mask_token_id": 100,
        "torch_dtype": "bfloat16",
    }


def qwen3(layers: int, hidden: int, width: int, heads: int, tied: bool) -> dict[str, Any]:
    """Of huggingface.co/Qwen/Qwen3-0.6B-Base and up, dense."""
    return {
        "model_type": "qwen3",
        "eos_token_id": 151643,
        "vocab_size": 151936,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }


# A model's file in configs/models -> its config.json; parameters as published, in billions.
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "nemotron_3b": (nemotron(26, 3072, 9216), 3.83),
    "nemotron_8b": (nemotron(34, 4096, 14336), 8.49),
    "nemotron_14b": (nemotron(40, 5120, 16384, theta=1e9), 13.51),
    "qwen3_0.6b": (qwen3(28, 1024, 3072, 16, tied=True), 0.60),
    "qwen3_1.7b": (qwen3(28, 2048, 6144, 16, tied=True), 1.72),
    "qwen3_4b": (qwen3(36, 2560, 9728, 32, tied=True), 4.02),
    "qwen3_8b": (qwen3(36, 4096, 12288, 32, tied=False), 8.19),
    "qwen3_14b": (qwen3(40, 5120, 17408, 40, tied=False), 14.77),
}
