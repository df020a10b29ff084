"""One micro-batch: sample -> plan -> corruption -> this rank's rows -> model -> (sum, count).

The functions that Megatron's schedules call. Every rank derives its own rows from the same sample.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from megatron_bp.attention.core_attention import layer_windows
from megatron_bp.attention.exchange import CleanExchange
from megatron_bp.attention.kernels import tiled
from megatron_bp.attention.layout import Layout
from megatron_bp.attention.parts import make_view, shard_sizes
from megatron_bp.batch.dataset import sample_of
from megatron_bp.batch.shard import LocalBatch, local_batch
from megatron_bp.diffusion.corruption import corrupt
from megatron_bp.diffusion.loss import LossSum
from megatron_bp.diffusion.objective import Objective
from megatron_bp.model.output import loss_head, scored_rows
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.training.metrics import Metrics, MicroBatch


@dataclass(frozen=True, eq=False)
class StepSettings:
    """What a step needs beyond Megatron's arguments.

    Attributes:
        sequence: how samples are planned.
        objective: how they are corrupted and scored.
        metrics: where a micro-batch's numbers go; None for nowhere.
        check_for_nan: stop on a loss that is NaN or infinite.
    """

    sequence: SequenceOptions
    objective: Objective
    metrics: Metrics | None = None
    check_for_nan: bool = True


def make_layout(
    plan: SequencePlan, batch: LocalBatch, group: torch.distributed.ProcessGroup, device: Any
) -> Layout:
    """The Layout of a micro-batch on this rank of the clean shard group."""
    rank = int(group.rank())
    return Layout(
        positions=batch.position_ids.to(device, non_blocking=True),
        views={
            window: make_view(visible, plan.chunks, rank, tiled.TILE_ROWS, device)
            for window, visible in batch.visibility.items()
        },
        exchange=CleanExchange(group, shard_sizes(plan.chunks, group.size())),
    )


def run_model(
    settings: StepSettings, sample: Sample, model: torch.nn.Module
) -> tuple[Tensor, LocalBatch, Layout, SequencePlan]:
    """The model on this rank's rows of a sample: the loss sum, and what it was made from."""
    groups = get_attr_wrapped_model(model, "pg_collection")
    device = next(model.parameters()).device
    plan = make_plan(sample, settings.sequence)
    corruption = corrupt(sample, plan, settings.objective)
    batch = local_batch(
        sample, plan, corruption, groups.bp.rank(), layer_windows(get_model_config(model))
    )
    layout = make_layout(plan, batch, groups.clean_shard, device)
    scored = scored_rows(batch.labels, batch.weights, settings.objective.vocabulary)
    output = model(
        batch.input_ids.to(device)[None],
        layout.positions[None],
        None,
        packed_seq_params=layout,
        output_processor=loss_head,
        output_processor_context=scored.to(device),
    )
    return output, batch, layout, plan


def forward_step(
    settings: StepSettings, data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module
) -> tuple[Tensor, Any]:
    """Megatron's forward step (with `settings` bound): the output and the function of its loss."""
    if settings.metrics is not None:
        settings.metrics.begin()
    sample = sample_of(next(data_iterator))
    output, batch, layout, plan = run_model(settings, sample, model)
    if settings.metrics is not None:
        settings.metrics.add(
            MicroBatch(
                loss=output.detach(),
                count=batch.count,
                masked=int(torch.count_nonzero(batch.weights)),
                clean_tokens=batch.clean_tokens,
                rows=len(batch.input_ids),
                cost=int(plan.cost[get_attr_wrapped_model(model, "pg_collection").bp.rank()]),
                exchange=layout.exchange,
            )
        )
    return output, partial(loss_function, batch.count, settings.check_for_nan)


def loss_function(
    count: int, check_for_nan: bool, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss sum, integer count, report), as `calculate_per_token_loss` wants them."""
    if check_for_nan:
        get_rerun_state_machine().validate_result(
            result=output,
            rejection_func=lambda value: not torch.isfinite(value).all(),
            message="found a NaN or infinite diffusion loss",
            tolerance=0.0,
            fatal=True,
        )
    loss = LossSum(output, count)
    total, tokens = loss.for_megatron()
    return total, tokens, {"diffusion loss": loss.for_report()}
