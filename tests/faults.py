"""Faults to plant: each breaks the product in one way that a test must notice.

`plant(name, rank)` is a context manager. A test of the tests: `tests/ranks/test_faults.py`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch


def _leak(rank: int) -> Any:
    """A corrupted row sees its own clean block (`>=` for `>`)."""
    from megatron_bp.attention import layout

    def leaking(plan: Any, clean: Any, corrupted: Any, *rest: Any) -> Any:
        seen = visibility(plan, clean, corrupted, *rest)
        high = seen.clean_hi.clone()
        own = slice(seen.num_clean, None)
        high[own] += seen.own_hi[own] - seen.own_lo[own]
        return dataclasses.replace(seen, clean_hi=high)

    visibility = layout.visibility
    return mock.patch.object(layout, "visibility", leaking)


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

    def forgetful(plan: Any, rank: int, multiple: int = 1) -> Any:
        rows = rows_of(plan, rank, multiple)
        if rank != plan.options.slot - 1 or not len(rows.corrupted):
            return rows
        offset = plan.units.offset
        unit = int((offset <= rows.corrupted[-1]).sum()) - 1
        return dataclasses.replace(rows, corrupted=rows.corrupted[rows.corrupted < offset[unit]])

    rows_of = SequencePlan.rows_of
    return mock.patch.object(SequencePlan, "rows_of", forgetful)


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

    def padded(
        hidden: Any, weight: Any, labels: Any, weights: Any, vocabulary: int, **more: Any
    ) -> Any:
        ranks = 1 if more["group"] is None else more["group"].size()
        return cross_entropy(hidden, weight, labels, weights, len(weight) * ranks, **more)

    cross_entropy = output.weighted_cross_entropy
    return mock.patch.object(output, "weighted_cross_entropy", padded)


def _dropped_gradient(rank: int) -> Any:
    """What other ranks owe the clean rows of one rank is lost, in one exchange of the step."""
    from megatron_bp.attention.exchange.gather import GatherReturn

    dropped = []

    def dropping(returns: Any, i: int, shares: Any) -> None:
        if not dropped and shares.count_nonzero():
            dropped.append(shares)
            return
        add(returns, i, shares)

    add = GatherReturn.add
    return mock.patch.object(GatherReturn, "add", dropping)


def _late_reduce(rank: int) -> Any:
    """The reduction counts this rank's own share twice."""
    from megatron_bp.attention.exchange.gather import GatherReturn

    def doubled(returns: Any, i: int, shares: Any) -> None:
        own = returns.dkv.clone()
        add(returns, i, shares)
        returns.dkv.add_(own)

    add = GatherReturn.add
    return mock.patch.object(GatherReturn, "add", doubled)


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

    def same(counts: Any, factors: Any, joint: Any) -> TermScales:
        return TermScales((0,), tuple(factors))

    return mock.patch.object(reader, "term_scales", same)


def _recipe(**changed: Any) -> Callable[[int], Any]:
    """Another recipe in one part, of the objective or of the plan."""

    def fault(rank: int) -> Any:
        from megatron_bp.training import reader

        def changing(function: Any) -> Any:
            def with_other(*args: Any) -> Any:
                *rest, last = args
                names = {field.name for field in dataclasses.fields(last)}
                return function(
                    *rest,
                    dataclasses.replace(last, **{k: changed[k] for k in names & changed.keys()}),
                )

            return with_other

        return mock.patch.multiple(
            reader, corrupt=changing(reader.corrupt), make_plan=changing(reader.make_plan)
        )

    return fault


def _every_replica_scores(rank: int) -> Any:
    """A clean row's loss is counted by every rank that computes it."""
    from megatron_bp.training import step

    def greedy(sample: Any, plan: Any, corruption: Any, rank: int, *rest: Any) -> Any:
        mine = dataclasses.replace(plan, scorer=np.full_like(plan.scorer, rank))
        return local_batch(sample, mine, corruption, rank, *rest)

    local_batch = step.local_batch
    return mock.patch.object(step, "local_batch", greedy)


def _short_prefix(rank: int) -> Any:
    """A group computes one block less than its units see."""
    from megatron_bp.sequence.shares import Work

    def short(work: Any, first: int, stop: int) -> Any:
        begin, end = prefixes(work, first, stop)
        before = work.grid.start[np.searchsorted(work.grid.start, end) - 1]
        return begin, np.maximum(begin, before)

    prefixes = Work.prefixes
    return mock.patch.object(Work, "prefixes", short)


def _unit_twice(rank: int) -> Any:
    """The last rank computes the first unit too."""
    from megatron_bp.sequence.plan import SequencePlan

    def greedy(plan: Any, rank: int, multiple: int = 1) -> Any:
        rows = rows_of(plan, rank, multiple)
        if rank != plan.options.slot - 1 or not len(plan.units):
            return rows
        first = np.arange(plan.units.offset[1])
        return dataclasses.replace(rows, corrupted=np.union1d(first, rows.corrupted))

    rows_of = SequencePlan.rows_of
    return mock.patch.object(SequencePlan, "rows_of", greedy)


def _corrupted_stay_away(rank: int) -> Any:
    """What other ranks owe a rank's corrupted rows is lost (mode CP)."""
    from megatron_bp.attention.exchange.gather import GatherReturn
    from megatron_bp.training import step

    num_clean = []

    def telling(plan: Any, shards: Any, slot_rank: int, *rest: Any) -> Any:
        num_clean.append(shards[plan.shard_group(slot_rank).index(slot_rank)].num_clean)
        return make_layout(plan, shards, slot_rank, *rest)

    def losing(returns: Any, i: int, shares: Any) -> None:
        own = returns.dkv.clone()
        add(returns, i, shares)
        returns.dkv[num_clean[-1] :] = own[num_clean[-1] :]

    make_layout, add = step.make_layout, GatherReturn.add
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(step, "make_layout", telling))
    stack.enter_context(mock.patch.object(GatherReturn, "add", losing))
    return stack


def _excluded_everywhere(rank: int) -> Any:
    """The next-token term leaves the mask token out too."""
    from megatron_bp.model import output

    def every(token: int, rows: Any) -> Any:
        return excluded(token, torch.ones_like(rows))

    excluded = output.Excluded
    return mock.patch.object(output, "Excluded", every)


def _dgrad_twice(rank: int) -> Any:
    """The hidden rows' gradient is added up over TP twice under sequence parallelism."""
    from megatron_bp.model import output

    def again(hidden: Any, **more: Any) -> Any:
        copied = output.copy_to_tensor_model_parallel_region(hidden, group=more["group"])
        return gather(copied, **more)

    gather = output.gather_from_sequence_parallel_region
    return mock.patch.object(output, "gather_from_sequence_parallel_region", again)


def _dgrad_never(rank: int) -> Any:
    """Each TP rank keeps its own share of the hidden rows' gradient."""
    from megatron_bp.model import output

    def only_split(hidden: Any, tensor_parallel_output_grad: bool, group: Any) -> Any:
        return gather(hidden, tensor_parallel_output_grad=False, group=group)

    gather = output.gather_from_sequence_parallel_region
    return mock.patch.object(output, "gather_from_sequence_parallel_region", only_split)


def _norm_unmarked(rank: int) -> Any:
    """Norms do not tell that their gradients are partial under sequence parallelism."""
    from megatron_bp.model import config

    def unmarked(**more: Any) -> Any:
        norm = local_norm(**more)
        for parameter in norm.parameters():
            parameter.sequence_parallel = False
        return norm

    local_norm = config.local_norm
    return mock.patch.object(config, "local_norm", unmarked)


def _every_stage_counts(rank: int) -> Any:
    """Each pipeline stage adds its micro-batches to the metrics, and so to the token count."""
    from megatron_bp.training.metrics import Metrics

    def finish(metrics: Any, group: Any, slot: int, job: Any) -> Any:
        step = finished(metrics, group, slot, job)
        if step is None:
            return None
        stages = job.size() // group.size()
        return dataclasses.replace(step, clean_tokens=step.clean_tokens * stages)

    finished = Metrics.finish
    return mock.patch.object(Metrics, "finish", finish)


def _others_mask(rank: int) -> Any:
    """On later stages each TP rank leaves the rows out of statistics that the first one should."""
    from megatron_bp.model.moe import BlockDiffusionRouter

    def routing(router: Any, logits: Any, padding_mask: Any = None) -> Any:
        if padding_mask is not None and len(padding_mask) != len(logits):
            padding_mask = padding_mask[: len(logits)]
        return route(router, logits, padding_mask)

    route = BlockDiffusionRouter.routing
    return mock.patch.object(BlockDiffusionRouter, "routing", routing)


TOPOLOGY_FAULTS: dict[str, Callable[[int], Any]] = {
    "padded ids in a TP rank's softmax": _padded_vocabulary,
    "mask token left out of every term": _excluded_everywhere,
    "hidden gradient added up twice": _dgrad_twice,
    "hidden gradient not added up": _dgrad_never,
    "norm gradients not added up": _norm_unmarked,
    "tokens of every stage": _every_stage_counts,
    "mask of another TP rank's rows": _others_mask,
}

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
    "loss of a clean row counted by every replica": _every_replica_scores,
    "prefix one block short": _short_prefix,
    "unit computed twice": _unit_twice,
    "gradients of corrupted keys not sent back": _corrupted_stay_away,
    "a row scores its own token, not the next": _recipe(alignment="same"),
    "views that are not complementary": _recipe(complementary=False),
    "one copy less": _recipe(copies=2),
    "ids to be left alone are corrupted": _recipe(never_corrupt=()),
    "terms that share a count have their own": _recipe(count="corrupted"),
    "only corrupted tokens scored": _recipe(scored="corrupted"),
    "prompts not scored by the next-token term": _recipe(ar_scored="supervised"),
    "blocks of a response count from the document": _recipe(grid="document"),
    "a block's window counts from each row": _recipe(window_anchor="row"),
}


# --- in a mixture of experts ---------------------------------------------------------------------


def _local_rows(rank: int) -> Any:
    """Auxiliary losses times this rank's rows, as Megatron scales them."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_bp.model.moe import BlockDiffusionRouter
    from megatron_bp.training import reader

    stack = contextlib.ExitStack()
    names = ("_apply_aux_loss", "apply_z_loss")
    theirs = {name: getattr(TopKRouter, name) for name in names}
    stack.enter_context(mock.patch.multiple(BlockDiffusionRouter, **theirs))
    stack.enter_context(mock.patch.object(reader, "row_scale", return_value=1.0))
    return stack


def _every_rank(rank: int) -> Any:
    """Every rank of the slot takes the whole balance loss for its share."""
    from megatron_bp.model import moe

    def whole(**given: Any) -> torch.Tensor:
        return switch(**given) * torch.distributed.get_world_size()

    switch = moe.switch_load_balancing_loss_func
    return mock.patch.object(moe, "switch_load_balancing_loss_func", whole)


def _local_z(rank: int) -> Any:
    """The z loss is the mean of the ranks' means."""
    from megatron_bp.model.moe import BlockDiffusionRouter

    def local(router: Any, to: Any, name: str, total: Any, coefficient: float) -> Any:
        if name == "z_loss":
            total = total / len(to) * 98 / torch.distributed.get_world_size()
        return attach(router, to, name, total, coefficient)

    attach = BlockDiffusionRouter._attach
    return mock.patch.object(BlockDiffusionRouter, "_attach", local)


def _filling(rank: int) -> Any:
    """Rows that only fill up are counted."""
    from megatron_bp.training import step

    def every(*args: Any) -> Any:
        batch = local_batch(*args)
        return dataclasses.replace(batch, own_rows=torch.ones_like(batch.own_rows))

    local_batch = step.local_batch
    return mock.patch.object(step, "local_batch", every)


def _rows_of_a_slot(rank: int) -> Any:
    """The rows of the step are those of this rank's micro-batches."""
    from megatron_bp.training import reader

    class Alone:
        @staticmethod
        def all_reduce(whole: torch.Tensor, group: Any) -> None:
            own = int(whole[-1])
            torch.distributed.all_reduce(whole, group=group)
            whole[-1] = own

    return mock.patch.object(reader, "dist", Alone)


def _twice(rank: int) -> Any:
    """A forward that is done again counts both times."""
    from megatron_bp.model.moe import BlockDiffusionRouter

    return mock.patch.object(BlockDiffusionRouter, "_counts", lambda router: router.training)


MOE_FAULTS: dict[str, Callable[[int], Any]] = {
    "auxiliary losses scaled by local rows": _local_rows,
    "balance loss on every rank": _every_rank,
    "z loss over local means": _local_z,
    "filling rows in the statistics": _filling,
    "rows of one slot": _rows_of_a_slot,
    "counted twice": _twice,
}


# --- in self-conditioning ------------------------------------------------------------------------


def _through_the_first_pass(rank: int) -> Any:
    """The gradient flows through the first pass too."""
    from megatron_bp.model import soft_embedding
    from megatron_bp.training import self_conditioning

    stack = contextlib.ExitStack()
    fake = SimpleNamespace(no_grad=contextlib.nullcontext)
    stack.enter_context(mock.patch.object(self_conditioning, "torch", fake))

    def differentiable(
        hidden: Any, weight: Any, table: Any, vocabulary: int, excluded: Any, group: Any
    ) -> torch.Tensor:
        return torch.softmax((hidden @ weight[:vocabulary].T), dim=-1) @ table[:vocabulary]

    stack.enter_context(mock.patch.object(soft_embedding, "expected_embedding", differentiable))
    return stack


def _clean_conditioned(rank: int) -> Any:
    """The first rows are conditioned, which are clean."""
    return _other_condition(lambda c: dataclasses.replace(c, rows=torch.arange(len(c.rows))))


def _coin_ignored(rank: int) -> Any:
    """Every document is conditioned."""
    from megatron_bp.training import self_conditioning

    def always(sample: Any, objective: Any) -> Any:
        return np.ones(len(sample.document_keys), dtype=np.bool_)

    return mock.patch.object(self_conditioning, "conditioned_documents", always)


def _coin_by_rank(rank: int) -> Any:
    """Each rank tosses a coin of its own."""
    from megatron_bp.training import self_conditioning

    def own(sample: Any, objective: Any) -> Any:
        return documents(sample, dataclasses.replace(objective, seed=objective.seed + rank))

    documents = self_conditioning.conditioned_documents
    return mock.patch.object(self_conditioning, "conditioned_documents", own)


def _row_before(rank: int) -> Any:
    """A row sees the prediction of the row before it."""
    return _other_condition(lambda c: dataclasses.replace(c, sources=c.sources.roll(1)))


def _other_condition(change: Callable[[Any], Any]) -> Any:
    from megatron_bp.training import self_conditioning

    def other(*given: Any) -> Any:
        return change(condition(*given))

    condition = self_conditioning.local_condition
    return mock.patch.object(self_conditioning, "local_condition", other)


def _padding_predicted(rank: int) -> Any:
    """Megatron's padding of the vocabulary takes part in the first pass's softmax."""
    from megatron_bp.model import soft_embedding

    def padded(hidden: Any, weight: Any, table: Any, vocabulary: int, *rest: Any) -> Any:
        return expected(hidden, weight, table, len(weight), *rest)

    expected = soft_embedding.expected_embedding
    return mock.patch.object(soft_embedding, "expected_embedding", padded)


def _local_softmax(rank: int) -> Any:
    """Each TP rank's softmax is over its own ids, and their sum is taken."""
    from megatron_bp.model import soft_embedding

    def local(rows: Any, group: Any) -> Any:
        pending, sent = gather(rows, group)
        pending.result = pending.wait()[group.rank()][None].clone()
        return pending, sent

    gather = soft_embedding.all_gather
    return mock.patch.object(soft_embedding, "all_gather", local)


def _module_unmarked(rank: int) -> Any:
    """The module does not tell that its gradients are partial under sequence parallelism."""
    from megatron_bp.model import config

    def unmarked(*given: Any) -> Any:
        module = build(*given)
        for parameter in module.parameters():
            parameter.sequence_parallel = False
        return module

    build = config.SelfConditioning
    return mock.patch.object(config, "SelfConditioning", unmarked)


CONDITIONING_FAULTS: dict[str, Callable[[int], Any]] = {
    "gradient through the first pass": _through_the_first_pass,
    "clean rows conditioned": _clean_conditioned,
    "coin ignored": _coin_ignored,
    "coin by rank": _coin_by_rank,
    "prediction of the row before": _row_before,
    "padding in the first pass's softmax": _padding_predicted,
    "softmax of one TP rank's ids": _local_softmax,
    "gradients of the module not added up": _module_unmarked,
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
    every = FAULTS | MOE_FAULTS | TOPOLOGY_FAULTS | LAYOUT_FAULTS | CONDITIONING_FAULTS
    with every[name](rank):
        yield
