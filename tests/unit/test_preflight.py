"""Parts of `pretrain_bdlm.py --preflight`, no ranks: verdicts, divisors, memory, files, board."""

import os
import threading
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_files import random_chats, write_chats
from launch import make_data
from torch.distributed import HashStore
from torch.distributed.checkpoint import FileSystemWriter, save

from megatron_bp.arguments.parse import _refuse_looks, parsed
from megatron_bp.planning.layout import Layout
from megatron_bp.tools import looks
from megatron_bp.tools.looks import looked_at
from megatron_bp.tools.preflight import machine, memory, shared
from megatron_bp.tools.preflight.board import Board, ToldToEndError
from megatron_bp.tools.preflight.command import _named, preflight
from megatron_bp.tools.preflight.degrees import Divisor, divisors, refusal
from megatron_bp.tools.preflight.findings import (
    Finding,
    dumped,
    failed,
    judge,
    loaded,
    summary,
    table,
)
from megatron_bp.tools.preflight.rounds import Rounds, run
from megatron_bp.tools.preflight.sample import check_sample, rows_of
from megatron_bp.tools.preflight.shared import SavedFile, saved_file
from megatron_bp.tools.preflight.start import place

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}
OK = Finding(True, "fine")
RUN = (
    "--num-layers 6 --hidden-size 64 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 96 --seq-length 96 --global-batch-size 12 "
    "--block-parallel-size 4 --context-parallel-size 2 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 3 --num-virtual-stages-per-pipeline-rank 2"
)


# --- verdicts ------------------------------------------------------------------------------------


def test_all_failures_are_told_with_ranks_and_hosts() -> None:
    bad, other = Finding(False, "no such file"), Finding(False, "disk full")
    verdict = judge("data", {0: OK, 1: bad, 2: bad, 3: other, 4: None}, HOSTS)
    assert verdict.ok is False
    assert verdict.lines == (
        "ranks 1 (a), 2 (b): no such file",
        "rank 3 (b): disk full",
        "rank 4 (host unknown): did not answer in time: look at what it printed, and at its host",
    )


def test_the_value_of_the_fewest_ranks_is_told_beside_the_usual_one() -> None:
    found = {r: Finding(True, "", {"torch": "2.13" if r != 2 else "2.9", "n": "1"}) for r in HOSTS}
    found[3] = Finding(True, "", {"torch": "2.8"})  # has no n: then it is not compared
    assert judge("versions", found, HOSTS).lines == (
        "torch: 2.13 on ranks 0-1 (a), but 2.9 on rank 2 (b) and 2.8 on rank 3 (b); let all ranks "
        "start from the same environment and the same files",
    )
    same = {r: Finding(True, "", {"torch": "2.13"}) for r in HOSTS}
    assert judge("versions", same, HOSTS).ok is True


def test_what_was_not_looked_at_is_no_success() -> None:
    unseen = Finding(None, "needs data")
    verdict = judge("sample", {0: OK, 1: unseen, 2: unseen, 3: OK}, HOSTS)
    assert (verdict.ok, verdict.lines) == (None, ("ranks 1 (a), 2 (b): needs data",))
    failure = judge("sample", {0: unseen, 1: Finding(False, "no")}, HOSTS)
    assert (failure.ok, failure.lines) == (False, ("rank 1 (a): no",))


def test_the_table_and_its_last_line() -> None:
    verdicts = [
        judge("data", {0: Finding(True, "one\ntwo"), 1: OK}, HOSTS),
        judge("memory", {0: OK, 1: Finding(False, "too little")}, HOSTS),
        judge("sample", {0: Finding(None, "needs memory"), 1: OK}, HOSTS),
    ]
    assert list(table(verdicts)) == [
        "  ok             data          one",
        "                               two",
        "  FAILED         memory        rank 1 (a): too little",
        "  not looked at  sample        rank 0 (a): needs memory",
    ]
    assert summary(verdicts) == "1 of 3 checks failed (memory); not looked at: sample"
    assert summary(verdicts[:1]) == "all 1 checks passed; nothing was trained"
    assert summary(verdicts[2:]) == "0 of 1 checks failed (); not looked at: sample"


def test_findings_travel_as_text() -> None:
    found = {"a": Finding(None, 'so "it" is', {"x": "1"}), "b": Finding(False)}
    assert loaded(dumped(found)) == found


def test_a_check_that_raises_has_failed() -> None:
    def refused() -> Finding:
        raise ValueError("--save x:\n cannot be written")

    def broken() -> Finding:
        raise KeyError("x")

    def leaves() -> Finding:
        parsed(["--no-such-flag", "--seq-length", "many"])
        return OK

    assert run(refused) == Finding(False, "--save x: cannot be written")
    assert run(broken) == Finding(False, "KeyError: 'x'")
    assert failed(ValueError()) == Finding(False, "ValueError: ")
    left = run(leaves)
    assert left.ok is False
    assert "argument --seq-length: invalid int value: 'many'" in left.said


# --- divisors ------------------------------------------------------------------------------------


def test_every_divisor_with_its_number() -> None:
    _, args, _ = parsed(RUN.split())
    # 2 x 3 x 4 = 24 ranks of a sequence; 48 are 2 replicas of micro-batches of 1.
    told = [d.told() for d in divisors(args, 48)]
    assert told == [
        "ranks: 48 / 24 (TP 2 x PP 3 x slot 4 of BP 4, CP 2) = 2",
        "ranks of a slot: 4 / 2 (CP 2) = 2",
        "query heads: 8 / 2 (TP 2) = 4",
        "key heads: 2 / 2 (TP 2) = 1",
        "hidden units of an MLP: 96 / 2 (TP 2) = 48",
        "layers: 6 / 3 (PP 3) = 2",
        "layers of a stage: 2 / 2 (2 virtual stages) = 1",
        "global batch: 12 / 2 (DP 2 x micro-batch 1) = 6",
        "micro-batches: 6 / 3 (PP 3, interleaved) = 2",
    ]
    assert refusal(divisors(args, 48)) is None


@pytest.mark.parametrize(
    ("more", "world", "want"),
    [
        ("", 36, "ranks: 36 / 24 (TP 2 x PP 3 x slot 4 of BP 4, CP 2) leaves 12 over"),
        ("--num-query-groups 1", 24, "key heads: 1 / 2 (TP 2) leaves 1 over"),
        ("--global-batch-size 9", 48, "global batch: 9 / 2 (DP 2 x micro-batch 1) leaves 1 over"),
        ("--global-batch-size 8", 48, "micro-batches: 4 / 3 (PP 3, interleaved) leaves 1 over"),
        ("--num-experts 6 --expert-model-parallel-size 4", 24, "experts: 6 / 4 (EP 4) leaves 2"),
        ("--tensor-model-parallel-size 0", 24, "ranks: 24 / 0 (TP 0 x PP 3 x slot 4"),
    ],
)
def test_what_does_not_divide_is_told(more: str, world: int, want: str) -> None:
    _, args, _ = parsed([*RUN.split(), *more.split()])
    assert want in (refusal(divisors(args, world)) or "")


def test_all_that_do_not_divide_are_told_at_once() -> None:
    found = [Divisor("a", 3, 2, "TP"), Divisor("b", 4, 2, "TP"), Divisor("c", 5, 3, "PP")]
    assert refusal(found) == "a: 3 / 2 (TP) leaves 1 over; c: 5 / 3 (PP) leaves 2 over"


# --- memory --------------------------------------------------------------------------------------


def test_a_tenth_stays_free() -> None:
    gib = 2**30
    assert "7.00 GiB at the peak" in memory.fits(7 * gib, 8 * gib, 10 * gib, "GPU 0")
    with pytest.raises(ValueError, match=r"of GPU 0, .*10% .* 0\.50 GiB too much"):
        memory.fits(7 * gib + gib // 2, 8 * gib, 10 * gib, "GPU 0")


def test_a_rank_has_its_stage_and_place_in_the_slot() -> None:
    # 16 ranks: tensor-parallel neighbours, then the slot of 2, then 2 replicas, then 2 stages.
    layout = replace(Layout(), tp=2, pp=2, dp=2, bp=2, cp=2)
    assert [memory.place(rank, 16, layout) for rank in range(16)] == [
        *[(0, 0), (0, 0), (0, 1), (0, 1)] * 2,
        *[(1, 0), (1, 0), (1, 1), (1, 1)] * 2,
    ]


def test_each_rank_is_estimated_at_its_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = replace(Layout(), tp=2, pp=2, bp=2, cp=2)
    monkeypatch.setattr(memory, "task_of", lambda args: None)
    monkeypatch.setattr(memory, "layout_of", lambda args: layout)
    monkeypatch.setattr(memory, "counted", lambda *given: None)
    monkeypatch.setattr(
        memory,
        "memory",
        lambda task, layout, counts, stage, slot, uncounted: Namespace(
            total=100 + 10 * stage + slot, parts={"process": 7}
        ),
    )
    ranks = [Namespace(rank=rank, world_size=8) for rank in range(8)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [memory.needed(rank) for rank in ranks] == [100, 100, 101, 101, 110, 110, 111, 111]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # torch does not see the process
    assert memory.needed(ranks[6]) == 104


def test_what_is_free_on_this_ranks_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {0: 5, 1: 6}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[gpu], 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "H200")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert memory.there(2) == (6, 9, "GPU 1, H200")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        ValueError, match="LOCAL_RANK 2, and 2 GPUs are shown to this process: start"
    ):
        memory.there(2)


def test_the_least_limit_of_a_machine_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = memory.machine_bytes()
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "small").write_text("12345\n")
    monkeypatch.setattr(memory, "LIMITS", (str(tmp_path / "max"), str(tmp_path / "absent")))
    assert memory.machine_bytes() >= whole
    monkeypatch.setattr(memory, "LIMITS", (str(tmp_path / "max"), str(tmp_path / "small")))
    assert memory.machine_bytes() == 12345


# --- files ---------------------------------------------------------------------------------------


def data_of(prefix: str) -> Namespace:
    _, args, _ = parsed(["--data-path", prefix])
    return args


def test_data_are_opened_and_compared(tmp_path: Path) -> None:
    *_, prefix = make_data(tmp_path)
    found = machine.data(data_of(prefix))
    ((name, facts),) = found.same.items()
    tokens = (tmp_path / "data" / "words.bin").stat().st_size // 2  # ids of 2 bytes
    assert (found.ok, name) == (True, prefix)
    assert facts.startswith(f"{tokens} tokens (digest ")
    other = bytearray(Path(f"{prefix}.bin").read_bytes())
    other[-1] ^= 1
    Path(f"{prefix}.bin").write_bytes(other)
    assert machine.data(data_of(prefix)).same[prefix] != facts
    Path(f"{prefix}.bin").write_bytes(other[:-2])
    with pytest.raises(ValueError, match=r"words\.bin"):
        machine.data(data_of(prefix))
    Path(f"{prefix}.idx").unlink()
    with pytest.raises(ValueError, match=r"words\.idx: no such file"):
        machine.data(data_of(prefix))


def test_masks_of_chats_are_compared(tmp_path: Path) -> None:
    prefix = write_chats(tmp_path / "chats", random_chats(9))
    _, args, _ = parsed(["--data-path", prefix, "--chats"])
    facts = machine.data(args).same[prefix]
    mask = Path(f"{prefix}.supervised.npy")
    mask.write_bytes(mask.read_bytes()[:-1] + b"\1")
    assert machine.data(args).same[prefix] != facts
    mask.unlink()
    with pytest.raises(ValueError, match=r"chats\.supervised\.npy: is missing"):
        machine.data(args)


def test_a_checkpoint_has_all_its_bytes(tmp_path: Path) -> None:
    args = Namespace(load=str(tmp_path), pretrained_checkpoint=None, ckpt_step=None)
    assert machine.checkpoint(args).same == {"starts from": "nothing"}
    folder = tmp_path / "iter_0000003"
    save({"w": torch.ones(9)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    found = machine.checkpoint(args)
    assert found.said == f"{folder}: 1 files, 1 entries"
    assert str(folder) in found.same["starts from"]
    (part,) = folder.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"\.distcp: \d+ bytes, and its metadata needs \d+"):
        machine.checkpoint(args)
    part.unlink()
    with pytest.raises(ValueError, match=r"\.distcp: No such file .*; copy the checkpoint again"):
        machine.checkpoint(args)
    (folder / ".metadata").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"\.metadata: cannot be read .*; copy the checkpoint"):
        machine.checkpoint(args)


@pytest.mark.parametrize(
    ("contradicts", "checked", "ok"),
    [("--rotary-base was 1, is 2", True, False), ("", True, True), ("x was 1", False, True)],
)
def test_a_checkpoint_of_another_rotary_base_is_told_before_the_run_is_refused(
    contradicts: str, checked: bool, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Finding(True, "whole", {"starts from": "a"})
    changed = "--rotary-base was 1, is 2; --norm-epsilon was 1, is 2"
    run = Namespace(folder="a", changed=changed, contradicts=contradicts)
    run.is_checked = lambda args: checked
    monkeypatch.setattr(machine, "checkpoint", lambda args: whole)
    monkeypatch.setattr(machine, "new_run", lambda args: run)
    found = machine.starts_from(Namespace(), machine.Look())
    assert (found.ok, found.same) == (ok, whole.same)
    if not checked:
        assert found == whole
    elif ok:
        assert f"whole\nset otherwise than there: {changed}; the run compares" in found.said
    else:
        assert "a was trained with other values: --rotary-base was 1, is 2. The run" in found.said
        assert "set them as they were, or start all the same with --check-conversion off" in (
            found.said
        )
    monkeypatch.setattr(machine, "new_run", lambda args: None)
    assert machine.starts_from(Namespace(), machine.Look()) == whole


def alone() -> SavedFile:
    return SavedFile(Board(HashStore(), 0, 1, 1))


def test_saving_leaves_nothing_behind(tmp_path: Path) -> None:
    args = Namespace(save=str(tmp_path / "run" / "deep"))
    assert machine.saving(args, alone()).ok
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"--save .*cannot be written"):
        machine.saving(Namespace(save="/proc/run"), alone())
    assert machine.saving(Namespace(save=None), alone()).said == "nothing is saved (no --save)"


def test_saving_below_a_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may do all, so the fault is planted: what is below cannot be looked at."""
    stat, lstat = os.stat, os.lstat

    def refused(look: Any, path: Any, **more: Any) -> Any:
        if "deep" in Path(path).parts:
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, **more)

    def closed(**more: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(more["dir"]))

    monkeypatch.setattr(os, "stat", partial(refused, stat))
    monkeypatch.setattr(os, "lstat", partial(refused, lstat))
    monkeypatch.setattr(machine.tempfile, "NamedTemporaryFile", closed)
    want = rf"--save .*deep/run: {tmp_path} cannot be written \(Permission denied\); choose"
    with pytest.raises(ValueError, match=want):
        machine.saving(Namespace(save=str(tmp_path / "deep" / "run")), alone())


@pytest.mark.parametrize("deeper", ["", "run"])
def test_a_file_in_the_place_of_the_save_folder(tmp_path: Path, deeper: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--save .*: .*/file is a file, and must be a folder"):
        machine.saving(Namespace(save=str(tmp_path / "file" / deeper)), alone())
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"/link is a file"):
        machine.saving(Namespace(save=str(tmp_path / "link")), alone())


@pytest.mark.parametrize("there", ["run", "run/deep"])
def test_a_folder_that_is_not_shared(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "WITHIN", 0.0)
    store = HashStore()
    files = [SavedFile(Board(store, rank, 3, 1)) for rank in range(3)]
    for host in ("a", "b"):
        (tmp_path / host / there).mkdir(parents=True)
    # Ranks 0 and 1 are on one host, and 2 is on another that has a folder of the same name.
    hosts = [Namespace(save=str(tmp_path / host / "run" / "deep")) for host in "aab"]
    with saved_file(Board(store, 0, 3, 1)) as file:
        for rank, args in ((1, hosts[1]), (2, hosts[2])):
            files[rank].put(args)
            files[rank].check(args)  # rank 0 has put nothing: nothing is looked for
        file.put(hosts[0])
        file.check(hosts[0])
        assert machine.saving(hosts[1], files[1]).ok
        with pytest.raises(ValueError, match=r"--save .*b/run/deep: what rank 0 writes into .*a"):
            machine.saving(hosts[2], files[2])
    assert not list(tmp_path.glob("**/preflight-*"))


# --- the board -----------------------------------------------------------------------------------


def test_ranks_that_do_not_come_are_named() -> None:
    store = HashStore()
    boards = [Board(store, rank, 3, 0.2) for rank in range(3)]
    missing: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda r=rank: missing.update({r: boards[r].meet("m", [0, 1, 2])}))
        for rank in (0, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert missing == {0: {1: None}, 2: {1: None}}
    boards[1].put("m", "late")
    assert boards[0].gather("m") == {0: "here", 1: "late", 2: "here"}


def test_a_rank_that_will_not_come_is_not_waited_for() -> None:
    store = HashStore()
    Board(store, 1, 2, 1000).put("m", "stopped at another group")
    assert Board(store, 0, 2, 1000).meet("m", [0, 1]) == {1: "stopped at another group"}


def test_a_late_note_of_a_rank_that_was_given_up_is_not_taken_for_another() -> None:
    boards = [Board(HashStore(), 0, 3, 1000)]
    boards += [Board(boards[0]._store, rank, 3, 1000) for rank in (1, 2)]
    boards[0].put("t", "0")
    boards[1].put("t", "late")
    later = threading.Timer(0.2, boards[2].put, ("t", "2"))
    later.start()
    assert boards[0].gather("t", [0, 2]) == {0: "0", 2: "2"}
    later.join()


def test_rank_0_is_heard_or_found_silent() -> None:
    store = HashStore()
    boards = [Board(store, rank, 2, 0.1) for rank in range(2)]
    assert boards[1].hear("verdict") is None
    boards[0].announce("verdict", "go")
    assert boards[1].hear("verdict") == "go"


def test_a_rank_that_is_told_to_end_gives_up_waiting() -> None:
    board = Board(HashStore(), 0, 2, 1000)
    board.ending = True
    with pytest.raises(ToldToEndError):
        board.gather("m")


@pytest.mark.parametrize("flag", ["--preflight", "--preflight-timeout"])
def test_flags_of_a_preflight_are_refused_in_a_file(flag: str) -> None:
    _refuse_looks(["--seed"])
    with pytest.raises(ValueError, match="both on the command line"):
        _refuse_looks(["--seed", flag])


@pytest.mark.parametrize("flags", [["--preflight", "--dry-run"], ["--dry-run", "--preflight"]])
def test_two_looks_at_once_are_refused(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(
        looks, "LOOKS", {flag: lambda argv, f=flag: taken.append(f) for flag in flags}
    )
    with pytest.raises(SystemExit) as end:
        looked_at(["run.yaml", *flags])
    assert (end.value.code, taken) == (2, [])
    assert " and ".join(flags) in capsys.readouterr().err
    assert looked_at(["run.yaml", flags[0]])
    assert taken == flags[:1]
    assert not looked_at(["run.yaml"])


def test_an_index_that_takes_long_is_told_with_what_to_wait_by() -> None:
    board = Board(HashStore(), 1, 2, 0.1)
    want = r"rank 0 has not made the index of the data within 0\.2 s: .* --preflight-timeout 0\.1,"
    with pytest.raises(ValueError, match=want):
        check_sample(Namespace(), 0, board)


def test_data_parallel_ranks_begin_with_rows_of_their_own() -> None:
    assert [*rows_of(2, 0)] == [0, 1]
    assert [*rows_of(2, 3)] == [6, 7]


# --- the start -----------------------------------------------------------------------------------

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def test_a_rank_knows_its_place() -> None:
    assert place(TORCHRUN, False) == (2, 4)
    assert place({}, False) == place({"MASTER_PORT": "tcp://10.0.0.1:22"}, False) == (0, 1)
    assert place({"RANK": "1", "WORLD_SIZE": "2"}, True) == (1, 2)


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_what_starts_ranks_and_is_not_set(name: str) -> None:
    some = {key: value for key, value in TORCHRUN.items() if key != name}
    want = f"WORLD_SIZE is 4 but {name} is not set, and several ranks need both: start them with"
    with pytest.raises(ValueError, match=want):
        place(some, False)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_what_starts_ranks_and_is_no_number(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=abc: must be a whole number; start the ranks"):
        place(TORCHRUN | {name: "abc"}, False)


@pytest.mark.parametrize("rank", ["4", "-1"])
def test_a_rank_that_cannot_be(rank: str) -> None:
    with pytest.raises(ValueError, match=rf"RANK={rank}: must be from 0 to 3 \(WORLD_SIZE=4\)"):
        place(TORCHRUN | {"RANK": rank}, False)


@pytest.mark.parametrize(
    ("variables", "argv", "want"),
    [
        ({"WORLD_SIZE": "4"}, ["--preflight"], "but RANK is not set, and several ranks need both"),
        ({}, ["--preflight-timeout", "0"], "--preflight-timeout 0.0: must be above 0 seconds"),
    ],
)
def test_a_start_that_cannot_be_is_told_in_one_line(
    variables: dict[str, str],
    argv: list[str],
    want: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in (*TORCHRUN, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        preflight(argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert (end.value.code, line[:24]) == (2, "pretrain_bdlm.py: error:")
    assert want in line


def test_a_preflight_is_named_by_its_config() -> None:
    assert _named(["run.yaml", "--preflight"]) == "run.yaml"
    assert _named(["--preflight"]) == _named([]) == "a run without a config file"


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (None, 2), (False, 2)])
def test_what_was_not_looked_at_ends_a_preflight_as_a_failure(ok: bool | None, code: int) -> None:
    rounds = Rounds(Board(HashStore(), 0, 1, 1))
    rounds.do("start", {"data": lambda: OK, "sample": lambda: Finding(ok, "needs data")})
    assert rounds.end() == code
