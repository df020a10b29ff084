"""Llama 2 and 3."""

from megatron_bp.tools.convert.families.common import Family

FAMILY = Family("llama", "LlamaForCausalLM")
