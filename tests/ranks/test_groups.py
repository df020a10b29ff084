"""The groups of block parallelism beside Megatron's: who is in them, and that they go with them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks


def groups_on_rank(rank: int, world: int, tensor: int, bp: int, cp: int) -> dict[str, list[int]]:
    """Ranks of each group, found by a collective in it."""
    from megatron.core import parallel_state as mpu
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_bp.parallel import state

    for _ in range(2):  # destroyed with Megatron's, and made again
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=tensor, context_parallel_size=max(bp, cp)
        )
        assert not state.block_parallel_is_initialized()
        state.initialize_block_parallel(bp, cp)
        collection = state.attach(ProcessGroupCollection.use_mpu_process_groups())
        out: dict[str, list[int]] = {}
        for name in ("slot", "bp", "clean_shard"):
            group = getattr(collection, name)
            every = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
            dist.all_gather(every, torch.tensor([rank]), group=group)
            out[name] = [int(r) for r in every]
        assert state.get_block_parallel_world_size() == len(out["bp"])
        assert out["bp"][state.get_block_parallel_rank()] == rank
        mpu.destroy_model_parallel()
        assert not state.block_parallel_is_initialized()
    return out


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "tensor", "bp", "cp", "slots", "shards"),
    [
        (1, 1, 1, 1, [[0]], [[0]]),
        (2, 1, 2, 2, [[0, 1]], [[0, 1]]),
        (4, 1, 2, 1, [[0, 1], [2, 3]], [[0], [1], [2], [3]]),
        (4, 2, 1, 2, [[0, 2], [1, 3]], [[0, 2], [1, 3]]),
        (4, 1, 4, 2, [[0, 1, 2, 3]], [[0, 1], [2, 3]]),
        # tensor-parallel peers are neighbours; the slot's ranks are two apart
        (8, 2, 4, 2, [[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 2], [4, 6], [1, 3], [5, 7]]),
    ],
)
def test_who_is_in_the_groups(
    world: int, tensor: int, bp: int, cp: int, slots: list[list[int]], shards: list[list[int]]
) -> None:
    for rank, got in enumerate(run_ranks(world, groups_on_rank, tensor, bp, cp)):
        (slot,) = (s for s in slots if rank in s)
        (shard,) = (s for s in shards if rank in s)
        assert got == {"slot": slot, "bp": slot if bp > 1 else [rank], "clean_shard": shard}


def wrong_on_rank(rank: int, world: int, bp: int, cp: int) -> Any:
    from megatron.core import parallel_state as mpu

    from megatron_bp.parallel import state

    mpu.initialize_model_parallel(context_parallel_size=2)
    state.initialize_block_parallel(bp, cp)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("bp", "cp", "words"),
    [(4, 2, r"needs max\(BP, CP\) = 4"), (2, 3, "CP must be 1, BP or a divisor of BP")],
)
def test_degrees_that_do_not_fit_are_an_error(bp: int, cp: int, words: str) -> None:
    with pytest.raises(RankError, match=words):
        run_ranks(2, wrong_on_rank, bp, cp)
