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
from megatron_bp.model.frequencies import Scaling, Yarn, inverse_frequencies


class PositionRotary(RotaryEmbedding):
    """Megatron's rotary module with the frequencies of a Layout's positions.

    GPTModel first asks for a rotary "length" with the packed parameters in hand, then calls the
    module with it; here the Layout itself takes the place of the length.
    """

    def __init__(
        self, base: RotaryEmbedding, dim: int, rotary_base: float, scaling: Scaling | None = None
    ) -> None:
        """Take the place of a module.

        Args:
            base: Megatron's own.
            dim: channels of a head that are turned.
            rotary_base: of the frequencies.
            scaling: of the frequencies.
        """
        torch.nn.Module.__init__(self)
        self.rotary_interleaved = base.rotary_interleaved
        self.seq_len_interpolation_factor = base.seq_len_interpolation_factor
        self.frequencies = inverse_frequencies(dim, rotary_base, scaling)
        # GPTModel unpacks what a YaRN module returns; the factor of queries and keys that comes
        # with it is applied by SelfAttention, from the config.
        self.in_pair = isinstance(scaling, Yarn)

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

    def forward(self, layout: Layout, *unused: Any, **also_unused: Any) -> Any:
        """Angles float32 [S, 1, 1, dim] in [0, 2 pi), laid out as Megatron applies them."""
        angles = self.angles(layout.positions).to(torch.float32)[:, None, None, :]
        return (angles, None) if self.in_pair else angles

    def angles(self, positions: Tensor) -> Tensor:
        """float64 [S, dim] in [0, 2 pi) of positions int64 [S]."""
        self.frequencies = self.frequencies.to(positions.device)
        at = positions.to(torch.float64)
        if self.seq_len_interpolation_factor is not None:
            at = at / self.seq_len_interpolation_factor
        half = torch.remainder(torch.outer(at, self.frequencies), 2 * math.pi)
        if self.rotary_interleaved:
            return torch.stack((half, half), dim=-1).flatten(1)
        return torch.cat((half, half), dim=-1)
