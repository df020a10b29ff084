"""What a step did, exactly: sums over its micro-batches and ranks, divided once.

Megatron's printed line averages the first two steps after a start, in float32; these do not.
Everything is added in float64 over all ranks that share the step. Who writes the rows where is
`training/record.py`.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.attention.exchange.base import Traffic
from megatron_bp.batch.shard import LocalBatch
from megatron_bp.diffusion.loss import divisors
from megatron_bp.model.output import LossHead
from megatron_bp.parallel.collectives import gather_numbers

BINS = 10  # of the probability of corruption, each 0.1 wide


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums of one micro-batch on this rank, on its device, detached.

    Attributes:
        by_term: float64[K], sum of weight x cross-entropy of each term.
        bin_loss: float64[BINS], sum of unweighted cross-entropy of the diffusion term's scored rows
            by their probability of corruption.
        bin_rows: float64[BINS], number of those rows.
    """

    by_term: Tensor
    bin_loss: Tensor
    bin_rows: Tensor


def measure(batch: LocalBatch, head: LossHead) -> Sums:
    """The sums of a micro-batch whose forward is done."""
    assert head.cross_entropy is not None
    scored, loss = head.scored, head.cross_entropy.to(torch.float64)
    by_term = loss.new_zeros(len(batch.terms))
    by_term.index_add_(0, scored.term, loss * scored.weights)
    p = batch.p.to(loss.device)[scored.rows]
    place = (p * BINS).long().clamp(max=BINS - 1)
    diffusion = torch.tensor(
        [term.name == "diffusion" for term in batch.terms], device=loss.device
    )[scored.term]
    zeros = loss.new_zeros(BINS)
    return Sums(
        by_term,
        zeros.index_add(0, place, loss * diffusion),
        zeros.index_add(0, place, diffusion.to(torch.float64)),
    )


@dataclass(frozen=True, eq=False)
class Step:
    """What a step or an evaluation did, over all ranks.

    Attributes:
        loss: of each term, sum / count; 0 where nothing is counted.
        loss_sum, count: of each term; joint terms have the same count.
        total: sum over terms of factor x loss.
        bins: mean cross-entropy of scored rows by probability of corruption; None where no row.
        corruptible, corrupted, scored, rows: corrupted rows whose token could be corrupted, and
            was; rows that carry a loss; all rows.
        clean_tokens: tokens of the samples, counted once.
        bytes_sent: by all ranks of the job, in the exchange of clean K/V.
        balance: worst / mean cost of a rank; see `_balance`.
        seconds: from its first forward to its end, on the rank that takes longest.
        memory: bytes at the peak, of the rank that holds most.
        samples: float64[samples, 3], of each micro-batch over the ranks that share it, in the order
            of the samples: sum and count of the first term, and bytes of text.
    """

    loss: dict[str, float]
    loss_sum: dict[str, float]
    count: dict[str, int]
    total: float
    bins: list[float | None]
    corruptible: int
    corrupted: int
    scored: int
    rows: int
    clean_tokens: int
    bytes_sent: int
    balance: float
    seconds: float
    memory: int
    samples: Tensor


@dataclass(frozen=True)
class _Counted:
    """The integers of a micro-batch on this rank; its rows themselves are not kept."""

    terms: tuple[tuple[str, float], ...]
    counts: tuple[int, ...]
    corruptible: int
    corrupted: int
    scored: int
    rows: int
    clean_tokens: int


def _counted(batch: LocalBatch) -> _Counted:
    return _Counted(
        terms=tuple((term.name, term.factor) for term in batch.terms),
        counts=tuple(
            divisors([term.count for term in batch.terms], [term.joint for term in batch.terms])
        ),
        corruptible=batch.corruptible,
        corrupted=batch.corrupted,
        scored=sum(int(torch.count_nonzero(term.weights)) for term in batch.terms),
        rows=len(batch.input_ids),
        clean_tokens=batch.clean_tokens,
    )


@dataclass
class _Pile:
    """What the micro-batches since the last step left on this rank."""

    sums: list[Sums] = field(default_factory=list)
    counted: list[_Counted] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    bytes_of_text: list[float] = field(default_factory=list)
    costs: list[int] = field(default_factory=list)
    began: float | None = None


class Metrics:
    """Collects micro-batches; `finish` adds them up over the ranks.

    With pipeline stages only the last knows a loss, and it alone counts rows and tokens (`add`);
    what is sent between ranks comes from every stage (`sending`).
    """

    def __init__(self) -> None:
        self._pile = _Pile()

    def begin(self) -> None:
        """A micro-batch begins; the first one of a step starts its clock."""
        if self._pile.began is None:
            self._pile.began = time.perf_counter()

    def sending(self, traffic: Traffic) -> None:
        """What `add` is for a stage that has no loss."""
        self._pile.traffic.append(traffic)

    def add(
        self,
        sums: Sums,
        batch: LocalBatch,
        cost: int,
        traffic: Traffic,
        bytes_of_text: float,
    ) -> None:
        """A micro-batch's forward is done; its traffic still counts until the step ends.

        Args:
            sums: see `measure`.
            batch: this rank's rows.
            cost: this rank's planned work in visible pairs.
            traffic: knows the bytes sent once the backward is done.
            bytes_of_text: of the whole sample, in every copy, on one rank of the slot, 0 on the
                others; NaN where the data does not tell.
        """
        self._pile.bytes_of_text.append(bytes_of_text)
        self._pile.sums.append(sums)
        self._pile.counted.append(_counted(batch))
        self._pile.traffic.append(traffic)
        self._pile.costs.append(cost)

    def drop(self) -> None:
        """Forget what was collected."""
        self._pile = _Pile()

    def finish(
        self, group: dist.ProcessGroup, slot: int, job: dist.ProcessGroup | None = None
    ) -> Step | None:
        """The step that ends now; None if this rank had no micro-batch or no loss. Collective.

        Args:
            group: ranks that share the step's samples and rows, those of a slot side by side.
            slot: ranks of a slot.
            job: all ranks, other stages and TP peers included; None if those of `group` are all.
        """
        pile, self._pile = self._pile, _Pile()
        if pile.began is None:
            return None
        of_rank = [
            sum(t.bytes_sent for t in pile.traffic),
            time.perf_counter() - pile.began,
            torch.cuda.max_memory_allocated(),
        ]
        device = torch.cuda.current_device()
        everywhere = torch.tensor(of_rank, dtype=torch.float64, device=device)
        of_job = gather_numbers(everywhere, group if job is None else job).cpu()
        if not pile.counted:
            return None
        terms = pile.counted[0].terms
        first = pile.sums[0].by_term
        counts = [[c.counts[k] for c in pile.counted] for k in range(len(terms))]
        numbers = [
            sum(c.corruptible for c in pile.counted),
            sum(c.corrupted for c in pile.counted),
            sum(c.scored for c in pile.counted),
            sum(c.rows for c in pile.counted),
            sum(c.clean_tokens for c in pile.counted),
        ]
        by_sample = torch.stack([s.by_term[0] for s in pile.sums])
        vector = torch.cat(
            [
                torch.stack([s.by_term for s in pile.sums]).sum(0),
                first.new_tensor([sum(c) for c in counts]),
                torch.stack([s.bin_loss for s in pile.sums]).sum(0),
                torch.stack([s.bin_rows for s in pile.sums]).sum(0),
                first.new_tensor(numbers),
                by_sample,
                first.new_tensor(counts[0]),
                first.new_tensor(pile.bytes_of_text),
                first.new_tensor(pile.costs),
            ]
        )
        every = gather_numbers(vector, group).cpu()
        parts = every.split([len(terms)] * 2 + [BINS] * 2 + [5] + [len(by_sample)] * 4, dim=1)
        loss_sum, count, bin_loss, bin_rows = (part.sum(0).tolist() for part in parts[:4])
        whole = parts[4].sum(0).tolist()
        names = [name for name, _ in terms]
        loss = [s / n if n else 0.0 for s, n in zip(loss_sum, count, strict=True)]
        return Step(
            loss=dict(zip(names, loss, strict=True)),
            loss_sum=dict(zip(names, loss_sum, strict=True)),
            count={name: int(n) for name, n in zip(names, count, strict=True)},
            total=sum(factor * part for (_, factor), part in zip(terms, loss, strict=True)),
            bins=[s / n if n else None for s, n in zip(bin_loss, bin_rows, strict=True)],
            corruptible=int(whole[0]),
            corrupted=int(whole[1]),
            scored=int(whole[2]),
            rows=int(whole[3]),
            clean_tokens=int(whole[4]),
            bytes_sent=int(of_job[:, 0].sum()),
            balance=_balance(parts[8], slot),
            seconds=float(of_job[:, 1].max()),
            memory=int(of_job[:, 2].max()),
            samples=torch.stack([_by_sample(part, slot) for part in parts[5:8]], dim=1),
        )


def _balance(of_ranks: Tensor, slot: int) -> float:
    """Worst over mean work of costs [ranks, micro-batches].

    Ranks of a slot wait for each other in every micro-batch, slots only at the end of the step.
    """
    mean = of_ranks.sum().item() / len(of_ranks)
    worst = of_ranks.view(-1, slot, of_ranks.shape[1]).amax(1).sum(1).max().item()
    return worst / mean if mean else 1.0


def _by_sample(of_ranks: Tensor, slot: int) -> Tensor:
    """[ranks, micro-batches] summed over each slot, as [samples] in the order they were dealt."""
    return of_ranks.view(-1, slot, of_ranks.shape[1]).sum(1).T.flatten()


def masked_fraction(step: Step) -> float:
    """Corrupted tokens of those that could be, in all copies; 0 without any."""
    return step.corrupted / step.corruptible if step.corruptible else 0.0


def as_row(step: Step) -> dict[str, Any]:
    """The step as one flat JSON row."""
    row: dict[str, Any] = {"loss": step.total}
    for name in step.loss:
        row[f"{name}_loss"] = step.loss[name]
        row[f"{name}_loss_sum"] = step.loss_sum[name]
        row[f"{name}_count"] = step.count[name]
    return row | {
        "loss_by_corruption": step.bins,
        "masked_fraction": masked_fraction(step),
        "scored": step.scored,
        "rows": step.rows,
        "clean_tokens": step.clean_tokens,
        "bytes_sent": step.bytes_sent,
        "balance": step.balance,
        "memory_bytes": step.memory,
        "seconds": step.seconds,
        "clean_tokens_per_second": step.clean_tokens / step.seconds,
    }
