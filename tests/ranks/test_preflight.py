"""`pretrain_bdlm.py --preflight` on several ranks: what passes, and each fault, planted on one.

Faults that do not hide one another share a flight, each on a rank of its own.
"""

import contextlib
import io
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import entry
import pytest
import torch
import torch.distributed as dist
from chat_files import random_chats, write_chats
from launch import ROOT, make_data
from ranks import run_ranks

pytestmark = pytest.mark.ranks

FLAGS = ["--train-iters", "3", "--preflight"]
CSBP = ["--block-parallel-size", "2"]
TP = ["--tensor-model-parallel-size", "2"]
EXPERTS = [
    *("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2"),
    *("--moe-ffn-hidden-size", "16"),
]
CHECKS = (
    *("versions", "degrees", "arguments", "data", "checkpoint", "saving", "memory", "kernel"),
    *("groups", "sample"),
)
Patch = pytest.MonkeyPatch


class GoneError(BaseException):
    """A rank has died."""


# --- faults: what is planted on a rank, and the flags that only it gets --------------------------


def own_store(patch: Patch, rank: int) -> list[str]:
    """No process group yet, and a store at an address, as torchrun starts ranks."""
    port = Path("port")
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port.write_text(str(free.getsockname()[1]))
    dist.barrier()
    dist.destroy_process_group()
    patch.setenv("MASTER_ADDR", "127.0.0.1")
    patch.setenv("MASTER_PORT", port.read_text())
    return []


def of_arguments(patch: Patch, rank: int) -> list[str]:
    """Rank 1 has other flags, 2 has a mask token that is none, 3 a folder without the mask."""
    if rank == 3:
        Path("unmasked/data").mkdir(parents=True)
        for name in ("chats.bin", "chats.idx", "chats.json"):
            shutil.copy(f"data/{name}", f"unmasked/data/{name}")
        patch.chdir("unmasked")
    return {1: ["--seed", "4"], 2: ["--mask-token-id", "300"]}.get(rank, [])


def of_machines(patch: Patch, rank: int) -> list[str]:
    """Rank 1 sees no data, 2 has another version and little memory, and in 3 a check raises."""
    from megatron_bp.tools.preflight import machine, memory

    def broken(args: Any, file: Any) -> Any:
        raise KeyError("planted")

    if rank == 1:
        patch.chdir("/")
    if rank == 2:
        installed = machine.version
        patch.setattr(machine, "version", lambda n: "0.1" if n == "numpy" else installed(n))
        patch.setattr(memory, "machine_bytes", lambda: 2**28)
    if rank == 3:
        patch.setattr(machine, "saving", broken)
    return []


def of_checkpoints(patch: Patch, rank: int) -> list[str]:
    """Rank 1 has a file cut short, 2 a broken index of them, 3 none of it; none sees rank 0's.

    All note the rows that they read.
    """
    from megatron_bp.tools.preflight import sample, shared

    rows_of, noted = sample.rows_of, Path(f"replica{rank}").absolute()

    def noting(micro_batch: int, replica: int) -> range:
        noted.write_text(str(replica))
        return rows_of(micro_batch, replica)

    patch.setattr(sample, "rows_of", noting)
    patch.setattr(shared, "WITHIN", 0.1)
    at = Path("runs/a").absolute()
    if rank:
        at = Path(f"of{rank}/runs/a").absolute()
        if rank == 3:
            at.mkdir(parents=True)
        else:
            shutil.copytree("runs/a", at)
    step = at / "iter_0000001"
    if rank == 1:
        part = max(step.glob("*.distcp"), key=lambda path: path.stat().st_size)
        part.write_bytes(part.read_bytes()[:-1])
    if rank == 2:
        (step / ".metadata").write_bytes(b"nothing")
    patch.chdir(at.parents[1])
    return []


def wrong_sum(patch: Patch, rank: int) -> list[str]:
    """In tensor-parallel groups rank 1 counts itself twice, and 3 has another number."""
    reduce = dist.all_reduce

    def wrong(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.shape == (2,) and dist.get_process_group_ranks(kwargs["group"]) == [
            rank - 1,
            rank,
        ]:
            tensor[0 if rank == 3 else 1] += 1
        return reduce(tensor, *args, **kwargs)

    if rank in (1, 3):
        patch.setattr(dist, "all_reduce", wrong)
    return []


def of_slots(patch: Patch, rank: int) -> list[str]:
    """Rank 1 sends its slot other rows; 3 does not come to its own, where 2 does not wait long."""
    from megatron_bp.tools.preflight import groups
    from megatron_bp.tools.preflight.board import Board

    meet, send = Board.meet, groups.all_to_all

    def impatient(self: Board, topic: str, ranks: list[int]) -> dict[int, str | None]:
        if topic == "meet/slot/2":
            if rank == 3:
                raise KeyError("planted")
            with pytest.MonkeyPatch.context() as once:
                once.setattr(self, "patience", 0.5)
                return meet(self, topic, ranks)
        return meet(self, topic, ranks)

    patch.setattr(Board, "meet", impatient)
    if rank == 1:
        patch.setattr(groups, "all_to_all", lambda rows, group: send(rows.flip(0), group))
    return []


def other_middle(patch: Patch, rank: int) -> list[str]:
    """The ends of the data's files are alike on both ranks, their middle is not."""
    from megatron_bp.tools.preflight import machine

    patch.setattr(machine, "ENDS", 16)
    if rank == 1:
        ignore = shutil.ignore_patterns("cache")
        shutil.copytree("data", "changed/data", ignore=ignore, dirs_exist_ok=True)
        file = Path("changed/data/words.bin")
        ids = file.read_bytes()
        # Ids of 2 bytes: another letter wherever there is an e.
        middle = ids[16:-16].replace(b"e\0", b"x\0")
        file.write_bytes(ids[:16] + middle + ids[-16:])
        patch.chdir("changed")
    return []


def hangs(patch: Patch, rank: int) -> list[str]:
    from megatron_bp.tools.preflight import machine

    saving = machine.saving

    def late(args: Any, file: Any) -> Any:
        time.sleep(2)
        return saving(args, file)

    if rank == 1:
        patch.setattr(machine, "saving", late)
    return []


def dies(patch: Patch, rank: int) -> list[str]:
    """Rank 1 is gone in the second round; rank 0 is told to end then, as torchrun does."""
    from megatron_bp.tools.preflight import machine

    def gone(args: Any, file: Any) -> Any:
        time.sleep(0.5)  # rank 0 waits
        os.kill(int(Path("rank0").read_text()), signal.SIGTERM)
        raise GoneError

    if rank == 0:
        Path("rank0").write_text(str(os.getpid()))
    if rank == 1:
        patch.setattr(machine, "saving", gone)
    return []


# --- flights -------------------------------------------------------------------------------------


def flight(
    rank: int,
    world: int,
    arguments: list[str],
    folder: str,
    fault: Callable[[Patch, int], list[str]] | None = None,
) -> tuple[int, str]:
    """One rank's exit code and what it printed; -1 of one that is gone."""
    sys.path.insert(0, str(ROOT))
    import pretrain_bdlm

    written, code = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        more = fault(patch, rank) if fault is not None else []
        try:
            with contextlib.redirect_stdout(written):
                pretrain_bdlm.main([*arguments, *more])
        except SystemExit as end:
            code = int(end.code or 0)
        except GoneError:
            code = -1
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
    assert head == f"Preflight of {data[0]} on {world} rank{'s' if world > 1 else ''}"
    found: dict[str, str] = {"": last}
    name = ""
    for line in lines:
        name = line[17:30].strip() or name
        found[name] = f"{found[name]}\n{line[31:]}" if name in found else line[2:]
    assert tuple(list(found)[1:]) == CHECKS
    return code, found


def failing(found: dict[str, str]) -> list[str]:
    return [name for name in CHECKS if found[name].startswith("FAILED")]


def unseen(found: dict[str, str]) -> list[str]:
    return [name for name in CHECKS if found[name].startswith("not looked at")]


def lines_of(found: dict[str, str], check: str) -> list[str]:
    """What a check says, without its verdict and with HOST for the name of this machine."""
    host = os.uname().nodename
    text = found[check][29:].replace(f"({host})", "(HOST)")
    return text.splitlines()


@pytest.mark.parametrize(
    ("world", "flags", "fault", "groups"),
    [
        (1, [], None, "one rank, no group"),
        (2, CSBP, own_store, "all ranks of 2, data parallel of 2, slot of 2"),
        (
            4,
            [*CSBP, *TP, "--sequence-parallel", *EXPERTS],
            None,
            "all ranks of 4, tensor parallel of 2, data parallel of 2, slot of 2, "
            "expert parallel of 2, expert data parallel of 2",
        ),
        (
            4,
            [*CSBP, "--context-parallel-size", "1", "--pipeline-model-parallel-size", "2"],
            None,
            "all ranks of 4, pipeline parallel of 2, data parallel of 2, slot of 2",
        ),
        (
            4,
            ["--block-parallel-size", "4", "--context-parallel-size", "2"],
            None,
            "all ranks of 4, data parallel of 4, slot of 4, clean shard of 2",
        ),
    ],
)
def test_all_passes(world: int, flags: list[str], fault: Any, groups: str, data: list[str]) -> None:
    code, found = fly(world, data, flags, fault)
    assert (code, failing(found), unseen(found)) == (0, [], [])
    assert found[""] == "preflight: all 10 checks passed; nothing was trained"
    assert groups in found["groups"]
    assert f"ranks: {world} / " in found["degrees"]
    assert f"this machine (no GPU) for each of its {world} ranks" in found["memory"]
    assert not list(Path(data[0]).parent.glob("**/*.jsonl")), "something was trained"


def test_what_is_wrong_with_arguments_is_told_of_each_rank(data: list[str]) -> None:
    folder = Path(data[0]).parent
    write_chats(folder / "data" / "chats", random_chats(30, most=24))
    flags = ["--block-parallel-size", "4", "--chats", "--global-batch-size", "1"]
    code, found = fly(4, [*data[:2], "data/chats"], flags, of_arguments)
    assert (code, failing(found)) == (2, ["arguments"])
    assert unseen(found) == list(CHECKS[3:])
    flawed, unmasked, others = lines_of(found, "arguments")
    assert flawed.startswith("rank 2 (HOST): --mask-token-id 300")
    assert unmasked.startswith("rank 3 (HOST): data/chats.supervised.npy: is missing")
    assert others.startswith("flags: ")
    assert " on rank 0 (HOST), but " in others
    assert others.endswith(
        " on rank 1 (HOST); start all ranks with the same command line and the same tokenizer"
    )


def test_what_is_wrong_with_machines_is_told_of_each_rank(data: list[str]) -> None:
    code, found = fly(4, data, [*CSBP, *TP], of_machines)
    assert code == 2
    assert failing(found) == ["versions", "data", "saving", "memory"]
    assert found[""] == (
        "preflight: 4 of 10 checks failed (versions, data, saving, memory); not looked at: sample"
    )
    (version,) = lines_of(found, "versions")
    assert version.startswith("numpy: ")
    assert "on ranks 0-1,3 (HOST), but 0.1 on rank 2 (HOST); let all ranks start from" in version
    (absent,) = lines_of(found, "data")
    assert absent.startswith("rank 1 (HOST): data/words.bin: no such file; --data-path takes")
    assert lines_of(found, "saving") == ["rank 3 (HOST): KeyError: 'planted'"]
    (little,) = lines_of(found, "memory")
    assert little.startswith("rank 2 (HOST): ")
    assert "too much; `python -m megatron_bp.tools.plan`" in little


def test_what_is_wrong_with_a_checkpoint_is_told_of_each_rank(data: list[str]) -> None:
    folder = Path(data[0]).parent
    save = ["--save", str(folder / "runs" / "a"), "--save-interval", "1"]
    save += ["--train-iters", "3", "--exit-interval", "1"]
    run_ranks(1, entry.pretrain, [*data[:2], str(folder / data[2]), *save], fresh=True)
    flags = [*CSBP, "--save", "runs/a", "--load", "runs/a", "--save-interval", "4"]
    words = str(folder / data[2])
    code, found = fly(4, [*data[:2], words], flags, of_checkpoints)
    assert (code, failing(found), unseen(found)) == (2, ["checkpoint", "saving"], [])
    short, broken, nothing = lines_of(found, "checkpoint")
    assert short.startswith("rank 1 (HOST): ")
    assert ".distcp: " in short
    assert broken.startswith("rank 2 (HOST): runs/a/iter_0000001/.metadata: cannot be read (")
    assert all(
        line.endswith("or start from another step (--ckpt-step)") for line in (short, broken)
    )
    assert nothing.startswith("starts from: runs/a/iter_0000001 (digest ")
    assert "but nothing on rank 3 (HOST); let all ranks see the same folder" in nothing
    (unshared,) = lines_of(found, "saving")
    assert unshared.startswith("ranks 1-3 (HOST): --save runs/a: what rank 0 writes into ")
    assert "is not seen here, and a checkpoint is written by all ranks into one" in unshared
    assert not list(folder.glob("**/preflight-*"))
    # Slots of two ranks are two data-parallel ranks.
    assert [(folder / f"replica{rank}").read_text() for rank in range(4)] == ["0", "0", "1", "1"]


@pytest.mark.parametrize(
    ("flags", "fault", "want"),
    [
        (
            TP,
            wrong_sum,
            [
                "ranks 0-1 (HOST): tensor parallel of ranks 0, 1: an all-reduce of rank numbers "
                "gave 1 of 3 ranks, and 2 ranks add up to 1; look at",
                "ranks 2-3 (HOST): tensor parallel of ranks 2, 3: an all-reduce of rank numbers "
                "gave 6 of 2 ranks, and 2 ranks add up to 5; look at",
            ],
        ),
        (
            [],
            of_slots,
            [
                "rank 0 (HOST): slot of ranks 0, 1: an all-to-all brought [0, 1001], and",
                "rank 1 (HOST): slot of ranks 0, 1: an all-to-all brought [",
                "rank 2 (HOST): slot of ranks 2, 3: 3 did not come within 120 s: look at",
                "rank 3 (HOST): KeyError: 'planted'",
            ],
        ),
    ],
)
def test_what_is_wrong_with_groups_is_told(
    flags: list[str], fault: Any, want: list[str], data: list[str]
) -> None:
    start = time.monotonic()
    code, found = fly(4, data, [*CSBP, *flags], fault)
    assert (code, failing(found), unseen(found)) == (2, ["groups"], ["sample"])
    lines = lines_of(found, "groups")
    assert [line[: len(text)] for line, text in zip(lines, want, strict=True)] == want
    assert time.monotonic() - start < 60, "ranks waited for one that had stopped"


def test_ranks_of_a_sequence_that_read_different_ones_are_named(data: list[str]) -> None:
    cache = str(Path(data[0]).parent / "cache")
    code, found = fly(2, data, [*CSBP, "--data-cache-path", cache], other_middle)
    assert (code, failing(found), unseen(found)) == (2, ["sample"], [])
    (line,) = lines_of(found, "sample")
    assert line.startswith("first micro-batch of data-parallel rank 0: ")
    assert line.endswith(
        "on rank 1 (HOST); their data differ where `data` does not look: compare whole files "
        "(sha256sum)"
    )


def test_an_index_of_the_data_that_a_rank_does_not_see(data: list[str]) -> None:
    code, found = fly(2, data, CSBP, other_middle)
    assert (code, failing(found), unseen(found)) == (2, ["sample"], [])
    (line,) = lines_of(found, "sample")
    assert line.startswith("rank 1 (HOST): [Errno 2] No such file or directory: ")
    assert line.endswith("give --data-cache-path a folder that all of them see")


def test_a_rank_that_hangs_is_named_in_time(data: list[str]) -> None:
    start = time.monotonic()
    code, found = fly(2, data, [*CSBP, "--preflight-timeout", "0.5"], hangs)
    assert code == 2
    assert failing(found) == ["saving"]
    assert lines_of(found, "saving") == [
        "rank 1 (HOST): did not answer in time: look at what it printed, and at its host"
    ]
    assert unseen(found) == ["data", "checkpoint", "memory", "kernel", "groups", "sample"]
    assert lines_of(found, "memory") == ["rank 1 (HOST): did not come back from `saving`"]
    assert time.monotonic() - start < 60


def test_numbers_that_do_not_divide(data: list[str]) -> None:
    code, found = fly(2, data, [*CSBP, *TP, "--num-attention-heads", "3"])
    assert code == 2
    assert "ranks: 2 / 4 (TP 2 x PP 1 x slot 2 of BP 2, CP 2) leaves 2 over" in found["degrees"]
    assert "query heads: 3 / 2 (TP 2) leaves 1 over" in found["degrees"]
    assert found["arguments"].startswith("FAILED")


def test_a_rank_that_dies_is_named(data: list[str]) -> None:
    folder = str(Path(data[0]).parent)
    ends = run_ranks(2, flight, [*data, *FLAGS, *CSBP], folder, dies, fresh=True)
    assert [code for code, _ in ends] == [2, -1]
    last = ends[0][1].splitlines()[-1]
    assert last == "preflight: told to end in round `machine`; ranks that had not answered: 1"
