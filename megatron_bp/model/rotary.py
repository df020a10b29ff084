"""Rotary embedding at explicit positions.

RoFormer (arXiv 2104.09864). Corrupted rows keep the position of their clean twin and documents
start at 0, so positions come with the Layout. Angles are computed in float64 and reduced modulo
2 pi before the cast: a float32 angle near 16K is off by up to a thousandth of a radian.
"""

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megatron_bp.attention.layout import Layout


class PositionRotary(RotaryEmbedding):
    """Megatron's rotary module with the frequencies of a Layout's positions.

    GPTModel first asks for a rotary "length" with the packed parameters in hand, then calls the
    module with it; here the Layout itself takes the place of the length.
    """

    def __init__(self, base: RotaryEmbedding, dim: int, rotary_base: float) -> None:
        torch.nn.Module.__init__(self)
        self.rotary_interleaved = base.rotary_interleaved
        self.seq_len_interpolation_factor = base.seq_len_interpolation_factor
        # On the CPU, also where the model itself is made on another device or on "meta".
        at = torch.arange(0, dim, 2, device="cpu")
        exponent = at.to(torch.float64) / dim
        exact = rotary_base**-exponent
        # Llama 3's frequency scaling stays Megatron's own: its float32 factor on exact frequencies.
        plain = 1.0 / (rotary_base ** (at.to(torch.float32) / dim))
        ratio = base.inv_freq.detach().to("cpu", torch.float64) / plain.to(torch.float64)
        self.frequencies = torch.where((ratio - 1).abs() < 1e-6, exact, exact * ratio)

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> Layout:
        """The Layout, handed on to `forward`."""
        if not isinstance(packed_seq_params, Layout):
            raise TypeError("rotary positions come with a Layout as packed_seq_params")
        return packed_seq_params

    def forward(self, layout: Layout, *unused: Any, **also_unused: Any) -> Tensor:
        """Angles float32 [S, 1, 1, dim] in [0, 2 pi), laid out as Megatron applies them."""
        positions = layout.positions
        self.frequencies = self.frequencies.to(positions.device)
        at = positions.to(torch.float64)
        if self.seq_len_interpolation_factor is not None:
            at = at / self.seq_len_interpolation_factor
        half = torch.remainder(torch.outer(at, self.frequencies), 2 * math.pi).to(torch.float32)
        if self.rotary_interleaved:
            angles = torch.stack((half, half), dim=-1).flatten(1)
        else:
            angles = torch.cat((half, half), dim=-1)
        return angles[:, None, None, :]
