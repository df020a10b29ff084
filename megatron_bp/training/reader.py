"""Reads a step's micro-batches at once: each loss term's count is known before the first backward.

Counts are integers from the plan and the corruption: one all-reduce over the data-parallel ranks
gives the step's, and none is needed for a single term, whose count Megatron adds up itself.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.batch.dataset import sample_of
from megatron_bp.diffusion.corruption import Corruption, corrupt
from megatron_bp.diffusion.loss import TermScales, term_scales
from megatron_bp.diffusion.objective import Objective
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One sample, what is made of it on every rank alike, and the step's scales."""

    sample: Sample
    plan: SequencePlan
    corruption: Corruption
    scales: TermScales


class StepReader:
    """Hands out micro-batches; at the first of a step it reads them all."""

    def __init__(self, sequence: SequenceOptions, objective: Objective) -> None:
        self._sequence = sequence
        self._objective = objective
        # By identity, with the iterator so that it stays itself; a run has a handful.
        self._waiting: dict[int, tuple[Any, deque[MicroBatch]]] = {}

    def take(
        self,
        iterator: Iterator[dict[str, Tensor]],
        micro_batches: int,
        data_parallel: dist.ProcessGroup,
        device: torch.device,
    ) -> MicroBatch:
        """The next micro-batch of `iterator`.

        Args:
            iterator: yields collated samples (Megatron's RerunDataIterator: a step that is run
                again rewinds it, and is read again).
            micro_batches: micro-batches of this rank in a step.
            data_parallel: the ranks that read other samples of the same step.
            device: where that group's collectives work.
        """
        _, waiting = self._waiting.setdefault(id(iterator), (iterator, deque()))
        if not waiting:
            waiting.extend(self._read(iterator, micro_batches, data_parallel, device))
        return waiting.popleft()

    def _read(
        self,
        iterator: Iterator[dict[str, Tensor]],
        micro_batches: int,
        data_parallel: dist.ProcessGroup,
        device: torch.device,
    ) -> Sequence[MicroBatch]:
        samples = [sample_of(next(iterator)) for _ in range(micro_batches)]
        plans = [make_plan(sample, self._sequence) for sample in samples]
        corruptions = [
            corrupt(sample, plan, self._objective)
            for sample, plan in zip(samples, plans, strict=True)
        ]
        by_term = zip(*(c.terms for c in corruptions), strict=True)
        counts = [sum(term.count for term in terms) for terms in by_term]
        if len(counts) > 1:
            whole = torch.tensor(counts, dtype=torch.int64, device=device)
            dist.all_reduce(whole, group=data_parallel)
            counts = whole.tolist()
        scales = term_scales(counts, [term.factor for term in corruptions[0].terms])
        return [
            MicroBatch(sample, plan, corruption, scales)
            for sample, plan, corruption in zip(samples, plans, corruptions, strict=True)
        ]
