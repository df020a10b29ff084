"""Mistral: a Llama whose layers may have a window."""

from megatron_bp.tools.convert.families.common import Family, one_window

FAMILY = Family("mistral", "MistralForCausalLM", windows=one_window)
