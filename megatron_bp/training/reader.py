"""Reads a step's micro-batches at once: each loss term's count is known before the first backward.

Counts are integers from the plan and the corruption: one all-reduce over the data-parallel ranks
gives the step's, and none is needed for a single term, whose count Megatron adds up itself. The
losses of a mixture of experts are means over rows, so a model that has one needs both counts.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.batch.dataset import samples_of
from megatron_bp.diffusion.corruption import Corruption, corrupt
from megatron_bp.diffusion.loss import TermScales, row_scale, term_scales
from megatron_bp.diffusion.objective import Objective
from megatron_bp.sequence.cache import PlanCache
from megatron_bp.sequence.packing import Sample, join
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One sample, what is made of it on every rank alike, and the step's scales.

    `row_scale` multiplies sums over rows (see `diffusion.loss.row_scale`); None if not counted.
    """

    sample: Sample
    plan: SequencePlan
    corruption: Corruption
    scales: TermScales
    row_scale: float | None = None


class StepReader:
    """Hands out micro-batches; at the first of a step it reads them all."""

    def __init__(
        self, sequence: SequenceOptions, objective: Objective, count_rows: bool = False
    ) -> None:
        self._plans = PlanCache(sequence)
        self._objective = objective
        self._count_rows = count_rows
        # By identity, with the iterator so that it stays itself; a run has a handful.
        self._waiting: dict[int, tuple[Any, deque[MicroBatch]]] = {}

    def take(
        self,
        iterator: Iterator[dict[str, Tensor]],
        micro_batches: int,
        data_parallel: dist.ProcessGroup,
        device: torch.device,
        joined: bool = True,
    ) -> MicroBatch:
        """The next micro-batch of `iterator`.

        Args:
            iterator: yields collated samples (Megatron's RerunDataIterator: a step that is run
                again rewinds it, and is read again).
            micro_batches: micro-batches of this rank in a step.
            data_parallel: the ranks that read other samples of the same step.
            device: where that group's collectives work.
            joined: the rows of a batch are one micro-batch; else (in an evaluation, where each
                row has its number) each is one by itself.
        """
        _, waiting = self._waiting.setdefault(id(iterator), (iterator, deque()))
        if not waiting:
            waiting.extend(self._read(iterator, micro_batches, data_parallel, device, joined))
        return waiting.popleft()

    def _read(
        self,
        iterator: Iterator[dict[str, Tensor]],
        micro_batches: int,
        data_parallel: dist.ProcessGroup,
        device: torch.device,
        joined: bool,
    ) -> Sequence[MicroBatch]:
        samples: list[Sample] = []
        while len(samples) < micro_batches:
            batch = samples_of(next(iterator))
            samples += [join(batch)] if joined else batch
        assert len(samples) == micro_batches, "arguments/degrees.py refuses such a batch"
        plans = [self._plans.plan(sample, make_plan) for sample in samples]
        corruptions = [
            corrupt(sample, plan, self._objective)
            for sample, plan in zip(samples, plans, strict=True)
        ]
        by_term = zip(*(c.terms for c in corruptions), strict=True)
        counts = [sum(term.count for term in terms) for terms in by_term]
        rows = sum(plan.num_rows for plan in plans)
        if len(counts) > 1 or self._count_rows:
            whole = torch.tensor([*counts, rows], dtype=torch.int64, device=device)
            dist.all_reduce(whole, group=data_parallel)
            *counts, rows = whole.tolist()
        terms = corruptions[0].terms
        scales = term_scales(counts, [t.factor for t in terms], [t.joint for t in terms])
        reference = sum(counts[k] for k in scales.reference)
        of_rows = row_scale(reference, rows) if self._count_rows else None
        return [
            MicroBatch(sample, plan, corruption, scales, of_rows)
            for sample, plan, corruption in zip(samples, plans, corruptions, strict=True)
        ]
