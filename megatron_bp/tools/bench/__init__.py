"""Benchmarks, each a subcommand: `python -m megatron_bp.tools.bench sft`.

What they compare runs side by side in one process, turn by turn, so that a machine that slows down
slows both. A subcommand is a module with `add_flags(parser)` and `run(options) -> result`; the
result is JSON, and `lines(result)` is what is printed.
"""
