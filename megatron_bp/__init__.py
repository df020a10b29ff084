"""Block parallelism for block diffusion language models in Megatron-core."""

__version__ = "0.1.0"
