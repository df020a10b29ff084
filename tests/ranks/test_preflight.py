"""`pretrain_bdlm.py --preflight` on several ranks: what passes, and each fault, planted on one."""

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import ROOT, Run, make_data
from ranks import run_ranks

pytestmark = pytest.mark.ranks

FLAGS = ["--train-iters", "3", "--preflight"]
CSBP = ["--block-parallel-size", "2"]
CHECKS = (
    *("versions", "degrees", "arguments", "data", "checkpoint", "saving", "memory", "kernel"),
    *("groups", "sample"),
)
Patch = pytest.MonkeyPatch


def elsewhere(patch: Patch, faulty: bool) -> list[str]:
    """The prefix is relative, and the rank is in a folder without the data."""
    if faulty:
        patch.chdir("/")
    return []


def other_version(patch: Patch, faulty: bool) -> list[str]:
    from megatron_bp.tools.preflight import machine

    if faulty:
        installed = machine.version
        patch.setattr(machine, "version", lambda n: "0.1" if n == "numpy" else installed(n))
    return []


def other_sample(patch: Patch, faulty: bool) -> list[str]:
    from megatron_bp.batch.dataset import SampleDataset

    if faulty:
        item = SampleDataset.__getitem__

        def shifted(self: Any, idx: Any) -> Any:
            found = item(self, idx)
            return found | {"tokens": found["tokens"][::-1]}

        patch.setattr(SampleDataset, "__getitem__", shifted)
    return []


def wrong_sum(patch: Patch, faulty: bool) -> list[str]:
    if faulty:
        reduce = dist.all_reduce

        def wrong(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.shape == (2,) and kwargs["group"].size() == 2:
                tensor += 1
            return reduce(tensor, *args, **kwargs)

        patch.setattr(dist, "all_reduce", wrong)
    return []


def wrong_rows(patch: Patch, faulty: bool) -> list[str]:
    from megatron_bp.tools.preflight import groups

    if faulty:
        send = groups.all_to_all
        patch.setattr(groups, "all_to_all", lambda rows, group: send(rows.flip(0), group))
    return []


def little_memory(patch: Patch, faulty: bool) -> list[str]:
    from megatron_bp.tools.preflight import memory

    if faulty:
        patch.setattr(memory, "machine_bytes", lambda: 2**28)
    return []


def raises(patch: Patch, faulty: bool) -> list[str]:
    from megatron_bp.tools.preflight import machine

    def broken(args: Any) -> Any:
        raise KeyError("planted")

    if faulty:
        patch.setattr(machine, "saving", broken)
    return []


def other_flags(patch: Patch, faulty: bool) -> list[str]:
    return ["--seed", "4"] if faulty else []


def refused(patch: Patch, faulty: bool) -> list[str]:
    return ["--mask-token-id", "300"] if faulty else []


def stays_away(patch: Patch, faulty: bool) -> list[str]:
    """The rank raises where the groups of its slot meet; the others do not wait long there."""
    from megatron_bp.tools.preflight.board import Board

    meet = Board.meet

    def impatient(self: Board, topic: str, ranks: list[int]) -> list[int]:
        if topic.startswith("meet/slot/"):
            if faulty:
                raise KeyError("planted")
            with pytest.MonkeyPatch.context() as once:
                once.setattr(self, "patience", 0.5)
                return meet(self, topic, ranks)
        return meet(self, topic, ranks)

    patch.setattr(Board, "meet", impatient)
    return []


def everything(patch: Patch, faulty: bool) -> list[str]:
    """Three faults at once."""
    return [*elsewhere(patch, faulty), *other_version(patch, faulty), *little_memory(patch, faulty)]


def flight(
    rank: int,
    world: int,
    arguments: list[str],
    folder: str,
    fault: Callable[[Patch, bool], list[str]] | None = None,
    of: int = 1,
) -> tuple[int, str]:
    """One rank's exit code and what it printed; `fault` is planted on rank `of`."""
    sys.path.insert(0, str(ROOT))
    import pretrain_bdlm

    written, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(world))
        patch.chdir(folder)
        more = fault(patch, rank == of) if fault is not None else []
        try:
            with contextlib.redirect_stdout(written):
                pretrain_bdlm.main([*arguments, *more])
        except SystemExit as end:
            code = int(end.code or 0)
    print(written.getvalue())
    return code, written.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The head of a command line; its prefix is relative to the folder of the config file."""
    config, flag, _ = make_data(tmp_path_factory.mktemp("preflight"))
    return [config, flag, "data/words"]


def fly(world: int, data: list[str], flags: list[str], *fault: Any) -> tuple[int, dict[str, str]]:
    """The exit code of all ranks, and check -> its lines in rank 0's table, last line as ""."""
    folder = str(Path(data[0]).parent)
    ends = run_ranks(world, flight, [*data, *FLAGS, *flags], folder, *fault, fresh=True)
    (code,) = {code for code, _ in ends}
    assert [text for _, text in ends[1:]] == [""] * (world - 1), "others are silent"
    head, *lines, last = ends[0][1].splitlines()
    assert head == f"Preflight of {data[0]} on {world} ranks"
    found: dict[str, str] = {"": last}
    name = ""
    for line in lines:
        name = line[17:30].strip() or name
        found[name] = f"{found[name]}\n{line[31:]}" if name in found else line[2:]
    assert tuple(list(found)[1:]) == CHECKS
    return code, found


def failing(found: dict[str, str]) -> list[str]:
    return [name for name in CHECKS if not found[name].startswith("ok ")]


@pytest.mark.parametrize(
    ("world", "flags", "groups"),
    [
        (1, [], "one rank, no group"),
        (2, CSBP, "all ranks of 2, data parallel of 2, slot of 2"),
        (
            4,
            [*CSBP, "--tensor-model-parallel-size", "2"],
            "all ranks of 4, tensor parallel of 2, data parallel of 2, slot of 2",
        ),
        (
            4,
            [*CSBP, "--context-parallel-size", "1", "--pipeline-model-parallel-size", "2"],
            "all ranks of 4, pipeline parallel of 2, data parallel of 2, slot of 2",
        ),
        (
            4,
            ["--block-parallel-size", "4", "--context-parallel-size", "2"],
            "all ranks of 4, data parallel of 4, slot of 4, clean shard of 2",
        ),
    ],
)
def test_all_passes(world: int, flags: list[str], groups: str, data: list[str]) -> None:
    code, found = fly(world, data, flags)
    assert (code, failing(found)) == (0, [])
    assert found[""] == "preflight: all 10 checks passed; nothing was trained"
    assert groups in found["groups"]
    assert f"ranks: {world} / " in found["degrees"]
    assert not list(Path(data[0]).parent.glob("**/*.jsonl")), "something was trained"


@pytest.mark.parametrize(
    ("fault", "check", "want", "also"),
    [
        (elsewhere, "data", "data/words.bin: no such file", ["sample"]),
        (other_version, "versions", "numpy: ", []),
        (other_sample, "sample", "first micro-batch of data-parallel rank 0: ", []),
        (wrong_sum, "groups", "gave 2 of 3 ranks, and 2 ranks add up to 1", ["sample"]),
        (wrong_rows, "groups", "an all-to-all brought ", ["sample"]),
        (little_memory, "memory", "of the machine for each of its 2 ranks", []),
        (raises, "saving", "KeyError: 'planted'", []),
        (other_flags, "arguments", "flags: ", ["groups", "sample"]),
        (
            refused,
            "arguments",
            "--mask-token-id 300",
            ["data", "checkpoint", "saving", "memory", "kernel", "groups", "sample"],
        ),
        (stays_away, "groups", "slot of ranks 0, 1: 1 did not come within", ["sample"]),
    ],
)
def test_a_fault_of_one_rank_is_told(
    fault: Any, check: str, want: str, also: list[str], data: list[str]
) -> None:
    code, found = fly(2, data, CSBP, fault)
    assert code == 2
    assert failing(found) == [name for name in CHECKS if name in (check, *also)]
    assert found[check].startswith("FAILED")
    assert want in found[check]
    assert "1 (" in found[check], "the rank and its host"
    assert all(found[name].startswith("not looked at") for name in also)


def test_all_faults_are_told_not_only_the_first(data: list[str]) -> None:
    _, found = fly(4, data, [*CSBP, "--tensor-model-parallel-size", "2"], everything, 3)
    assert failing(found) == ["versions", "data", "memory", "sample"]
    assert all("rank 3 (" in found[name] for name in ("versions", "data", "memory"))
    assert found[""] == (
        "preflight: 3 of 10 checks failed (versions, data, memory); not looked at: sample"
    )


def test_numbers_that_do_not_divide(data: list[str]) -> None:
    flags = [*CSBP, "--tensor-model-parallel-size", "2", "--num-attention-heads", "3"]
    code, found = fly(2, data, flags)
    assert code == 2
    assert "ranks: 2 / 4 (TP 2 x PP 1 x slot 2 of BP 2, CP 2) leaves 2 over" in found["degrees"]
    assert "query heads: 3 / 2 (TP 2) leaves 1 over" in found["degrees"]
    assert found["arguments"].startswith("FAILED")


def test_started_by_torchrun(data: list[str], tmp_path: Path) -> None:
    arguments = [*data[:2], str(Path(data[0]).parent / data[2]), *FLAGS]
    run = Run(2, arguments, tmp_path / "out")
    try:
        assert run.end(120) == 0, run.output
        assert "preflight: all 10 checks passed" in run.output
        assert run.leftovers() == []
    finally:
        run.clean_up()


def test_a_rank_that_dies_is_named(data: list[str], tmp_path: Path) -> None:
    arguments = [*data[:2], str(Path(data[0]).parent / data[2]), *FLAGS]
    run = Run(2, arguments, tmp_path / "out", ROOT / "tests" / "preflight_gone.py")
    try:
        assert run.end(120) != 0
        assert "told to end in round `machine`; ranks that had not answered: 1" in run.output
        assert run.leftovers() == []
    finally:
        run.clean_up()
