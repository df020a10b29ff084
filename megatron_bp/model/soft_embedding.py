"""Soft embeddings: the input embedding of a token, in expectation over a row's predicted softmax.

Exact, without the logits ever standing whole: chunks of rows and ids with a running maximum, as in
online softmax (arXiv 1805.02867). Over TP ranks each has the part of its ids; a gather of one
number a row and one all-reduce of the rows make it whole. Megatron's embeddings have no scale but
that of MuP, which is refused, so none is applied.
"""

# Shapes: K rows (k in a chunk), H hidden size, p this rank's padded ids, v true ids of a chunk.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.model.chunks import CHUNK_LOGITS
from megatron_bp.model.output import pick_rows
from megatron_bp.parallel.collectives import all_gather

CHUNK_IDS = 1 << 14


class SoftEmbedding:
    """GPTModel's `output_processor` for the first of two passes; without gradient."""

    def __init__(
        self,
        rows: Tensor,
        table: Tensor,
        vocabulary: int,
        excluded_id: int | None = None,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        """Set up for one micro-batch.

        Args:
            rows: int64[K], the rows, counted before sequence parallelism cuts them.
            table: [p, H], this rank's input embeddings.
            vocabulary: number of true ids.
            excluded_id: an id of probability 0; None for none.
            group: the ranks that share the tables (TP); None for one.
            sequence_parallel: each of them has a slice of the hidden states.
        """
        self._rows = rows
        self._table = table
        self._vocabulary = vocabulary
        self._excluded_id = excluded_id
        self._group = group if group is not None and group.size() > 1 else None
        self._sequence_parallel = sequence_parallel

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: torch.nn.Module,
        output_weight: Tensor | None,
        **unused: Any,
    ) -> Tensor:
        """[K, H], alike on all TP ranks; arguments as for `LossHead`."""
        weight = output_weight if output_weight is not None else output_layer.weight
        assert isinstance(weight, Tensor)
        return expected_embedding(
            pick_rows(hidden_states, self._rows, self._group, self._sequence_parallel),
            weight,
            self._table,
            self._vocabulary,
            self._excluded_id,
            self._group,
        )


def expected_embedding(
    hidden_KH: Tensor,
    weight_pH: Tensor,
    table_pH: Tensor,
    vocabulary: int,
    excluded_id: int | None = None,
    group: dist.ProcessGroup | None = None,
    chunk: tuple[int, int] = (CHUNK_LOGITS // CHUNK_IDS, CHUNK_IDS),
) -> Tensor:
    """softmax(hidden weight[:vocabulary]^T) table[:vocabulary], [K, H].

    In float32 (float64 for float64 inputs); no gradient. With `group`, rank k of it holds the rows
    [k p, (k + 1) p) of both tables, and all get the same.

    Args:
        hidden_KH: hidden states.
        weight_pH: output weight.
        table_pH: input embeddings, of the dtype of the weight.
        vocabulary: number of true ids.
        excluded_id: has probability 0; None for none.
        group: the ranks that share the tables.
        chunk: (rows, ids) of which logits are formed at once.
    """
    wide = torch.float64 if hidden_KH.dtype == torch.float64 else torch.float32
    first_id = 0 if group is None else group.rank() * len(weight_pH)
    true_ids = min(max(vocabulary - first_id, 0), len(weight_pH))
    excluded = -1 if excluded_id is None else excluded_id - first_id
    sum_KH = hidden_KH.new_zeros((len(hidden_KH), table_pH.shape[1]), dtype=wide)
    total_K1 = hidden_KH.new_zeros((len(hidden_KH), 1), dtype=wide)
    # Finite, for ids that all have probability 0: their differences must not be NaN.
    most_K1 = torch.full_like(total_K1, torch.finfo(wide).min)
    for top in range(0, len(hidden_KH), chunk[0]):
        rows = slice(top, top + chunk[0])
        for first in range(0, true_ids, chunk[1]):
            last = min(first + chunk[1], true_ids)
            logits_kv = (hidden_KH[rows] @ weight_pH[first:last].mT).to(wide)
            if first <= excluded < last:
                logits_kv[:, excluded - first] = -torch.inf
            most_k1 = torch.maximum(most_K1[rows], logits_kv.amax(1, keepdim=True))
            shrink_k1 = (most_K1[rows] - most_k1).exp()
            part_kv = logits_kv.sub_(most_k1).exp_()
            total_K1[rows] = total_K1[rows] * shrink_k1 + part_kv.sum(1, keepdim=True)
            soft_kH = part_kv.to(table_pH.dtype) @ table_pH[first:last]
            sum_KH[rows] = sum_KH[rows] * shrink_k1 + soft_kH
            most_K1[rows] = most_k1
    lse_K1 = most_K1 + total_K1.log()
    if group is None:
        return sum_KH * (most_K1 - lse_K1).exp()
    pending, _ = all_gather(lse_K1, group)
    whole_K1 = torch.logsumexp(pending.wait(), 0)
    sum_KH *= (most_K1 - whole_K1).exp()
    dist.all_reduce(sum_KH, group=group)
    return sum_KH
