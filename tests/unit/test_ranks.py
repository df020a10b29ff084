"""Tests of the rank harness."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from torch import Tensor

pytestmark = pytest.mark.ranks


def give_back(rank: int, world: int, x: Tensor, extra: dict[str, Any]) -> dict[str, Any]:
    return {"rank": rank, "world": world, "x": x * rank, **extra}


def add_up(rank: int, world: int) -> tuple[Tensor, int, int]:
    x = torch.full([3], float(rank + 1), dtype=torch.float64)
    dist.all_reduce(x)
    return x, dist.get_rank(), dist.get_world_size()


def fail_on(rank: int, world: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def die(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def hang(rank: int, world: int) -> None:
    while rank == 1:
        time.sleep(0.1)


def unpicklable(rank: int, world: int) -> object:
    return lambda: rank


def talk(rank: int, world: int) -> None:
    print(f"rank {rank} says hello")
    os.write(2, f"and {rank} complains\n".encode())


def process_id(rank: int, world: int) -> int:
    return os.getpid()


def leave_traces(rank: int, world: int) -> tuple[Any, ...]:
    before = (os.environ.get("TRACE"), torch.get_default_dtype(), torch.is_grad_enabled())
    os.environ["TRACE"] = "left"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return *before, torch.rand(2, dtype=torch.float64)


def threads(rank: int, world: int) -> tuple[int, str, str, str]:
    names = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
    return torch.get_num_threads(), *(os.environ[name] for name in names)


def megatron_groups(rank: int, world: int, tensor: int) -> tuple[int, int, float]:
    """Initialises Megatron's groups and leaves them to the harness to destroy."""
    from megatron.core import parallel_state

    assert not parallel_state.model_parallel_is_initialized()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=parallel_state.get_data_parallel_group())
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
        x.item(),
    )


def test_results_come_in_rank_order() -> None:
    got = run_ranks(2, give_back, torch.arange(3.0), {"name": "a"})
    assert [g["rank"] for g in got] == [0, 1]
    assert all(g["world"] == 2 and g["name"] == "a" for g in got)
    assert got[1]["x"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_all_reduce(n: int) -> None:
    for rank, (x, its_rank, world) in enumerate(run_ranks(n, add_up)):
        assert x.dtype == torch.float64
        assert x.tolist() == [n * (n + 1) / 2] * 3
        assert (its_rank, world) == (rank, n)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_exception_surfaces_and_the_next_call_works(bad: int) -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(2, fail_on, bad)
    text = str(failure.value)
    assert f"rank {bad} of 2" in text
    assert f"ValueError: rank {bad} has had enough" in text
    assert "in fail_on" in text  # the traceback, not just the message
    assert run_ranks(2, add_up)[1][0].tolist() == [3.0] * 3


def test_a_dead_rank_surfaces() -> None:
    with pytest.raises(RankError, match="rank 1 of 2\nthe process died, exit code 7"):
        run_ranks(2, die)
    assert len(run_ranks(2, add_up)) == 2


def test_ranks_that_died_between_calls_are_replaced() -> None:
    first, second = run_ranks(2, process_id)
    os.kill(second, signal.SIGKILL)
    time.sleep(1)
    assert {first, second}.isdisjoint(run_ranks(2, process_id))


def test_a_hang_surfaces_with_the_place() -> None:
    place = r"(?s)did not end within 4 s\n--- rank 1 of 2\n(?:(?!\n---).)*in hang"
    with pytest.raises(RankError, match=place):
        run_ranks(2, hang, timeout=4)
    assert len(run_ranks(2, add_up)) == 2


def test_output_belongs_to_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        run_ranks(2, talk)
        got = capsys.readouterr().out
        for rank in range(2):
            assert got.count(f"rank {rank} says hello") == 1
            assert got.count(f"and {rank} complains") == 1


def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(RankError, match="pickle"):
        run_ranks(1, unpicklable)


def test_a_local_function_is_refused() -> None:
    with pytest.raises(ValueError, match="module level"):
        run_ranks(1, lambda rank, world: rank)


def test_processes_live_on_unless_fresh_is_asked_for() -> None:
    first = run_ranks(2, process_id)
    assert run_ranks(2, process_id) == first
    assert run_ranks(1, process_id) == first[:1]
    assert os.getpid() not in first
    assert set(run_ranks(2, process_id, fresh=True)).isdisjoint(first)


def test_a_call_does_not_see_the_one_before() -> None:
    first, again = run_ranks(1, leave_traces)[0], run_ranks(1, leave_traces)[0]
    for got in (first, again):
        assert got[:3] == (None, torch.float32, True)
    assert first[3].equal(again[3])


def test_threads_and_environment() -> None:
    assert run_ranks(2, threads) == [(1, "1", "0", "2"), (1, "1", "1", "2")]


def test_megatron_groups_are_destroyed_between_calls() -> None:
    assert run_ranks(2, megatron_groups, 2) == [(2, 1, 0.0), (2, 1, 1.0)]
    assert run_ranks(2, megatron_groups, 1) == [(1, 2, 1.0), (1, 2, 1.0)]
    assert run_ranks(4, megatron_groups, 2) == [(2, 2, 2.0), (2, 2, 4.0)] * 2


def leaves_a_child(rank: int, world: int) -> int:
    """Starts a process that would live on, as Megatron's checkpoint writer does."""
    import subprocess

    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def test_what_a_rank_started_ends_with_it() -> None:
    child = run_ranks(1, leaves_a_child, fresh=True)[0]
    for _ in range(50):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"process {child} lives on")
