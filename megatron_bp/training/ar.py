"""Autoregressive mode: Megatron's own GPT model and loss, on the samples of this project.

Nothing of the model is swapped. Documents of a row are kept apart: each position id counts from its
document's start, a token sees its own document up to itself, and predicts that document's next
token. Not scored: a document's last token, and next tokens that are not supervised.

Rotary angles run on through the row where Megatron applies them itself (its local layers): what
attention sees of them is differences inside one document. The softmax is over Megatron's padded
vocabulary, padding ids included, as in all of Megatron's own training.
"""

# Shapes: B rows of a micro-batch, T tokens a row, padded to a multiple of TP if it has to be.

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.attention.exchange.base import Traffic
from megatron_bp.batch.dataset import samples_of
from megatron_bp.batch.shard import LocalBatch, LocalTerm
from megatron_bp.diffusion.loss import report
from megatron_bp.sequence.packing import Sample, join
from megatron_bp.training.metrics import BINS, Metrics, Sums
from megatron_bp.training.nonfinite import NonFinite
from megatron_bp.training.step import loss_function


class _Rows:
    """Hands out the rows of a micro-batch: one at a time in an evaluation, where each counts."""

    def __init__(self) -> None:
        # By identity, with the iterator so that it stays itself; a run has a handful.
        self._waiting: dict[int, tuple[Any, deque[Sample]]] = {}

    def take(self, iterator: Iterator[dict[str, Tensor]], training: bool) -> list[Sample]:
        """The next rows; Megatron's loader reads as many at once as a training step's batch has."""
        if training:
            return samples_of(next(iterator))
        _, waiting = self._waiting.setdefault(id(iterator), (iterator, deque()))
        if not waiting:
            waiting.extend(samples_of(next(iterator)))
        return [waiting.popleft()]


@dataclass(frozen=True, eq=False)
class ArSettings:
    """What a step needs beyond Megatron's arguments.

    Attributes:
        packed: attention takes documents as packed sequences (Transformer Engine), else a mask.
        multiple: rows are padded to a multiple of this many tokens.
        metrics: where a micro-batch's numbers go; None for nowhere.
        nonfinite: what happens to a loss that is NaN or infinite; None for nothing.
    """

    packed: bool = False
    multiple: int = 1
    metrics: Metrics | None = None
    nonfinite: NonFinite | None = None
    rows: _Rows = field(default_factory=_Rows, init=False)


@dataclass(frozen=True, eq=False)
class ArBatch:
    """A micro-batch (tensors on the CPU).

    Attributes:
        tokens, positions: int64[B, T], ids, and positions inside their documents.
        document: int32[B, T], ordinal of each token's document in its row; -1 for padding.
        labels: int64[B, T], the next token; 0 where not scored.
        scored: bool[B, T].
    """

    tokens: Tensor
    positions: Tensor
    document: Tensor
    labels: Tensor
    scored: Tensor

    @property
    def count(self) -> int:
        """Scored tokens."""
        return int(torch.count_nonzero(self.scored))


def make_batch(samples: Sequence[Sample], multiple: int = 1) -> ArBatch:
    """The rows of a micro-batch, padded to a multiple of `multiple` tokens."""
    longest = max(len(sample.tokens) for sample in samples)
    length = -(-longest // multiple) * multiple

    def rows(name: str, filling: int) -> NDArray[Any]:
        columns = [getattr(sample, name) for sample in samples]
        return np.stack([np.pad(c, (0, length - len(c)), constant_values=filling) for c in columns])

    tokens, document = rows("tokens", 0).astype(np.int64), rows("document", -1)
    last = np.zeros((len(samples), 1), dtype=np.bool_)
    follows = np.hstack([document[:, :-1] == document[:, 1:], last])
    scored = follows & np.hstack([rows("supervised", 0)[:, 1:], last]) & (document >= 0)
    labels = np.where(scored, np.roll(tokens, -1, axis=1), 0)
    arrays = (tokens, rows("position", 0).astype(np.int64), document, labels, scored)
    return ArBatch(*(torch.from_numpy(array) for array in arrays))


def document_mask(document: Tensor) -> Tensor:
    """bool[B, 1, T, T], True = hidden: of another document, or later. Padding sees itself alone."""
    same = document[:, :, None] == document[:, None, :]
    same &= (document >= 0)[:, :, None]
    length = document.shape[1]
    eye = torch.eye(length, dtype=torch.bool, device=document.device)
    hidden: Tensor = ~(same.tril() | eye)
    return hidden[:, None]


def packed_documents(document: Tensor) -> PackedSeqParams:
    """The row [1, T] as packed sequences; padding is sequences of one token."""
    changes = torch.ones(document.shape[1] + 1, dtype=torch.bool, device=document.device)
    changes[1:-1] = (document[0, 1:] != document[0, :-1]) | (document[0, 1:] < 0)
    starts = torch.nonzero(changes).flatten().to(torch.int32)
    longest = int((starts[1:] - starts[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def forward_step(
    settings: ArSettings, data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module
) -> tuple[Tensor, Any]:
    """Megatron's forward step (with `settings` bound): the output and the function of its loss."""
    if settings.metrics is not None:
        settings.metrics.begin()
    samples = settings.rows.take(data_iterator, model.training)
    if settings.packed:
        samples = [join(samples)]
    batch = make_batch(samples, settings.multiple)
    device = next(model.parameters()).device
    document = batch.document.to(device)
    output = model(
        batch.tokens.to(device),
        batch.positions.to(device),
        None if settings.packed else document_mask(document),
        labels=batch.labels.to(device),
        packed_seq_params=packed_documents(document) if settings.packed else None,
    )
    if not get_attr_wrapped_model(model, "post_process"):
        return output, None  # Megatron asks for the loss in the last stage alone
    total = (output * batch.scored.to(device)).sum()
    if settings.nonfinite is not None:
        settings.nonfinite.check(total, join(samples), model.training)
    exact = (output.detach().to(torch.float64) * batch.scored.to(device)).sum()
    if settings.metrics is not None:
        text = sum(float(sample.document_bytes.sum()) for sample in samples)
        settings.metrics.add(
            Sums(exact[None], exact.new_zeros(BINS), exact.new_zeros(BINS)),
            _as_local(batch),
            batch.tokens.numel(),
            Traffic(),
            text,
        )
    return total, partial(loss_function, batch.count, {"ar loss": report(exact, batch.count)})


def _as_local(batch: ArBatch) -> LocalBatch:
    """The same as the metrics take it: clean rows alone, with one term."""
    scored = batch.scored.flatten()
    term = LocalTerm("ar", batch.labels.flatten(), scored.to(torch.float32), batch.count, 1.0)
    return LocalBatch(
        input_ids=batch.tokens.flatten(),
        position_ids=batch.positions.flatten(),
        terms=(term,),
        p=torch.zeros(len(scored)),
        corruptible=0,
        corrupted=0,
        num_clean=len(scored),
        index=torch.arange(len(scored), dtype=torch.int32),
        clean_tokens=int(torch.count_nonzero(batch.document >= 0)),
        own_rows=torch.ones_like(scored),
        shards=(),
    )
