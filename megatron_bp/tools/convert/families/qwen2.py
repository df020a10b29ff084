"""Qwen2 and 2.5, of which Fast-dLLM v2 is made: q, k and v have a bias."""

from megatron_bp.tools.convert.families.common import Family, layer_windows

FAMILY = Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, windows=layer_windows)
