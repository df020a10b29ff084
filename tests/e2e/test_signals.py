"""A signal to a run, all of it or one rank: the step is saved and every rank ends with 0."""

import functools
import os
import re
import signal
from pathlib import Path

import pytest
from entry import pretrain
from launch import ASYNC, Run, losses, make_data, saved_step
from ranks import run_ranks

from megatron_bp.training.saving import complete_steps

pytestmark = pytest.mark.ranks

STEPS = 100_000  # far more than a test waits for


def flags(save: Path, steps: int = STEPS) -> list[str]:
    folder = ["--save", str(save), "--load", str(save)]
    return [*folder, "--save-interval", str(STEPS), "--train-iters", str(steps)]


def told(output: str) -> tuple[str, int]:
    """Who got which signal, and the step saved."""
    ((who, step),) = re.findall(r"megatron_bp: (SIG\w+ to rank [\d, ]+): step (\d+) is", output)
    return who, int(step)


def send(to: int, at: int, sent: signal.Signals, rank: int, step: int) -> None:
    if (rank, step) == (to, at):
        os.kill(os.getpid(), sent)


def test_one_rank_gets_a_chosen_signal_and_all_save_and_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    head, save = make_data(tmp_path), tmp_path / "run"
    arguments = [*head, *flags(save), "--block-parallel-size", "2", "--exit-signal", "SIGUSR1"]
    hook = functools.partial(send, 1, 3, signal.SIGUSR1)
    ends = run_ranks(2, pretrain, arguments, hook, fresh=True)
    assert [code for code, _ in ends] == [0, 0]
    assert told(capfd.readouterr().out) == ("SIGUSR1 to rank 1", 3)
    assert saved_step(save) == 3
    assert complete_steps(save) == [3]
    assert sorted(losses(save)) == [1, 2, 3]


def test_without_a_save_folder_it_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*make_data(tmp_path), "--train-iters", str(STEPS)]
    hook = functools.partial(send, 0, 2, signal.SIGTERM)
    assert run_ranks(1, pretrain, arguments, hook, fresh=True)[0][0] == 0
    assert "SIGTERM to rank 0: --save is not set, so nothing is saved" in capfd.readouterr().out


def test_a_plain_process_saves_and_ends_with_0(tmp_path: Path) -> None:
    head, save = make_data(tmp_path), tmp_path / "run"
    run = Run(1, [*head, *flags(save)], tmp_path / "output.txt", torchrun=False)
    try:
        run.wait_for_step(save, 2)
        run.process.send_signal(signal.SIGTERM)
        assert run.end(60) == 0, run.output[-4000:]
        who, step = told(run.output)
        assert who == "SIGTERM to rank 0"
        assert saved_step(save) == step == max(losses(save))
        assert run.leftovers() == []
    finally:
        run.clean_up()


def test_every_process_of_a_run_gets_it_with_loaders_and_writers(tmp_path: Path) -> None:
    """As torchrun and batch systems send it: to data loaders and checkpoint writers too."""
    head, save = make_data(tmp_path), tmp_path / "run"
    more = [*ASYNC, "--num-workers", "1"]
    run = Run(2, [*head, *flags(save), *more], tmp_path / "output.txt")
    try:
        run.wait_for_step(save, 2)
        processes = run.descendants()
        assert len(processes) >= 8  # 2 ranks, and of each a loader, a writer and its results
        for pid in processes:
            os.kill(pid, signal.SIGTERM)
        assert run.end(60) == 0, run.output[-4000:]
        who, step = told(run.output)
        # A step may end between the signals to one rank and to the other.
        assert who in ("SIGTERM to rank 0, 1", "SIGTERM to rank 0", "SIGTERM to rank 1")
        assert saved_step(save) == step == max(losses(save))
        assert complete_steps(save) == [step]
        assert run.leftovers() == []
    finally:
        run.clean_up()


def test_a_process_with_loaders_ends_when_it_has_written_its_report(tmp_path: Path) -> None:
    head, save = make_data(tmp_path), tmp_path / "run"
    more = ["--exit-interval", "2", "--num-workers", "1"]
    run = Run(1, [*head, *flags(save), *more], tmp_path / "output.txt", torchrun=False)
    try:
        assert run.end(120) == 0, run.output[-4000:]
        assert "After step 2 of 100,000; it was told to stop." in (save / "report.md").read_text()
        assert run.leftovers() == []
    finally:
        run.clean_up()


@pytest.mark.slow
def test_torchrun_passes_it_on_and_itself_ends_with_1(tmp_path: Path) -> None:
    head, save = make_data(tmp_path), tmp_path / "run"
    run = Run(2, [*head, *flags(save)], tmp_path / "output.txt")
    try:
        run.wait_for_step(save, 2)
        run.process.send_signal(signal.SIGTERM)
        assert run.end(60) == 1
        who, step = told(run.output)
        assert who == "SIGTERM to rank 0, 1"
        assert saved_step(save) == step
        assert run.leftovers() == []
    finally:
        run.clean_up()
