"""Block parallelism as a dimension next to Megatron's TP, PP, CP and DP.

The only file that looks up or makes a process group. The `slot` of max(BP, CP) ranks that work on
one sequence is Megatron's context-parallel group, so Megatron's gradient reduction, samplers and
checkpoints are right as they are. What is kept here lives and dies with that group.
"""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_bp.parallel.mode import parallel_mode


@dataclass(frozen=True)
class _BlockParallel:
    slot: dist.ProcessGroup
    block_parallel: dist.ProcessGroup
    clean_shard: dist.ProcessGroup


_state: _BlockParallel | None = None


def initialize_block_parallel(block_parallel_size: int, context_parallel_size: int) -> None:
    """Set up the block-parallel groups, after `mpu.initialize_model_parallel`. Collective.

    All ranks of the world make all groups in one order. Neighbours in the slot share a clean shard
    group: slot rank r is in group r // CP.

    Args:
        block_parallel_size: BP, ranks that share the target blocks of one sequence.
        context_parallel_size: CP, ranks that shard its clean rows.

    Raises:
        ValueError: the degrees make no mode, or Megatron's context-parallel group is not one of
            max(BP, CP) ranks, tensor-parallel peers apart.
    """
    global _state
    bp, cp = block_parallel_size, context_parallel_size
    parallel_mode(bp, cp)
    slot = mpu.get_context_parallel_group()
    if slot.size() != max(bp, cp):
        raise ValueError(
            f"Megatron's context-parallel group holds {slot.size()} ranks, block parallelism needs "
            f"max(BP, CP) = {max(bp, cp)}: pass it as context_parallel_size to "
            f"initialize_model_parallel"
        )
    _state = _BlockParallel(
        slot=slot,
        block_parallel=slot if bp == slot.size() else _carve(slot, bp, "BLOCK_PARALLEL"),
        clean_shard=slot if cp == slot.size() else _carve(slot, cp, "CLEAN_SHARD"),
    )


def _carve(slot: dist.ProcessGroup, size: int, name: str) -> dist.ProcessGroup:
    """This rank's group of `size` neighbours in its slot; made by all ranks, for all slots."""
    tensor, slot_size = mpu.get_tensor_model_parallel_world_size(), slot.size()
    world, rank = dist.get_world_size(), dist.get_rank()
    # As in Megatron's orders that begin with tp-cp: the leftmost size varies fastest.
    sizes = [tensor, size, slot_size // size, world // (tensor * slot_size)]

    def ranks_of(*axes: bool) -> list[list[int]]:
        groups: list[list[int]] = mpu.generate_masked_orthogonal_rank_groups(
            world, sizes, list(axes)
        )
        return groups

    if dist.get_process_group_ranks(slot) not in ranks_of(False, True, True, False):
        raise ValueError(
            f"Megatron's context-parallel group holds ranks {dist.get_process_group_ranks(slot)}, "
            f"which are not {tensor} (TP) apart: block parallelism needs an order of ranks that "
            f"begins with tp-cp"
        )
    mine: dist.ProcessGroup | None = None
    for ranks in ranks_of(False, True, False, False):
        group = mpu.create_group(ranks, group_desc=name)  # Megatron destroys it with its own
        if rank in ranks:
            mine = group
    assert mine is not None
    return mine


def _get() -> _BlockParallel:
    slot = mpu.get_context_parallel_group(check_initialized=False)
    if _state is None or slot is not _state.slot:
        raise RuntimeError("block parallelism is not initialized: call initialize_block_parallel()")
    return _state


def block_parallel_is_initialized() -> bool:
    """Whether the groups exist and belong to the current parallel state."""
    slot = mpu.get_context_parallel_group(check_initialized=False)
    return _state is not None and slot is not None and slot is _state.slot


def get_block_parallel_group() -> dist.ProcessGroup:
    """The ranks that share the target blocks of this rank's sequence: this one alone if BP is 1."""
    return _get().block_parallel


def get_block_parallel_world_size() -> int:
    """Number of ranks in the block-parallel group."""
    return int(get_block_parallel_group().size())


def get_block_parallel_rank() -> int:
    """This rank's place in the block-parallel group."""
    return int(get_block_parallel_group().rank())


def get_slot_group() -> dist.ProcessGroup:
    """The max(BP, CP) ranks that work on this rank's sequence."""
    return _get().slot


def get_clean_shard_group() -> dist.ProcessGroup:
    """The ranks that shard the clean rows of this rank's sequence among themselves."""
    return _get().clean_shard


def replica() -> int:
    """This rank's place among those that read different rows."""
    return int(mpu.get_data_parallel_rank())


def every_group(experts: bool = False) -> dict[str, dist.ProcessGroup]:
    """What each group of this rank is for -> the group, of more than one rank; each once.

    Block parallelism's own are among them where it is initialized.

    Args:
        experts: with those that experts alone use.
    """
    groups = {
        "all ranks": dist.group.WORLD,
        "tensor parallel": mpu.get_tensor_model_parallel_group(),
        "pipeline parallel": mpu.get_pipeline_model_parallel_group(),
        "data parallel": mpu.get_data_parallel_group(with_context_parallel=True),
        "data parallel without the slot": mpu.get_data_parallel_group(),
        "slot": mpu.get_context_parallel_group(),
    }
    if experts:
        groups["expert parallel"] = mpu.get_expert_model_parallel_group()
        groups["expert data parallel"] = mpu.get_expert_data_parallel_group()
    if block_parallel_is_initialized():
        groups["block parallel"] = get_block_parallel_group()
        groups["clean shard"] = get_clean_shard_group()
    found: dict[str, dist.ProcessGroup] = {}
    for name, group in groups.items():
        if group is not None and group.size() > 1 and not any(group is g for g in found.values()):
            found[name] = group
    return found


def attach(collection: ProcessGroupCollection) -> ProcessGroupCollection:
    """The collection with `slot`, `bp` and `clean_shard` set, as modules are handed it."""
    collection.slot = get_slot_group()
    collection.bp = get_block_parallel_group()
    collection.clean_shard = get_clean_shard_group()
    return collection
