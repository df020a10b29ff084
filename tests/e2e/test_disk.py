"""A disk that fills up or turns read-only while a run saves: the last checkpoint stays whole.

Needs to mount a small file system, so root with that right; skipped elsewhere.
"""

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from entry import pretrain
from launch import ASYNC, Run, losses, make_data, saved_step
from ranks import run_ranks

from megatron_bp.training.saving import complete_steps

pytestmark = pytest.mark.ranks

# About 7 MB a checkpoint: two fit into 20 MB.
SIZE = ["--hidden-size", "128", "--ffn-hidden-size", "512"]
FLAGS = [*SIZE, "--save-interval", "1", "--train-iters", "4"]


@pytest.fixture
def small(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder with 20 MB of room, or as much as the test asks for."""
    folder = tmp_path / "small"
    folder.mkdir()
    room = getattr(request, "param", "20m")
    command = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"mount: {error}")
    if done.returncode:
        pytest.skip(f"mounting is not possible here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def arguments(head: list[str], save: Path) -> list[str]:
    return [*head, *FLAGS, "--save", str(save), "--load", str(save), "--block-parallel-size", "2"]


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("pretrain_bdlm.py: error: ")]


def check_message(text: str, save: Path, reason: str) -> None:
    """Value, rule and way out, in one line."""
    (line,) = errors(text)
    for part in (
        f"the checkpoint of step 3 could not be written to {save}: ",
        reason,
        f"The last complete checkpoint, step 2, is untouched in {save}",
        f"--load {save} goes on from there",
        "Make room",
    ):
        assert part in line


def check_kept(save: Path) -> None:
    assert saved_step(save) == 2
    assert complete_steps(save) == [1, 2]


def test_a_full_disk_keeps_the_last_checkpoint_and_the_run_goes_on_elsewhere(
    tmp_path: Path, small: Path
) -> None:
    head, save, large = make_data(tmp_path), small / "run", tmp_path / "large"
    (code0, text0), (code1, text1) = run_ranks(2, pretrain, arguments(head, save), fresh=True)
    assert code0 == code1 == 1
    check_message(text0, save, "No space left on device; ")
    (other,) = errors(text1)
    assert "rank 1: step 3 could not be saved; rank 0 says why" in other
    check_kept(save)

    shutil.copytree(save, large)
    ends = run_ranks(2, pretrain, arguments(head, large), fresh=True)
    assert [code for code, _ in ends] == [0, 0]
    assert saved_step(large) == 4
    ends = run_ranks(2, pretrain, arguments(head, tmp_path / "whole"), fresh=True)
    assert losses(large) == losses(tmp_path / "whole")


def make_read_only(folder: str, rank: int, step: int) -> None:
    if (rank, step) == (0, 3):
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)


def test_a_read_only_folder_keeps_the_last_checkpoint(tmp_path: Path, small: Path) -> None:
    head, save = make_data(tmp_path), small / "run"
    elsewhere = ["--metrics-file", str(tmp_path / "metrics.jsonl")]
    hook = functools.partial(make_read_only, str(small))
    ends = run_ranks(2, pretrain, [*arguments(head, save), *elsewhere], hook, fresh=True)
    assert [code for code, _ in ends] == [1, 1]
    check_message(ends[0][1], save, "Read-only file system; ")
    check_kept(save)


def test_metrics_that_cannot_be_written_end_the_run_with_a_message(
    tmp_path: Path, small: Path
) -> None:
    head, save = make_data(tmp_path), small / "run"
    hook = functools.partial(make_read_only, str(small))
    one = [*head, *FLAGS, "--save", str(save), "--load", str(save)]
    ((code, text),) = run_ranks(1, pretrain, one, hook, fresh=True)
    assert code == 1
    (line,) = errors(text)
    assert f"{save / 'metrics.jsonl'} could not be written (Read-only file system)" in line
    assert "The last complete checkpoint, step 2, is untouched" in line
    check_kept(save)


@pytest.mark.slow
def test_a_full_disk_under_an_asynchronous_save(tmp_path: Path, small: Path) -> None:
    head, save = make_data(tmp_path), small / "run"
    flags = arguments(head, save)[:-2]  # Run adds the degree
    run = Run(2, [*flags, *ASYNC], tmp_path / "output.txt")
    try:
        assert run.end() == 1
        (line,) = [line for line in errors(run.output) if "rank 0 says why" not in line]
        assert "No space left on device" in line
        assert "is untouched in" in line
        assert saved_step(save) == complete_steps(save)[-1] >= 1
        assert run.leftovers() == []
    finally:
        run.clean_up()


@pytest.mark.parametrize("small", ["600k"], indirect=True)
def test_a_process_ends_with_1_and_its_line_after_its_report(tmp_path: Path, small: Path) -> None:
    """The file that broke off stays in memory: freed while the report is made, it faults."""
    save = small / "run"
    head = [*make_data(tmp_path), "--save-interval", "2", "--train-iters", "4"]
    head += ["--save", str(save)]
    run = Run(1, head, tmp_path / "output.txt", torchrun=False)
    try:
        assert run.end(120) == 1, run.output[-4000:]
        (line,) = errors(run.output)
        assert f"could not be written to {save}: rank 0: No space left on device" in line
    finally:
        run.clean_up()
