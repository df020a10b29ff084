"""Qwen3 dense, of which SDAR is made: queries and keys are normed."""

from megatron_bp.tools.convert.families.common import Family, layer_windows

FAMILY = Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, windows=layer_windows)
