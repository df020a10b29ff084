"""What ranks hand to the other host, by hand, for each collective that training calls."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megatron_bp.tools.bench.crossing import counting

HOSTS = (0, 0, 1, 1)
# 4 ranks, two a host, 8 float32 = 32 B each. Rings cross from rank 1 to 2 and from 3 to 0:
#     all_gather: 3 times what a rank has, 96 B; all_reduce: 2 x 3/4 of it, 48 B.
# all_to_all: a quarter for each rank, 2 of them elsewhere: 16 B from each rank; with 1 + r rows of
#     4 B for rank r: ranks 0 and 1 hand over 3 + 4 rows, 2 and 3 hand over 1 + 2.
# isend to the next rank: as in a ring, once.
WANTED = {
    "all_gather": [0, 96, 0, 96],
    "all_reduce": [0, 48, 0, 48],
    "all_to_all": [16, 16, 16, 16],
    "uneven": [28, 28, 12, 12],
    "send": [0, 32, 0, 32],
    "batch": [0, 32, 0, 32],
    "inside": [0, 0, 0, 0],
}


def handed(rank: int, world: int) -> dict[str, tuple[float, float]]:
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    x, following, before = torch.ones(8), (rank + 1) % world, (rank - 1) % world
    rows, got = torch.ones(10, 1), torch.empty(8)

    def send() -> None:
        work = dist.isend(x, following)
        dist.recv(got, before)
        work.wait()

    def batch() -> None:
        both = [dist.P2POp(dist.isend, x, following), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def uneven() -> None:
        out = torch.empty(4 * (1 + rank), 1)
        dist.all_to_all_single(out, rows, [1 + rank] * 4, [1, 2, 3, 4])

    calls = {
        "all_gather": lambda: dist.all_gather_into_tensor(torch.empty(32), x),
        "all_reduce": lambda: dist.all_reduce(x.clone()),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(8), x),
        "uneven": uneven,
        "send": send,
        "batch": batch,
        "inside": lambda: dist.all_reduce(x.clone(), group=inside),
    }
    found = {}
    with counting(HOSTS) as crossing:
        for name, call in calls.items():
            call()
            taken = crossing.take()
            found[name] = (taken.bytes, taken.attention)
        # what attention calls is told apart by the module of a caller
        scope = {"dist": dist, "x": x, "torch": torch, "__name__": "megatron_bp.attention.some"}
        exec("dist.all_gather_into_tensor(torch.empty(32), x)", scope)
        taken = crossing.take()
        found["attention"] = (taken.bytes, taken.attention)
    return found


@pytest.mark.ranks
def test_what_is_handed_over() -> None:
    found = run_ranks(4, handed)
    for name, wanted in WANTED.items():
        assert [rank[name] for rank in found] == [(size, 0) for size in wanted], name
    assert [rank["attention"] for rank in found] == [(0, 0), (96, 96), (0, 0), (96, 96)]
