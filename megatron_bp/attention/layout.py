"""Layout: what a micro-batch's attention needs, as it travels through Megatron to every layer."""

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_bp.attention.exchange import CleanExchange
from megatron_bp.attention.parts import View


@dataclass(kw_only=True)
class Layout(PackedSeqParams):
    """Megatron hands PackedSeqParams untouched to every layer and stage, also under recompute.

    Attributes:
        positions: int64[S], rotary position of each row of this rank.
        views: one for each distinct window of the layers (None = no window).
        exchange: the clean K/V exchange of this micro-batch.
    """

    positions: Tensor
    views: dict[int | None, View]
    exchange: CleanExchange
    qkv_format: str = "sbhd"
