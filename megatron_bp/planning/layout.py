"""How a step is shared by GPUs: the degrees and what else may be chosen."""

from dataclasses import dataclass, field
from typing import Literal

from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.parallel.mode import parallel_mode

Recompute = Literal["none", "attention", "full"]


@dataclass(frozen=True)
class Split:
    """How pipeline stages share layers, by Megatron's flags.

    Attributes:
        chunks: of each stage (virtual stages).
        first: layers of the first stage; None for as many as others have.
        last: of the last stage, likewise.
        embedding: the embedding stands for a layer.
        loss: the output and the loss stand for a layer.
    """

    chunks: int = 1
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False


@dataclass(frozen=True)
class Layout:
    """A layout.

    Attributes:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        ep: ranks that share the experts of a layer.
        dp: data-parallel replicas.
        bp: BP degree.
        cp: CP degree, in this project's sense: ranks that shard the clean rows.
        sequence_parallel: TP ranks shard the rows between matrices too.
        exchange: how K/V of other ranks come.
        over_heads: mode CP by all-to-all over heads.
        aligned: mode CP with chunks of whole blocks, which sends clean rows only
            ("clean_all_gather").
        recompute: what the backward computes again: nothing, attention, or all of a layer.
        keep_attention: under "full", attention's result is kept.
        keep_gathered: K/V of other ranks are kept from forward to backward where attention is not
            computed again, and not fetched twice.
        split: how stages share layers.
        micro_batch: packed rows of a micro-batch; they are joined to one longer row.
        micro_batches: of a replica in a step.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    bp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    exchange: ExchangeOptions = field(default_factory=ExchangeOptions)
    over_heads: bool = False
    aligned: bool = False
    recompute: Recompute = "full"
    keep_attention: bool = False
    keep_gathered: bool = False
    split: Split = Split()
    micro_batch: int = 1
    micro_batches: int = 1

    @property
    def slot(self) -> int:
        """Ranks that work on one row, apart from TP and PP."""
        return max(self.bp, self.cp)

    @property
    def gpus(self) -> int:
        """All ranks."""
        return self.tp * self.pp * self.dp * self.slot

    @property
    def mode(self) -> str:
        """CSBP, BP, CP, hybrid or single."""
        return parallel_mode(self.bp, self.cp)
