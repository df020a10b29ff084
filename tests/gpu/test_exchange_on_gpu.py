"""NCCL on one rank: the collectives that the exchange is made of start, and end, on a GPU."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def group(tmp_path: Path) -> object:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_collectives_on_one_rank(group: dist.ProcessGroup) -> None:
    x = torch.randn(64, 2, 4, 16, device="cuda", dtype=torch.bfloat16)
    gathered, scattered = torch.empty_like(x), torch.empty_like(x)
    works = [
        dist.all_gather_into_tensor(gathered, x, group=group, async_op=True),
        dist.all_to_all_single(scattered, x, group=group, async_op=True),
    ]
    for work in works:
        assert work is not None
        work.wait()
    torch.cuda.synchronize()
    assert torch.equal(gathered, x)
    assert torch.equal(scattered, x)
