"""The core attention module that Megatron's SelfAttention builds in each layer.

The only file that turns Megatron's [s, b, h, d] round. Everything it needs to know of the sequence
comes with the Layout.
"""

import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_bp.attention.layout import Layout


def layer_window(config: TransformerConfig, layer_number: int) -> int | None:
    """The sliding window of a layer in tokens, None for none; Megatron's window_size[0] + 1."""
    if config.window_size is None:
        return None
    if not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    ):
        return None
    return int(config.window_size[0]) + 1


class BlockDiffusionAttention(torch.nn.Module):
    """Core attention over clean and corrupted rows (Megatron's CoreAttentionBuilder protocol)."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        if attention_type != "self":
            raise NotImplementedError(f"{attention_type} attention: only self-attention is")
        head_dim = config.kv_channels
        assert head_dim is not None
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(head_dim)
        self.window = layer_window(config, layer_number)
        self.layer_number = layer_number

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[S, 1, Q * D] from query [S, 1, Q, D] and key, value [S, 1, H, D], rotary applied."""
        if not isinstance(packed_seq_params, Layout):
            raise TypeError(
                "block diffusion attention needs a Layout as packed_seq_params; run the model "
                "through megatron_bp.training.step.forward_step"
            )
        layout = packed_seq_params
        if layout.query_scale is not None:
            query = query * layout.query_scale.to(query.dtype)[:, None, None, None]
        out = layout.plans[self.window].attend(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            self.scale,
            layout.results if self.training else None,
            self.layer_number,
        )
        return out.flatten(1).unsqueeze(1)
