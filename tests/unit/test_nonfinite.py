"""A loss or gradient that is no number: what is told; nothing of it reaches the weights."""

import contextlib
import copy
import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from megatron_bp.data.document import Document
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.training.nonfinite import NonFinite, NonFiniteLossError

BAD = pytest.mark.parametrize("value", ["nan", "inf", "-inf"])


def sample_of(documents: int = 2) -> Sample:
    texts = []
    for number in range(documents):
        tokens = np.arange(3 + number, dtype=np.int32) + 10 * number
        texts.append(Document(tokens, np.ones(len(tokens), dtype=bool), 100 + number))
    return pack(texts, sum(len(t.tokens) for t in texts) + 2, split=0, epoch=4)


def check_on_rank(
    rank: int,
    world: int,
    mode: str,
    value: str,
    folder: Path | None,
    bad_rank: int,
    training: bool = True,
    documents: int = 2,
) -> tuple[str | None, str]:
    """(the error, what was printed) of a check on which `bad_rank` alone has the value."""
    watch = NonFinite(mode, folder, lambda: 17)  # type: ignore[arg-type]
    loss = torch.tensor(float(value) if rank == bad_rank else 1.0, requires_grad=True)
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        try:
            watch.check(loss, sample_of(documents), training)
        except NonFiniteLossError as error:
            return str(error), written.getvalue()
    return None, written.getvalue()


# --- stop ----------------------------------------------------------------------------------------


@pytest.mark.ranks
@BAD
def test_stop_names_step_rank_and_documents_and_writes_the_tokens(
    tmp_path: Path, value: str
) -> None:
    folder = tmp_path / "not" / "there"
    good, bad = run_ranks(2, check_on_rank, "stop", value, folder, 1)
    assert good == (None, "")
    file = folder / "nonfinite-step17-rank1.json"
    assert bad[0] is not None
    assert f"step 17, rank 1: the loss is {value} on documents with keys 100, 101;" in bad[0]
    assert str(file) in bad[0]
    assert "--on-nonfinite skip" in bad[0]
    assert [p.name for p in folder.iterdir()] == [file.name]
    assert json.loads(file.read_text()) == {
        "step": 17,
        "rank": 1,
        "loss": value,
        "training": True,
        "split": 0,
        "documents": [
            {"key": 100, "epoch": 4, "tokens": [0, 1, 2]},
            {"key": 101, "epoch": 4, "tokens": [10, 11, 12, 13]},
        ],
    }


@pytest.mark.ranks
def test_many_documents_are_counted_in_the_message_and_all_in_the_file(tmp_path: Path) -> None:
    ((error, _),) = run_ranks(1, check_on_rank, "stop", "nan", tmp_path, 0, True, 11)
    assert error is not None
    assert "keys 100, 101, 102, 103, 104, 105, 106, 107 and 3 more;" in error
    (file,) = tmp_path.iterdir()
    keys = [d["key"] for d in json.loads(file.read_text())["documents"]]
    assert keys == list(range(100, 111))


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_a_folder_that_cannot_be_written_does_not_hide_the_loss(tmp_path: Path, mode: str) -> None:
    (tmp_path / "file").touch()
    ((error, written),) = run_ranks(1, check_on_rank, mode, "nan", tmp_path / "file" / "x", 0)
    told = error if mode == "stop" else written
    assert told is not None
    assert "step 17, rank 0: the loss is nan" in told
    assert "could not be written" in written


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_a_finite_loss_leaves_nothing(tmp_path: Path, mode: str) -> None:
    assert run_ranks(1, check_on_rank, mode, "3.5", tmp_path, 0) == [(None, "")]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_an_evaluation_stops_in_either_mode(tmp_path: Path) -> None:
    ((error, _),) = run_ranks(1, check_on_rank, "skip", "nan", tmp_path, 0, False)
    assert error is not None
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["training"] is False


# --- skip ----------------------------------------------------------------------------------------


class Optimizer:
    """Megatron's interface around torch's Adam, over `main_grad`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.adam = torch.optim.Adam(self.parameters, lr=0.1)
        self.calls = 0

    def step(self) -> tuple[bool, float, int]:
        self.calls += 1
        for p in self.parameters:
            p.grad = p.main_grad
        self.adam.step()
        return True, 1.0, 0


def run_on_rank(
    rank: int, world: int, mode: str, faults: dict[int, str], folder: Path
) -> list[dict[str, Any]]:
    """Four steps; `faults` says what goes wrong in which, on rank 1 (or on the only rank)."""
    from megatron.training import training

    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    out: list[dict[str, Any]] = []
    optimizer, watch = Optimizer(model), NonFinite(mode, folder, lambda: len(out) + 1)  # type: ignore[arg-type]
    here = rank == world - 1

    def train_step(forward: Any, data: Any, model: Any, optimizer: Any, *rest: Any) -> Any:
        """Megatron's order: the micro-batches, the reduced gradients, the optimizer."""
        now = len(out)
        for micro in range(2):
            loss = torch.tensor(1.0)
            if here and micro == 0 and faults.get(now) == "loss":
                loss = torch.tensor(float("nan"))
            watch.check(loss, sample_of(), True)
        for p in model[0].parameters():
            p.main_grad = torch.full_like(p, 1.0 + now)
            if here and faults.get(now) == "gradient":
                p.main_grad.view(-1)[-1] = float("inf")
            if faults.get(now) == "loss":
                p.main_grad.fill_(0.25)  # finite: the loss alone must be enough
        return optimizer.step()

    with mock.patch.object(training, "train_step", train_step):
        watch.install()
        for _ in range(4):
            result = training.train_step(None, None, [model], optimizer, "scheduler")
            state = copy.deepcopy(optimizer.adam.state_dict()["state"])
            weights = [p.detach().clone() for p in model.parameters()]
            out.append({"result": result, "weights": weights, "state": state})
            out[-1]["calls"] = optimizer.calls
    return out


def bits(step: dict[str, Any]) -> list[bytes]:
    tensors: list[Tensor] = list(step["weights"])
    for state in step["state"].values():
        tensors += [state[name] for name in sorted(state)]
    return [t.numpy().tobytes() for t in tensors]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_skip_changes_no_bit_on_any_rank_and_goes_on(
    tmp_path: Path, fault: str, ranks: int
) -> None:
    runs = run_ranks(ranks, run_on_rank, "skip", {1: fault}, tmp_path)
    for run in runs:
        assert [step["result"] for step in run] == [
            (True, 1.0, 0),
            (False, None, None),
            (True, 1.0, 0),
            (True, 1.0, 0),
        ]
        assert [step["calls"] for step in run] == [1, 1, 2, 3]
        assert bits(run[0]) == bits(run[1])
        assert bits(run[1]) != bits(run[2]) != bits(run[3])
        assert all(torch.isfinite(w).all() for step in run for w in step["weights"])
    assert bits(runs[0][3]) == bits(runs[-1][3])
    names = [p.name for p in tmp_path.iterdir()]
    assert names == ([f"nonfinite-step2-rank{ranks - 1}.json"] if fault == "loss" else [])


@pytest.mark.ranks
def test_two_skipped_steps_in_a_row(tmp_path: Path) -> None:
    for run in run_ranks(2, run_on_rank, "skip", {0: "gradient", 1: "loss"}, tmp_path):
        assert [step["calls"] for step in run] == [0, 0, 1, 2]
        assert [step["result"][0] for step in run] == [False, False, True, True]


@pytest.mark.ranks
def test_without_a_fault_skip_is_the_same_as_stop(tmp_path: Path) -> None:
    (skip,) = run_ranks(1, run_on_rank, "skip", {}, tmp_path)
    (stop,) = run_ranks(1, run_on_rank, "stop", {}, tmp_path)
    assert [bits(step) for step in skip] == [bits(step) for step in stop]
    assert [step["calls"] for step in skip] == [1, 2, 3, 4]


@pytest.mark.ranks
def test_skip_tells_of_it_where_it_was(tmp_path: Path) -> None:
    good, bad = run_ranks(2, check_on_rank, "skip", "nan", tmp_path, 1)
    assert good == (None, "")
    assert bad[0] is None
    assert "step 17, rank 1: the loss is nan" in bad[1]
    assert "this step's update is skipped on all ranks" in bad[1]
