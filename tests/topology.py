"""The whole model over TP, SP, PP, slot and DP, its gradients joined to those of one rank.

`topology_on_rank` is the function for `run_ranks`; `joined` puts shards and stages together.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import whole
from faults import plant
from torch import Tensor
from whole import Shape, batches_of, build_chunks, loss_over_ranks, settings_of, value_of

TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Topology:
    """Degrees; data parallelism is what is left of the ranks."""

    ranks: int
    tp: int = 1
    pp: int = 1
    slot: int = 1
    degrees_of_slot: tuple[int, int] | None = None  # (BP, CP); None: both are the slot
    chunks: int = 1  # of a stage, interleaved where more than one
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: str = ""  # "full" or "selective"
    ep: int = 1  # ranks that share the experts

    @property
    def degrees(self) -> tuple[int, int]:
        """(BP, CP)."""
        return self.degrees_of_slot or (self.slot, self.slot)

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp * self.slot)

    def __str__(self) -> str:
        parts = [f"{n}={getattr(self, n)}" for n in ("tp", "pp", "slot", "dp", "chunks", "ep")]
        flags = ("sequence_parallel", "distributed_optimizer", "recompute")
        shown = [p for p in parts if not p.endswith("=1")] + [f for f in flags if getattr(self, f)]
        if self.degrees_of_slot is not None:
            shown.append("bp={},cp={}".format(*self.degrees_of_slot))
        return ",".join(shown)


def topology_on_rank(
    rank: int, world: int, shape: Shape, topology: Topology, fault: str | None = None
) -> dict[str, Any]:
    """One step: the loss and counts (last stage) and this rank's shard of every gradient."""
    with plant(fault, rank):
        return _step(rank, shape, topology)


def _step(rank: int, shape: Shape, topology: Topology) -> dict[str, Any]:
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    from megatron_bp.training.metrics import Metrics
    from megatron_bp.training.step import forward_step

    t = topology
    interleaved = t.chunks if t.chunks > 1 else None
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=t.tp,
        pipeline_model_parallel_size=t.pp,
        virtual_pipeline_model_parallel_size=interleaved,
        context_parallel_size=t.slot,
        expert_model_parallel_size=t.ep,
        expert_tensor_parallel_size=1,
    )
    whole.SLOT, whole.EXPERTS = t.degrees, shape.experts
    more: dict[str, Any] = {
        "tensor_model_parallel_size": t.tp,
        "pipeline_model_parallel_size": t.pp,
        "virtual_pipeline_model_parallel_size": interleaved,
        "pipeline_dtype": torch.float32,
        "sequence_parallel": t.sequence_parallel,
        "expert_tensor_parallel_size": 1,
    }
    if interleaved:  # as Megatron's arguments set it: batched, two stages mix up who sends what
        more |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if t.recompute == "full":
        more |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if t.recompute:
        more["recompute_granularity"] = t.recompute
    if t.recompute == "selective":
        more["recompute_modules"] = ["core_attn"]
    shape = dataclasses.replace(shape, extra=shape.extra | more)
    model = build_chunks(shape, distributed_optimizer=t.distributed_optimizer)
    config = get_model_config(model[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.timers = None
    for chunk in model:
        for name, parameter in global_names(chunk).items():
            parameter.data.copy_(own_value(name, parameter, shape, t.tp))
        chunk.zero_grad_buffer()
    mine = batches_of(shape)[mpu.get_data_parallel_rank() :: t.dp]
    init_num_microbatches_calculator(rank, None, len(shape.rows), 1, t.dp, False)
    metrics = Metrics()
    settings = dataclasses.replace(
        settings_of(shape.rows[0], shape, t.degrees, len(mine)), metrics=metrics
    )
    iterators: Any = [iter(mine) for _ in model]
    losses = get_forward_backward_func()(
        forward_step_func=partial(forward_step, settings),
        data_iterator=iterators if interleaved else iterators[0],
        model=model,
        num_microbatches=len(mine),
        seq_length=t.tp,
        micro_batch_size=1,
        forward_only=False,
    )
    if t.distributed_optimizer:
        whole_gradients(model)
    step = metrics.finish(mpu.get_data_parallel_group(True), t.slot, dist.group.WORLD)
    loss, counts = None, None
    if losses:
        loss, counts = loss_over_ranks(shape, losses)
    return {
        "loss": loss,
        "count": counts,
        "step": step,
        "auxiliary": whole.auxiliary_of(shape),
        "tp": mpu.get_tensor_model_parallel_rank(),
        "replica": (mpu.get_context_parallel_rank(), mpu.get_data_parallel_rank()),
        "grads": {
            name: (p.main_grad.clone(), shard_of(name, p))
            for chunk in model
            for name, p in global_names(chunk).items()
        },
    }


def global_names(chunk: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters under the names that they have without pipeline stages."""
    from megatron.core.utils import get_attr_wrapped_model

    numbers = [layer.layer_number - 1 for layer in get_attr_wrapped_model(chunk, "decoder").layers]
    names = {}
    for name, parameter in chunk.named_parameters():
        name = name.removeprefix("module.")
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(numbers[int(parts[2])])
        names[whole.global_name(".".join(parts))] = parameter
    return names


def shard_of(name: str, parameter: torch.nn.Parameter) -> str:
    """How TP cuts it: "no", by "rows", "columns", or "gated" (both halves by rows)."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return "no"
    if ".experts." in name:
        return "no"
    if "linear_fc1" in name and whole_gated(name, parameter):
        return "gated"
    return "columns" if parameter.partition_dim == 1 else "rows"


def whole_gated(name: str, parameter: torch.nn.Parameter) -> bool:
    from megatron.core.parallel_state import get_tensor_model_parallel_world_size

    if "expert" in name:
        return True
    return bool(parameter.shape[0] * get_tensor_model_parallel_world_size() == 2 * whole.FFN)


def own_value(name: str, parameter: torch.nn.Parameter, shape: Shape, tp: int) -> Tensor:
    """This rank's shard of the value that a single rank has."""
    from megatron.core.parallel_state import get_tensor_model_parallel_rank

    how, rank = shard_of(name, parameter), get_tensor_model_parallel_rank()
    size = list(parameter.shape)
    if how != "no":
        size[how == "columns"] *= tp
    if shape.gpt.tied and name == TABLES[1]:
        name = TABLES[0]  # the last stage's copy
    value = value_of(name, torch.Size(size), shape.vocabulary)
    if how == "gated":
        return torch.cat([half.chunk(tp)[rank] for half in value.chunk(2)])
    return value if how == "no" else value.chunk(tp, dim=int(how == "columns"))[rank]


def whole_gradients(model: list[torch.nn.Module]) -> None:
    """Each rank has its shard of the reduced gradients: gather them."""
    for chunk in model:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            for bucket in buffer.buckets:
                group = buffer.data_parallel_group
                own = bucket.grad_data.view(-1).chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data.view(-1), own, group=group)


def same(one: Tensor, other: Tensor, name: str) -> None:
    error = (one - other).norm() / max(float(one.norm()), 1e-3)
    assert error < 1e-5, f"{name}: ranks that hold one parameter disagree by {error}"


def joined(
    results: list[dict[str, Any]], shape: Shape, same: Callable[..., None]
) -> dict[str, Any]:
    """What one rank would have: loss, counts and gradients by name.

    Args:
        results: of every rank.
        shape: the model.
        same: told of two tensors that must agree, and of their name.
    """
    by_name: dict[str, dict[int, Tensor]] = {}
    how: dict[str, str] = {}
    for result in results:
        for name, (gradient, cut) in result["grads"].items():
            shards = by_name.setdefault(name, {})
            if result["tp"] in shards:
                same(shards[result["tp"]], gradient, name)  # replicas of slot and DP
            shards[result["tp"]] = gradient
            how[name] = cut
    grads = {}
    for name, shards in by_name.items():
        parts = [shards[rank] for rank in sorted(shards)]
        if how[name] == "no":
            for part in parts[1:]:
                same(parts[0], part, name)
            grads[name] = parts[0]
        elif how[name] == "gated":
            halves = [part.chunk(2) for part in parts]
            grads[name] = torch.cat([h[0] for h in halves] + [h[1] for h in halves])
        else:
            grads[name] = torch.cat(parts, dim=int(how[name] == "columns"))
    if shape.gpt.tied and TABLES[1] in grads:
        same(grads[TABLES[0]], grads.pop(TABLES[1]), "tied")
    for name in TABLES:
        if name in grads:
            assert not grads[name][shape.vocabulary :].any(), f"padding of {name}"
            grads[name] = grads[name][: shape.vocabulary]
    ends = [r for r in results if r["loss"] is not None]
    for end in ends[1:]:
        assert (end["loss"], end["count"]) == (ends[0]["loss"], ends[0]["count"])
    return {"loss": ends[0]["loss"], "count": ends[0]["count"], "grads": grads}
