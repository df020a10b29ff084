"""Block parallelism as a dimension next to Megatron's TP, PP, CP and DP.

The only file that looks up or makes a process group. The `slot` of max(BP, CP) ranks that work on
one sequence is Megatron's context-parallel group, so Megatron's gradient reduction, samplers and
checkpoints are right as they are. What is kept here lives and dies with that group.
"""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class _BlockParallel:
    slot: dist.ProcessGroup
    block_parallel: dist.ProcessGroup
    clean_shard: dist.ProcessGroup


_state: _BlockParallel | None = None


def initialize_block_parallel(block_parallel_size: int, context_parallel_size: int) -> None:
    """Set up the block-parallel groups, after `mpu.initialize_model_parallel`.

    Args:
        block_parallel_size: BP, ranks that share the target blocks of one sequence.
        context_parallel_size: CP, ranks that shard its clean rows.

    Raises:
        ValueError: Megatron's context-parallel group does not hold max(BP, CP) ranks.
        NotImplementedError: a mode other than single (1, 1) and CSBP (R, R).
    """
    global _state
    mode = parallel_mode(block_parallel_size, context_parallel_size)
    if mode not in ("single", "CSBP"):
        raise NotImplementedError(refusal(mode, block_parallel_size, context_parallel_size))
    slot = mpu.get_context_parallel_group()
    if slot.size() != block_parallel_size:
        raise ValueError(
            f"Megatron's context-parallel group holds {slot.size()} ranks, block parallelism needs "
            f"max(BP, CP) = {block_parallel_size}: pass it as context_parallel_size to "
            f"initialize_model_parallel"
        )
    _state = _BlockParallel(slot=slot, block_parallel=slot, clean_shard=slot)


def parallel_mode(block_parallel_size: int, context_parallel_size: int) -> str:
    """The name of the mode that the two degrees make (docs/parallelism.md)."""
    bp, cp = block_parallel_size, context_parallel_size
    if bp < 1 or cp < 1:
        raise ValueError(f"parallel degrees must be at least 1, got BP {bp}, CP {cp}")
    if bp == cp:
        return "single" if bp == 1 else "CSBP"
    if bp == 1:
        return "CP"
    if cp == 1:
        return "BP"
    if cp < bp and bp % cp == 0:
        return "hybrid"
    raise ValueError(
        f"--block-parallel-size {bp} with --context-parallel-size {cp}: CP must be 1, BP or a "
        f"divisor of BP (or BP 1); leave --context-parallel-size unset for CP = BP"
    )


def refusal(mode: str, block_parallel_size: int, context_parallel_size: int) -> str:
    """Why a mode does not run yet, and what does."""
    return (
        f"mode {mode} (--block-parallel-size {block_parallel_size} --context-parallel-size "
        f"{context_parallel_size}) is not implemented yet; single (both 1) and CSBP (equal "
        f"degrees; leave --context-parallel-size unset) are"
    )


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
    """The ranks that share the target blocks of this rank's sequence."""
    return _get().block_parallel


def get_block_parallel_world_size() -> int:
    """Number of ranks in the block-parallel group."""
    return int(get_block_parallel_group().size())


def get_block_parallel_rank() -> int:
    """This rank's place in the block-parallel group."""
    return int(get_block_parallel_group().rank())


def get_clean_shard_group() -> dist.ProcessGroup:
    """The ranks that shard the clean rows of this rank's sequence among themselves."""
    return _get().clean_shard


def attach(collection: ProcessGroupCollection) -> ProcessGroupCollection:
    """The collection with `bp` and `clean_shard` set, as modules are handed it."""
    collection.bp = get_block_parallel_group()
    collection.clean_shard = get_clean_shard_group()
    return collection
