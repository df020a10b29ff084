"""The autoregressive step that a block diffusion step is held against: Megatron's own GPT model.

Two things are replaced, so that it is no slow one. Megatron's local core attention takes 1.6 times
the time of torch's causal attention, so the latter stands there; and its local rotary embedding
copies queries and keys once more than it has to. (Block diffusion runs with the latter as it is.)
"""

import math
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig, default_layer_spec
from torch import Tensor


class CausalCore(torch.nn.Module):
    """Torch's causal attention as Megatron's core attention, on [S, 1, heads, D]."""

    def __init__(self, *, config: Any, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **also_unused: Any
    ) -> Tensor:
        """[S, 1, Q * D]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def rotate(t_SHD: Tensor, angles_SD: Tensor, *unused: Any, **also_unused: Any) -> Tensor:
    """Rotary positions, of whole heads, their halves paired."""
    low, high = t_SHD.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return t_SHD * angles_SD.cos() + turned * angles_SD.sin()


def builder(settings: dict[str, Any]) -> GPTModelBuilder:
    """A builder of Megatron's own model with `CausalCore`."""

    def spec(config: GPTModelConfig, vp_stage: int | None = None) -> Any:
        layers = default_layer_spec(config, vp_stage)
        assert not isinstance(layers, TransformerBlockSubmodules)
        layers.submodules.self_attention.submodules.core_attention = CausalCore
        return layers

    return GPTModelBuilder(GPTModelConfig(**settings, transformer_layer_spec=spec))


def step(model: Any, tokens: Tensor) -> float:
    """One forward and backward of a row, gradients thrown away; the mean loss.

    Args:
        model: from `builder`.
        tokens: int64[L + 1], each but the first the label of the one before.
    """
    positions = torch.arange(len(tokens) - 1)[None]
    with mock.patch.object(rope_utils, "_apply_rotary_pos_emb_bshd", rotate):
        total = model(tokens[None, :-1], positions, None, labels=tokens[None, 1:]).sum()
    total.backward()
    model.zero_grad(set_to_none=True)
    return float(total.item()) / (len(tokens) - 1)
