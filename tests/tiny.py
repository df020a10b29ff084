"""Tiny random models of transformers, one a family, whose layers and tensors all differ."""

import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 258
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2**20,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 64.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Name -> what its config adds; the word before a comma is the model type.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3},
    "mistral": {"sliding_window": 7},
    "ministral3": {"rope_parameters": YARN},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "llama, YaRN without mscale": {
        "rope_parameters": {key: YARN[key] for key in list(YARN)[:6]} | {"truncate": False}
    },
    "llama, factor 32": {"rope_parameters": LLAMA3 | {"factor": 32.0}},
    "llama, linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "ministral3, as NVIDIA publishes it": {"rope_parameters": YARN},
    "qwen2, windows": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3_moe, a dense layer": {**EXPERTS, "mlp_only_layers": [1]},
}
NVIDIAS = "ministral3, as NVIDIA publishes it"  # which Nemotron-Labs-Diffusion is
FAMILIES = tuple(name for name in MODELS if "," not in name)


def save_tiny(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY
) -> None:
    """A folder as save_pretrained writes it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = name.partition(",")[0]
    config = CONFIG_MAPPING[kind](**SIZES | {"vocab_size": vocabulary}, **MODELS[name])
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            random = torch.randn_like(parameter)
            norm = parameter.dim() == 1 and parameter.mean() > 0.5
            parameter.copy_(random * 0.2 + 1 if norm else random * 0.2)
    model.to(dtype).save_pretrained(folder)


def as_nvidia_publishes(folder: Path) -> None:
    """The folder of a Ministral 3 as one of Nemotron-Labs-Diffusion: names, and code of its own."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "nemotron_labs_diffusion",
        "architectures": ["NemotronLabsDiffusionModel"],
        "auto_map": {"AutoModel": "modeling.NemotronLabsDiffusionModel"},
        "block_size": 32,
        "mask_token_id": 100,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text("raise SystemExit('code of the folder was run')")
    names = {"model.": "encoder.", "lm_head.": "diffusion_head."}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        start = next(start for start in names if name.startswith(start))
        tensors[names[start] + name.removeprefix(start)] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def as_ministral3(name: str) -> str:
    """A tensor's name in transformers."""
    return name.replace("encoder.", "model.").replace("diffusion_head.", "lm_head.")


def change(folder: Path, how: str) -> None:
    """Mistakes of a converter, planted in the folder's weights."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    one = "model.layers.1."
    q, k = (f"{one}self_attn.{part}_proj.weight" for part in "qk")

    def swap(first: str, second: str) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    if how == "q and k":  # of the first head
        rows = SIZES["head_dim"]
        first, second = tensors[q][:rows].clone(), tensors[k][:rows].clone()
        tensors[q][:rows], tensors[k][:rows] = second, first
    elif how == "k and v":
        swap(k, f"{one}self_attn.v_proj.weight")
    elif how == "gate and up":
        mlp = one + ("mlp.experts.0." if f"{one}mlp.gate.weight" in tensors else "mlp.")
        swap(mlp + "gate_proj.weight", mlp + "up_proj.weight")
    elif how == "two layers":
        for name in [name for name in tensors if name.startswith("model.layers.0.")]:
            swap(name, name.replace("layers.0.", "layers.2."))
    elif how == "interleaved rotary":
        for name in (q, k):
            heads = tensors[name].unflatten(0, (-1, 2, SIZES["head_dim"] // 2))
            tensors[name] = heads.transpose(1, 2).flatten(0, 2).contiguous()
    else:
        raise ValueError(how)
    save_file(tensors, file, metadata={"format": "pt"})


SWAPS = ("q and k", "k and v", "gate and up", "two layers", "interleaved rotary")
