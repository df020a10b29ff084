"""What a run goes on from: whole checkpoints alone, and a tracker that is never half-written."""

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_bp.training import saving
from megatron_bp.training.saving import TRACKER, LoadError, check_load, complete_steps


def checkpoint(folder: Path, step: int, *files: str) -> None:
    path = folder / f"iter_{step:07}"
    path.mkdir(parents=True)
    for name in files or (".metadata", "metadata.json", "__0_0.distcp"):
        (path / name).write_text("{}")


def check(folder: Path, **more: Any) -> None:
    defaults = {
        "load": str(folder),
        "save": str(folder),
        "ckpt_format": "torch_dist",
        "finetune": False,
        "skip_train": False,
        "exit_on_missing_checkpoint": False,
        "pretrained_checkpoint": None,
    }
    check_load(Namespace(**(defaults | more)))


def test_a_folder_without_a_checkpoint_is_a_fresh_start(tmp_path: Path) -> None:
    check(tmp_path / "none")
    checkpoint(tmp_path, 2, "__0_0.distcp")  # killed in its first save
    check(tmp_path)
    check(tmp_path, load=None, save=None)


@pytest.mark.parametrize(
    "more",
    [
        {"save": "elsewhere"},
        {"save": None},
        {"finetune": True},
        {"exit_on_missing_checkpoint": True},
    ],
)
def test_a_folder_that_should_hold_a_checkpoint_and_does_not_is_an_error(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    with pytest.raises(LoadError, match=r"--load .*: holds no checkpoint"):
        check(tmp_path, **more)


@pytest.mark.parametrize("name", ["save", "load", "pretrained_checkpoint"])
def test_a_folder_that_cannot_be_read_is_named_with_its_flag(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one below another user's folder; root may read all, so the fault is planted."""
    closed, stat = tmp_path / "closed", Path.stat

    def refused(self: Path, **more: Any) -> Any:
        if self.is_relative_to(closed):
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **more)

    monkeypatch.setattr(Path, "stat", refused)
    folders = {"load": None, "save": None} | {name: str(closed)}
    want = (
        rf"--{name.replace('_', '-')} {closed}: {closed}/.* cannot be read \(Permission denied\);"
    )
    with pytest.raises(LoadError, match=want):
        check(tmp_path, **folders)


def test_weights_to_start_from_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"--pretrained-checkpoint .*: holds no checkpoint"):
        check(tmp_path, pretrained_checkpoint=str(tmp_path / "typo"))


def test_only_checkpoints_whose_save_came_to_its_end_count(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4)
    checkpoint(tmp_path, 6, "__0_0.distcp", ".metadata")
    checkpoint(tmp_path, 8, "__0_0.distcp", "metadata.json")
    (tmp_path / "iter_extra").mkdir()
    assert complete_steps(tmp_path) == [2, 4]


@pytest.mark.parametrize("text", ["", "4x", "-4"])
def test_a_broken_tracker_is_an_error_that_names_what_is_there(tmp_path: Path, text: str) -> None:
    checkpoint(tmp_path, 2)
    (tmp_path / TRACKER).write_text(text)
    with pytest.raises(LoadError, match=rf"holds '{text}'.*complete in .*: 2; write one of these"):
        check(tmp_path)


def test_a_tracker_that_names_half_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4, "__0_0.distcp")
    (tmp_path / TRACKER).write_text("4\n")
    with pytest.raises(LoadError, match=r"names step 4, which is not complete; .*: 2; write one"):
        check(tmp_path)
    with pytest.raises(LoadError, match=r"--ckpt-step names step 4.*: 2; choose one"):
        check(tmp_path, ckpt_step=4)
    check(tmp_path, ckpt_step=2)
    (tmp_path / TRACKER).write_text("2\n")
    check(tmp_path)


def test_the_tracker_keeps_its_step_until_the_next_one_is_whole(tmp_path: Path) -> None:
    tracker = tmp_path / TRACKER
    tracker.write_text("2")
    files = saving._AtomicTracker(Namespace(open=open, os=os))
    with files.open(str(tracker), "w") as file:
        file.write("4")
        file.flush()
        assert tracker.read_text() == "2"
    assert tracker.read_text() == "4"
    with pytest.raises(OSError, match="full"), files.open(str(tracker), "w") as file:
        raise OSError("full")
    assert tracker.read_text() == "4"
    with files.open(str(tmp_path / "metadata.json"), "w") as file:
        json.dump({}, file)
    assert files.os is os


@pytest.mark.parametrize(("loaded", "tracker"), [(2, "2"), (-1, None), (None, None)])
def test_a_checkpoint_about_to_be_overwritten_is_no_longer_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: int | None, tracker: str | None
) -> None:
    """After --ckpt-step 2, or a new run into the folder of an old one."""
    from megatron.training import checkpointing

    monkeypatch.setattr(checkpointing, "get_loaded_iteration", lambda: loaded)
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4, ".metadata", "metadata.json", "__0_0.distcp", "__3_0.distcp")
    (tmp_path / TRACKER).write_text("4")
    saving._empty(Namespace(save=str(tmp_path), load=str(tmp_path), finetune=False), 4)
    assert list((tmp_path / "iter_0000004").iterdir()) == []
    assert complete_steps(tmp_path) == [2]
    path = tmp_path / TRACKER
    assert (path.read_text() if path.exists() else None) == tracker


@pytest.mark.parametrize("finetune", [False, True])
@pytest.mark.parametrize("load", ["same", "other", None])
def test_a_run_in_the_folder_is_gone_on_from_or_left_alone(
    tmp_path: Path, load: str | None, finetune: bool
) -> None:
    save = tmp_path / "same"
    save.mkdir()
    source = str(tmp_path / load) if load else None
    args = Namespace(
        save=str(save),
        load=source,
        finetune=finetune,
        skip_train=False,
        ckpt_format="other",
        pretrained_checkpoint=None,
    )
    check_load(args)  # an empty folder is anybody's
    (save / saving.TRACKER).write_text("4")
    if load == "same" and not finetune:
        check_load(args)
        return
    with pytest.raises(saving.LoadError, match="holds the checkpoints of a run that this one"):
        check_load(args)
    args.skip_train = True  # writes nothing
    check_load(args)
