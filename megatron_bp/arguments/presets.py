"""Presets: what a published recipe sets the objective's flags to.

A preset is a default for flags that are not given, nothing else: a new recipe is a few lines here.
Sources and formulas: docs/objectives.md.
"""

from typing import Any

# Preset -> flag in snake case -> value.
PRESETS: dict[str, dict[str, Any]] = {
    # BD3-LM, arXiv 2503.09573; SDAR, arXiv 2510.06303: the flags' own defaults.
    "block_diffusion": {},
    # Fast-dLLM v2, arXiv 2509.26328: two complementary views, the row before predicts a token.
    "fast_dllm_v2": {
        "alignment": "next",
        "corrupted_copies": 2,
        "complementary_copies": True,
        "loss_weighting": "one",
    },
    # Nemotron-Labs-Diffusion (NVIDIA): next-token term on clean rows, one count for both.
    "nemotron": {
        "noise_per": "document",
        "loss_weighting": "inverse_p",
        "loss_count": "joint",
        "clean_relation": "token",
        "diffusion_loss_weight": 0.3,
        "ar_loss_weight": 1.0,
    },
    # DiffusionGemma: uniform noise on canvases of a response, every token of which is scored.
    "diffusion_gemma": {
        "diffusion_block_size": 256,
        "block_grid": "response",
        "noise": "uniform",
        "scored_tokens": "all",
        "loss_weighting": "one",
        "clean_relation": "token",
        "window_anchor": "block",
        "ar_loss_weight": 1.0,
        "ar_scored_tokens": "all",
        "self_conditioning": 0.5,
    },
    # No corrupted rows: Megatron's own autoregressive model and loss.
    "ar": {},
}
