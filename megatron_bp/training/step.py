"""One micro-batch: sample -> plan -> corruption -> this rank's rows -> model -> (sum, count).

The functions that Megatron's schedules call. Every rank derives its own rows from the same sample.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from megatron_bp.attention.core_attention import layer_window
from megatron_bp.attention.layout import AttentionOptions, Layout, make_layout
from megatron_bp.batch.shard import LocalBatch, local_batch
from megatron_bp.diffusion.loss import LossSum, divisors, report
from megatron_bp.diffusion.objective import Objective
from megatron_bp.model.output import LossHead, scored_rows
from megatron_bp.sequence.plan import SequenceOptions
from megatron_bp.training.metrics import Metrics, measure
from megatron_bp.training.nonfinite import NonFinite
from megatron_bp.training.reader import MicroBatch, StepReader
from megatron_bp.training.self_conditioning import condition_of, conditioned_input


@dataclass(frozen=True, eq=False)
class StepSettings:
    """What a step needs beyond Megatron's arguments.

    Attributes:
        sequence: how samples are planned.
        objective: how they are corrupted and scored.
        attention: how attention is computed.
        micro_batches: micro-batches of this rank in a training step (True) or in a step of an
            evaluation (False).
        metrics: where a micro-batch's numbers go; None for nowhere.
        nonfinite: what happens to a loss that is NaN or infinite; None for nothing.
        count_rows: whether a step's rows are counted, for losses that are means over rows.
    """

    sequence: SequenceOptions
    objective: Objective
    attention: AttentionOptions
    micro_batches: Callable[[bool], int]
    metrics: Metrics | None = None
    nonfinite: NonFinite | None = None
    count_rows: bool = False
    reader: StepReader = field(init=False)

    def __post_init__(self) -> None:
        reader = StepReader(self.sequence, self.objective, self.count_rows)
        object.__setattr__(self, "reader", reader)


@dataclass(frozen=True, eq=False)
class Forward:
    """What the model, or a pipeline stage of it, made of this rank's rows of a micro-batch.

    Attributes:
        output: scalar with gradient, the loss sum over all terms; hidden states in all stages but
            the last.
        batch, layout: the rows, and how attention saw them.
        head: knows the cross-entropy of each scored row; None in all stages but the last.
        slot_rank: rank inside the slot.
    """

    output: Tensor
    batch: LocalBatch
    layout: Layout
    head: LossHead | None
    slot_rank: int


def run_model(
    micro: MicroBatch, objective: Objective, attention: AttentionOptions, model: torch.nn.Module
) -> Forward:
    """The model, or the stage of it that `model` is, on this rank's rows of a micro-batch."""
    groups, config = get_attr_wrapped_model(model, "pg_collection"), get_model_config(model)
    device = next(model.parameters()).device
    rank = int(groups.slot.rank())
    batch = local_batch(
        micro.sample,
        micro.plan,
        micro.corruption,
        rank,
        groups.tp.size() if config.sequence_parallel else 1,
    )
    layout = make_layout(
        micro.plan,
        batch.shards,
        rank,
        stage_windows(model),
        batch.position_ids.to(device, non_blocking=True),
        groups.clean_shard,
        attention,
    )
    head = None
    if get_attr_wrapped_model(model, "post_process"):
        scored = scored_rows(batch.terms, micro.scales.scales).to(device)
        excluded = objective.mask_token_id if objective.exclude_mask_logit else None
        head = LossHead(scored, objective.vocabulary, groups.tp, config.sequence_parallel, excluded)
    uncounted = None
    if config.num_moe_experts is not None:
        uncounted = ~batch.own_rows.to(device)[None]
        if micro.row_scale is not None:  # the schedules ask for it after this forward
            config.moe_grad_scale_func = partial(float, micro.row_scale)
    ids, positions = batch.input_ids.to(device)[None], layout.positions[None]
    forward = partial(model, ids, positions, None, packed_seq_params=layout, padding_mask=uncounted)
    embedded = None
    if objective.self_conditioning > 0:
        condition = condition_of(micro, objective, batch, int(groups.clean_shard.rank()))
        embedded = conditioned_input(model, forward, ids, positions, condition, objective)
        if layout.results is not None:
            layout.results.clear()  # the first pass has no backward
    output = forward(decoder_input=embedded, output_processor=head)
    return Forward(output, batch, layout, head, rank)


def stage_windows(model: torch.nn.Module) -> tuple[int | None, ...]:
    """The distinct windows of the layers that are here, numbered through all stages."""
    layers = get_attr_wrapped_model(model, "decoder").layers
    windows = {layer_window(layer.config, layer.layer_number) for layer in layers}
    return tuple(sorted(windows, key=lambda window: (window is not None, window or 0)))


def forward_step(
    settings: StepSettings, data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module
) -> tuple[Tensor, Any]:
    """Megatron's forward step (with `settings` bound): the output and the function of its loss."""
    if settings.metrics is not None:
        settings.metrics.begin()
    micro = settings.reader.take(
        data_iterator,
        settings.micro_batches(model.training),
        get_attr_wrapped_model(model, "pg_collection").dp,
        next(model.parameters()).device,
        model.training,
    )
    forward = run_model(micro, settings.objective, settings.attention, model)
    if forward.head is None:
        if settings.metrics is not None:
            settings.metrics.sending(forward.layout.traffic)
        return forward.output, None  # Megatron asks for the loss in the last stage alone
    sums = measure(forward.batch, forward.head)
    if settings.nonfinite is not None:
        settings.nonfinite.check(forward.output, micro.sample, model.training)
    if settings.metrics is not None:
        cost = int(micro.plan.cost[forward.slot_rank])
        text = bytes_of_text(micro) if forward.slot_rank == 0 else 0.0
        settings.metrics.add(sums, forward.batch, cost, forward.layout.traffic, text)
    terms = forward.batch.terms
    count = sum(terms[k].count for k in micro.scales.reference)
    by = divisors([term.count for term in terms], [term.joint for term in terms])
    reports = {f"{term.name} loss": report(sums.by_term[k], by[k]) for k, term in enumerate(terms)}
    return forward.output, partial(loss_function, count, reports)


def bytes_of_text(micro: MicroBatch) -> float:
    """Bytes of the sample's text, once for each copy: the diffusion sum has every copy's tokens."""
    return float(micro.sample.document_bytes.sum()) * micro.plan.options.copies


def loss_function(
    count: int, reports: dict[str, Tensor], output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss sum, integer count, reports), as `calculate_per_token_loss` wants them."""
    return (*LossSum(output, count).for_megatron(), reports)
