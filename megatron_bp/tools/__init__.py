"""Command line tools: python -m megatron_bp.tools.NAME."""
