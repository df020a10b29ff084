"""This rank's share of weights and gradients under their full names, to and from a folder.

Megatron's own sharded state dict says which slice of which full tensor a rank holds, whatever the
topology: gradients go through it in the place of the weights. Layers are named by global number.
"""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# (full name, where the shard begins) -> (norm, projection); see `signatures`.
Signatures = dict[tuple[str, tuple[int, ...]], tuple[float, float]]


def save_weights(model: Sequence[Any], folder: Path) -> None:
    """Write the weights, and buffers that a checkpoint holds. Collective."""
    _save({f"chunk{i}": _sharded(chunk) for i, chunk in enumerate(_unwrapped(model))}, folder)


def fill_zeros(model: Sequence[Any], optimizer: Any) -> None:
    """Give matrices that start as zeros values, the same on all ranks.

    Behind zeros (self-conditioning's last matrix) all gradients vanish: nothing could be compared.
    """
    with torch.no_grad():
        for chunk in _unwrapped(model):
            for name, parameter in chunk.named_parameters():
                if parameter.dim() == 2 and not parameter.any():
                    generator = torch.Generator().manual_seed(sum(name.encode()))
                    values = torch.randn(parameter.shape, generator=generator) * 0.02
                    parameter.copy_(values)
    optimizer.reload_model_params()


def load_weights(model: Sequence[Any], optimizer: Any, folder: Path) -> None:
    """Read what `save_weights` wrote, under any topology. Collective."""
    checkpoints = importlib.import_module("megatron.core.dist_checkpointing")
    chunks = _unwrapped(model)
    wanted = {f"chunk{i}": _sharded(chunk) for i, chunk in enumerate(chunks)}
    loaded = checkpoints.load(wanted, str(folder))
    for i, chunk in enumerate(chunks):
        missing, unexpected = chunk.load_state_dict(loaded[f"chunk{i}"], strict=False)
        left = [name for name in missing if not name.endswith("_extra_state")]
        assert not left, f"not in the checkpoint: {left}"
        assert not unexpected, f"no place for {unexpected}"
    optimizer.reload_model_params()


def save_gradients(model: Sequence[Any], folder: Path) -> Signatures:
    """Write every parameter's reduced gradient; returns what this rank holds. Collective.

    To be called when Megatron has reduced and scaled the gradients, before the optimizer's step.
    """
    for chunk in model:
        _gather_shards(chunk)
    chunks = _unwrapped(model)
    every = [[n for n, p in c.named_parameters() if hasattr(p, "main_grad")] for c in chunks]
    with _gradients_as_weights(model):
        state = {}
        for i, (chunk, trained) in enumerate(zip(chunks, every, strict=True)):
            of_chunk = _sharded(chunk)
            lost = set(trained) - of_chunk.keys()
            assert not lost, f"Megatron's sharded state dict leaves out {sorted(lost)}"
            state[f"chunk{i}"] = {name: of_chunk[name] for name in trained}
        _apply_factories(state)
        _save(state, folder)
        return signatures(state)


def weight_signatures(model: Sequence[Any]) -> Signatures:
    """`signatures` of the weights as they are."""
    state: dict[str, Any] = {}
    for i, chunk in enumerate(_unwrapped(model)):
        names = dict(chunk.named_parameters()).keys()
        state[f"chunk{i}"] = {n: v for n, v in _sharded(chunk).items() if n in names}
    _apply_factories(state)
    return signatures(state)


def signatures(state: dict[str, dict[str, Any]]) -> Signatures:
    """Norm, and product with a fixed vector, of each shard: replicas must agree in both.

    A difference between replicas shows in the projection at about its own norm.
    """
    found = {}
    for shard in _tensors(state):
        values = shard.data.detach().to(torch.float64).flatten()
        fixed = torch.cos(torch.arange(len(values), dtype=torch.float64, device=values.device) * 2)
        place = (str(shard.key), tuple(int(i) for i in shard.global_offset))
        found[place] = (values.norm().item(), torch.dot(values, fixed).item())
    return found


def disagreement(of_ranks: Sequence[Signatures]) -> tuple[float, str]:
    """The largest relative difference between replicas of a shard, and its name."""
    first: Signatures = {}
    worst, name = 0.0, ""
    for rank in of_ranks:
        for place, mine in rank.items():
            theirs = first.setdefault(place, mine)
            scale = max(mine[0], theirs[0], 1e-300)
            error = max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) / scale
            if not error <= worst:  # NaN too
                worst, name = error, place[0]
    return worst, name


def _gather_shards(chunk: Any) -> None:
    """With the distributed optimizer a rank has reduced its own part of each bucket alone."""
    for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
        if not group.ddp_config.use_distributed_optimizer:
            continue
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            whole = bucket.grad_data
            mine = whole.view(ranks.size(), -1)[ranks.rank()].clone()
            dist.all_gather_into_tensor(whole, mine, group=ranks)


@contextmanager
def _gradients_as_weights(model: Sequence[Any]) -> Iterator[None]:
    """Each module holds gradients where its weights were, for the length of the block.

    Other parameters, not other data in the same ones: a parameter that changes its dtype loses the
    hooks by which DDP hears of its gradient, and every later step would see none.
    """
    kept: list[tuple[dict[str, Any], str, Any]] = []
    by_weight: dict[int, torch.nn.Parameter] = {}
    try:
        for module in (m for chunk in model for m in chunk.modules()):
            for name, p in module._parameters.items():
                if p is None or not hasattr(p, "main_grad"):
                    continue
                if id(p) not in by_weight:
                    gradient = p.main_grad.view(p.shape)
                    by_weight[id(p)] = torch.nn.Parameter(gradient, requires_grad=False)
                    by_weight[id(p)].__dict__.update(p.__dict__)
                kept.append((module._parameters, name, p))
        for place, name, p in kept:
            place[name] = by_weight[id(p)]
        yield
    finally:
        for place, name, p in kept:
            place[name] = p


def _sharded(chunk: Any) -> dict[str, Any]:
    """Local name -> slice of a full tensor; extra state, which holds no weights, left out."""
    state = chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    return {name: v for name, v in state.items() if not name.endswith("_extra_state")}


def _tensors(state: dict[str, dict[str, Any]]) -> Iterator[Any]:
    mapping = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    utils = importlib.import_module("megatron.core.dist_checkpointing.dict_utils")
    for value in utils.nested_values(state):
        if isinstance(value, mapping.ShardedTensor):
            yield value


def _apply_factories(state: dict[str, Any]) -> None:
    importlib.import_module("megatron.core.dist_checkpointing.mapping").apply_factories(state)


def _save(state: dict[str, Any], folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    importlib.import_module("megatron.core.dist_checkpointing").save(
        state, str(folder), async_strategy="mcore"
    )


def _unwrapped(model: Sequence[Any]) -> list[Any]:
    unwrap: Any = importlib.import_module("megatron.core.utils").unwrap_model
    return [unwrap(chunk) for chunk in model]


def all_gather_objects(mine: Any) -> list[Any]:
    """What each rank gave, in rank order. Collective."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every
