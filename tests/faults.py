"""Faults to plant: each breaks the product in one way that a test must notice.

`plant(name, rank)` is a context manager. A test of the tests: `tests/ranks/test_faults.py`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


def _leak(rank: int) -> Any:
    """A corrupted row sees its own clean block (`>=` for `>`)."""
    from megatron_bp.batch import shard

    def leaking(plan: Any, clean: Any, corrupted: Any, *rest: Any) -> Any:
        seen = shard_visibility(plan, clean, corrupted, *rest)
        high = seen.clean_hi.clone()
        own = slice(seen.num_clean, None)
        high[own] += seen.own_hi[own] - seen.own_lo[own]
        return dataclasses.replace(seen, clean_hi=high)

    shard_visibility = shard.visibility
    return mock.patch.object(shard, "visibility", leaking)


def _position(rank: int) -> Any:
    """Corrupted rows count positions one late."""
    from megatron_bp.training import step

    def shifted(*args: Any) -> Any:
        batch = local_batch(*args)
        position = batch.position_ids.clone()
        position[batch.num_clean :] += 1
        return dataclasses.replace(batch, position_ids=position)

    local_batch = step.local_batch
    return mock.patch.object(step, "local_batch", shifted)


def _lost_unit(rank: int) -> Any:
    """The last rank forgets its last unit."""
    from megatron_bp.sequence.plan import SequencePlan

    def forgetful(plan: Any, owner: int) -> Any:
        units = owned_units(plan, owner)
        last = owner == plan.options.block_parallel_size - 1
        return units[:-1] if last else units

    owned_units = SequencePlan.owned_units
    return mock.patch.object(SequencePlan, "owned_units", forgetful)


def _mean_of_means(rank: int) -> Any:
    """Each rank and micro-batch divides by its own count."""
    from megatron_bp.diffusion.loss import LossSum

    def mean(loss: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return loss.total / max(1, loss.count), torch.tensor(1, dtype=torch.int)

    return mock.patch.object(LossSum, "for_megatron", mean)


def _noise_by_rank(rank: int) -> Any:
    """Every rank draws its own noise."""
    from megatron_bp.training import reader

    def own(sample: Any, plan: Any, objective: Any) -> Any:
        return corrupt(sample, plan, dataclasses.replace(objective, seed=objective.seed + rank))

    corrupt = reader.corrupt
    return mock.patch.object(reader, "corrupt", own)


def _padded_vocabulary(rank: int) -> Any:
    """Megatron's padding takes part in the softmax."""
    from megatron_bp.model import output

    def padded(hidden: Any, weight: Any, labels: Any, weights: Any, vocabulary: int) -> Any:
        return cross_entropy(hidden, weight, labels, weights, len(weight))

    cross_entropy = output.weighted_cross_entropy
    return mock.patch.object(output, "weighted_cross_entropy", padded)


def _dropped_gradient(rank: int) -> Any:
    """What other ranks owe the clean rows of one rank is lost, in one exchange of the step."""
    from megatron_bp.attention.exchange import CleanExchange

    dropped = []

    def dropping(exchange: Any, pending: Any, dkv: Any) -> Any:
        arriving = pending.wait()
        if not dropped and arriving.count_nonzero():
            dropped.append(arriving)
            return dkv
        return collect(exchange, pending, dkv)

    collect = CleanExchange.collect
    return mock.patch.object(CleanExchange, "collect", dropping)


def _late_reduce(rank: int) -> Any:
    """The reduction counts this rank's own share twice."""
    from megatron_bp.attention.exchange import CleanExchange

    def doubled(exchange: Any, pending: Any, dkv: Any) -> Any:
        own = dkv.clone()
        return collect(exchange, pending, dkv).add_(own)

    collect = CleanExchange.collect
    return mock.patch.object(CleanExchange, "collect", doubled)


def _wrong_weight(rank: int) -> Any:
    """Masked tokens weigh 1 where the bound wants 1/t."""
    from megatron_bp.training import reader

    def one(sample: Any, plan: Any, objective: Any) -> Any:
        return corrupt(sample, plan, dataclasses.replace(objective, weighting="one"))

    corrupt = reader.corrupt
    return mock.patch.object(reader, "corrupt", one)


def _one_count(rank: int) -> Any:
    """Every term is divided by the count of the first."""
    from megatron_bp.diffusion.loss import TermScales
    from megatron_bp.training import reader

    def same(counts: Any, factors: Any) -> TermScales:
        return TermScales(0, tuple(factors))

    return mock.patch.object(reader, "term_scales", same)


FAULTS: dict[str, Callable[[int], Any]] = {
    "leak": _leak,
    "wrong position": _position,
    "lost unit": _lost_unit,
    "mean of means": _mean_of_means,
    "noise keyed by rank": _noise_by_rank,
    "unmasked padded vocabulary": _padded_vocabulary,
    "dropped gradient of one exchange": _dropped_gradient,
    "own gradient twice": _late_reduce,
    "wrong weight": _wrong_weight,
    "one count for all terms": _one_count,
}


def _gradient_not_reduced(rank: int) -> Any:
    """Each rank keeps the gradient of its own rows."""
    from megatron.core.distributed import param_and_grad_buffer

    group = param_and_grad_buffer._ParamAndGradBucketGroup
    return mock.patch.multiple(
        group, start_grad_sync=lambda *a, **k: None, finish_grad_sync=lambda *a, **k: None
    )


def _replica_apart(rank: int) -> Any:
    """The last rank's gradient of one parameter is off; what the first rank holds is right."""
    from megatron.training import training

    def step(forward: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kw: Any) -> Any:
        update = optimizer.step

        def apart(*a: Any, **k: Any) -> Any:
            if rank == torch.distributed.get_world_size() - 1:
                next(model[0].parameters()).main_grad.mul_(1.01)
            optimizer.step = update
            return update(*a, **k)

        optimizer.step = apart
        return train_step(forward, data, model, optimizer, *args, **kw)

    train_step = training.train_step
    return mock.patch.object(training, "train_step", step)


# Of layouts that tests/whole.py does not build; tests/e2e/test_verify.py needs them to fail.
LAYOUT_FAULTS: dict[str, Callable[[int], Any]] = {
    "gradient not reduced": _gradient_not_reduced,
    "one replica steps aside": _replica_apart,
}


@contextlib.contextmanager
def plant(name: str | None, rank: int) -> Iterator[None]:
    """The fault for the time of the block; None plants nothing."""
    if name is None:
        yield
        return
    with (FAULTS | LAYOUT_FAULTS)[name](rank):
        yield
