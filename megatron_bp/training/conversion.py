"""Does a converted model still compute what the autoregressive checkpoint computes?

Under the token-causal relation the clean rows of a block diffusion model are a plain causal model,
so their logits must be those of Megatron's own model of the checkpoint (model/reference.py), on a
real document, whatever the layout. What differs was set otherwise, or was not loaded.
"""

# Shapes: T tokens of the document, S rows of this rank, C of them clean, H hidden size, p this TP
# rank's padded ids, V true ids of the checkpoint.

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_bp.attention.layout import make_layout
from megatron_bp.batch.dataset import samples_of
from megatron_bp.batch.shard import local_batch
from megatron_bp.data.document import Document
from megatron_bp.diffusion.corruption import corrupt
from megatron_bp.model.reference import forget
from megatron_bp.parallel.collectives import all_gather
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, make_plan
from megatron_bp.training.step import StepSettings, stage_windows

TOKENS = 1024  # of the document; the reference's attention is quadratic in memory
LOOKED_AT = 8  # rows of the data set, for their longest document
CHUNK_LOGITS = 1 << 24
FLOAT32_ERROR = 1e-5  # relative
TIMES_STOCK = 2.0  # what is allowed in low precision, in errors of Megatron's own model there


class ConversionError(ValueError):
    """The model does not compute what the checkpoint's model computes."""


@dataclass(frozen=True)
class Agreement:
    """How far clean rows' logits are from the reference's; relative to its rows' mean norm.

    Attributes:
        rows: tokens of the document whose logits were compared, on whichever ranks have them.
        tokens: of the document.
        worst: of a row, norm of the difference.
        allowed: what it may be.
    """

    rows: int
    tokens: int
    worst: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether they agree; NaN does not."""
        return self.rows == self.tokens and self.worst <= self.allowed

    def told(self) -> str:
        """In words."""
        return (
            f"logits of {self.rows} of {self.tokens} clean rows under the token-causal relation "
            f"differ from those of Megatron's own model of the checkpoint by at most "
            f"{self.worst:.2e}, relative ({self.allowed:.2e} allowed)"
        )


def token_causal(options: SequenceOptions) -> SequenceOptions:
    """The run's own options, but a clean row sees up to itself, and all of them are computed."""
    return replace(options, clean_relation="token", score_clean="all")


def longest_document(samples: Iterable[Sample], limit: int = TOKENS) -> Sample:
    """A row of the longest document of the samples, cut to `limit` tokens.

    Raises:
        ConversionError: none has two tokens.
    """
    best = np.zeros(0, dtype=np.int32)
    for sample in samples:
        for ordinal in range(len(sample.document_keys)):
            tokens = sample.tokens[sample.document == ordinal]
            best = tokens if len(tokens) > len(best) else best
    best = best[:limit]
    if len(best) < 2:
        raise ConversionError(
            "no document of the first rows has two tokens, so the conversion cannot be checked; "
            "look at the data, or set --check-conversion off"
        )
    document = Document(best, np.ones(len(best), dtype=np.bool_), 0)
    return pack([document], len(best))


def check_conversion(
    chunks: list[Any],
    settings: StepSettings,
    sample: Sample,
    vocabulary: int,
    reference: Callable[[bool], list[Any]],
) -> Agreement:
    """How well `chunks`, the stages of the run's model on this rank, agree. Collective.

    Args:
        chunks: bare models.
        settings: of the run.
        sample: one document.
        vocabulary: true ids of the checkpoint.
        reference: builds the stages of Megatron's own model; in float32 if asked to.
    """
    before = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        ours = _ours(chunks, settings, sample)
        low = next(chunks[0].parameters()).dtype != torch.float32
        stock = _stock(reference(False), sample)
        exact = _stock(reference(True), sample) if low else stock
        length = len(sample.tokens)
        rows, worst = _compare(ours, exact, vocabulary, length, chunks[0])
        allowed = FLOAT32_ERROR
        if low:
            of_stock = _compare(stock, exact, vocabulary, length, chunks[0])[1]
            allowed = max(allowed, TIMES_STOCK * of_stock)
    for chunk, training in zip(chunks, before, strict=True):
        chunk.train(training)
    return Agreement(rows, length, worst, allowed)


class Conversion:
    """The check of a run, from the samples that it will train on."""

    def __init__(
        self,
        settings: StepSettings,
        vocabulary: int,
        reference: Callable[[bool], list[Any]],
        changed: str,
    ) -> None:
        """Set up; see `check_conversion`.

        Args:
            settings: of the run.
            vocabulary: true ids of the checkpoint.
            reference: builds Megatron's own model.
            changed: what of the model is set otherwise than in the checkpoint, in words, if any is.
        """
        self._settings = settings
        self._vocabulary = vocabulary
        self._reference = reference
        self._changed = changed
        self._samples: Any = None

    def offer(self, samples: Any) -> None:
        """The training data set, once it stands."""
        self._samples = samples

    def __call__(self, chunks: list[Any]) -> None:
        """Check the bare stages of this rank, and print the worst difference. Collective.

        Raises:
            ConversionError: on all ranks: they do not agree.
        """
        first = [self._samples[k] for k in range(min(LOOKED_AT, len(self._samples)))]
        collate = torch.utils.data.default_collate
        samples = [samples_of(collate([item]))[0] for item in first]
        found = check_conversion(
            chunks,
            self._settings,
            longest_document(samples),
            self._vocabulary,
            self._reference,
        )
        if not found.holds:
            cause = (
                f"set otherwise than in the checkpoint: {self._changed}"
                if self._changed
                else (
                    "rotary (base, scaling, interleaved), norm and its epsilon, qk layernorm, "
                    "window, or a tokenizer whose ids are others; or weights that were not loaded"
                )
            )
            raise ConversionError(
                f"the conversion does not hold: {found.told()}. Likely causes: {cause}. Correct "
                f"it, or start all the same with --check-conversion off"
            )
        if dist.get_rank() == 0:
            print(f"megatron_bp: conversion checked: {found.told()}", flush=True)


class _Tap:
    """GPTModel's `output_processor` that keeps the clean rows' hidden states and the output weight.

    Attributes:
        positions: int64[C], positions of this rank's clean rows.
        hidden: [C, H], theirs, in the last stage; None before it.
        weight: [p, H] of the output layer.
    """

    def __init__(self, rows: Tensor, positions: Tensor) -> None:
        self._rows = rows
        self.positions = positions
        self.hidden: Tensor | None = None
        self.weight: Tensor | None = None

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: torch.nn.Module,
        output_weight: Tensor | None,
        config: Any,
        **unused: Any,
    ) -> Tensor:
        if config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=output_layer.tp_group
            )
        weight = output_weight if output_weight is not None else output_layer.weight
        assert isinstance(weight, Tensor)
        self.hidden, self.weight = hidden_states[self._rows, 0], weight.detach().clone()
        return hidden_states.new_zeros(())


def _ours(chunks: list[Any], settings: StepSettings, sample: Sample) -> _Tap:
    plan = make_plan(sample, token_causal(settings.sequence))
    corruption = corrupt(sample, plan, settings.objective)
    config, groups = get_model_config(chunks[0]), chunks[0].pg_collection
    device = next(chunks[0].parameters()).device
    windows = {window for chunk in chunks for window in stage_windows(chunk)}
    batch = local_batch(
        sample,
        plan,
        corruption,
        int(groups.slot.rank()),
        groups.tp.size() if config.sequence_parallel else 1,
    )
    layout = make_layout(
        plan,
        batch.shards,
        int(groups.slot.rank()),
        windows,
        batch.position_ids.to(device),
        groups.clean_shard,
        settings.attention,
    )
    index = batch.index
    rows = torch.nonzero((torch.arange(len(index)) < batch.num_clean) & (index >= 0)).flatten()
    tap = _Tap(rows.to(device), index[rows].long().to(device))

    def forward(model: Any) -> Tensor:
        output: Tensor = model(
            batch.input_ids.to(device)[None],
            layout.positions[None],
            None,
            packed_seq_params=layout,
            output_processor=tap if model.post_process else None,
            padding_mask=None,
        )
        return output

    _through_stages(chunks, forward, len(batch.input_ids))
    return tap


def _stock(chunks: list[Any], sample: Sample) -> _Tap:
    device = next(chunks[0].parameters()).device
    tokens = torch.from_numpy(sample.tokens.astype(np.int64)).to(device)[None]
    positions = torch.arange(tokens.shape[1], device=device)[None]
    tap = _Tap(positions[0], positions[0])

    def forward(model: Any) -> Tensor:
        processor = tap if model.post_process else None
        output: Tensor = model(tokens, positions, None, output_processor=processor)
        return output

    _through_stages(chunks, forward, tokens.shape[1])
    forget(chunks)
    return tap


def _through_stages(chunks: list[Any], forward: Callable[[Any], Tensor], rows: int) -> None:
    """One forward through all pipeline stages, by Megatron's own schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Any]:
        return forward(model), _no_loss

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[None] * len(chunks) if len(chunks) > 1 else None,
        model=chunks if len(chunks) > 1 else chunks[0],
        # Interleaved stages take micro-batches in groups of as many as there are stages.
        num_microbatches=chunks[0].pg_collection.pp.size() if len(chunks) > 1 else 1,
        seq_length=rows,
        micro_batch_size=1,
        forward_only=True,
    )


def _no_loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return output, torch.zeros((), dtype=torch.int, device=output.device), {}


def _compare(
    found: _Tap, exact: _Tap, vocabulary: int, length: int, model: Any
) -> tuple[int, float]:
    """(positions found, worst relative error of one) over all ranks; NaN if a logit is."""
    device = next(model.parameters()).device
    seen = torch.zeros(length, device=device)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # rows, norms, errors not finite
    worst = torch.zeros((), dtype=torch.float64, device=device)
    if found.hidden is not None and found.weight is not None:
        assert exact.hidden is not None
        assert exact.weight is not None
        seen[found.positions] = 1
        step = max(1, CHUNK_LOGITS // vocabulary)
        for hidden_rH, at_r in zip(
            found.hidden.split(step), found.positions.split(step), strict=True
        ):
            group = model.pg_collection.tp
            true_rV = _logits(exact.hidden[at_r], exact.weight, vocabulary, group)
            found_rV = _logits(hidden_rH, found.weight, vocabulary, group)
            norm_r, error_r = true_rV.norm(dim=1), (found_rV - true_rV).norm(dim=1)
            bad = torch.count_nonzero(~torch.isfinite(error_r))
            sums += torch.stack([norm_r.new_tensor(len(norm_r)), norm_r.sum(), bad])
            if len(error_r):
                worst = torch.maximum(worst, torch.nan_to_num(error_r).max())
    dist.all_reduce(sums)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    rows, norm, bad_rows = sums.tolist()
    relative = worst.item() * rows / norm if norm > 0 and not bad_rows else float("nan")
    return int(seen.sum()), relative


def _logits(hidden_rH: Tensor, weight_pH: Tensor, vocabulary: int, group: Any) -> Tensor:
    """float64 [r, V]: of the true ids, whichever TP ranks have them."""
    pending, _ = all_gather((hidden_rH @ weight_pH.mT).to(torch.float64), group)
    of_ranks = pending.wait()
    return of_ranks.transpose(0, 1).flatten(1)[:, :vocabulary]
