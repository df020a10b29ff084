"""The schedule of a run that goes on is that of its checkpoint, or the run does not start."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_bp.arguments import schedule as module
from megatron_bp.arguments.schedule import ScheduleError, check_schedule

SAVED = {
    "train_iters": 100,
    "train_samples": None,
    "global_batch_size": 4,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "lr_decay_iters": 100,  # Megatron sets it as it starts
    "lr_warmup_iters": 10,
    "lr_warmup_fraction": None,
    "start_weight_decay": 0.1,
    "end_weight_decay": 0.1,
    "weight_decay_incr_style": "constant",
}
SWITCHES = {
    "override_opt_param_scheduler": False,
    "use_checkpoint_opt_param_scheduler": False,
    "finetune": False,
    "no_load_optim": False,
    "skip_train": False,
}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "iter_0000006").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6\n")
    monkeypatch.setattr(module, "saved_arguments", lambda folder: Namespace(**SAVED))
    return str(tmp_path)


def arguments(load: str | None, **changes: Any) -> Namespace:
    return Namespace(**SAVED | SWITCHES | {"lr_decay_iters": None, "load": load} | changes)


@pytest.mark.parametrize(
    "same",
    [
        {},
        {"lr_decay_iters": 100},
        {"lr_warmup_iters": 0, "lr_warmup_fraction": 0.1},
        {"global_batch_size": 8, "train_iters": 50, "lr_warmup_iters": 5},
    ],
)
def test_the_same_schedule_goes_on(checkpoint: str, same: dict[str, Any]) -> None:
    check_schedule(arguments(checkpoint, **same))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"train_iters": 200}, r"the decay .* was 400, is 800; the run .* was 400, is 800\."),
        ({"global_batch_size": 8}, r"the warm-up .* was 40, is 80; the decay"),
        ({"train_iters": 200, "lr_decay_iters": 100}, r"schedule: the run .* was 400, is 800\."),
        ({"lr": 2e-3}, r"--lr was 0\.001, is 0\.002\."),
        ({"min_lr": 0.0}, r"--min-lr was 0\.0001, is 0\.0\."),
        ({"lr_decay_style": "linear"}, "--lr-decay-style was cosine, is linear"),
        ({"end_weight_decay": 0.2}, r"the weight decay at the end was 0\.1, is 0\.2"),
    ],
)
def test_another_is_an_error_with_the_ways_out(
    checkpoint: str, changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(ScheduleError, match=told) as error:
        check_schedule(arguments(checkpoint, **changed))
    assert "iter_0000006 was saved under another schedule" in str(error.value)
    assert "--override-opt-param-scheduler to go on with the new one" in str(error.value)
    for switch in SWITCHES:
        check_schedule(arguments(checkpoint, **changed, **{switch: True}))
    check_schedule(arguments(None, **changed))


def test_what_an_older_checkpoint_does_not_tell_is_not_compared(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "saved_arguments", lambda folder: Namespace())
    check_schedule(arguments(checkpoint))
