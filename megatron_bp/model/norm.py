"""The norms of the local layer spec: torch's own, which Megatron uses too, with sequence parallel.

Megatron's wrapper refuses sequence parallelism only because nothing marks the parameters there:
each TP rank norms other rows, so their gradients have to be added up over the TP ranks. The kernels
compute in float32 whatever the dtype of the rows.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


def local_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
    """A LayerNorm or RMSNorm over the last dimension (Megatron's LayerNormBuilder protocol).

    Parameter names, checkpoint and values are those of Megatron's WrappedTorchNorm.

    Raises:
        ValueError: a variant that torch does not have.
    """
    if config.layernorm_zero_centered_gamma:
        raise ValueError(
            "--apply-layernorm-1p: the local layer spec has no zero-centered norm; leave it out, "
            "or use --transformer-impl transformer_engine"
        )
    kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    if config.normalization not in kinds:
        raise ValueError(
            f"--normalization {config.normalization}: the local layer spec has "
            f"{' and '.join(kinds)}; use one of them"
        )
    norm: torch.nn.Module = kinds[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        # Megatron's finalize_model_grads adds up the gradients of what is so marked.
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
