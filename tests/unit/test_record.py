"""The metrics file: what is written when, and what a resumed run does to it."""

import contextlib
import functools
import io
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks

from megatron_bp.training.metrics import BINS, Step
from megatron_bp.training.record import Recorder, read_metrics

# What happens: ("train", iteration), ("evaluate", iteration) or ("test", iteration).
Events = list[tuple[str, int]]


def step_of(value: float, count: int = 8) -> Step:
    return Step(
        loss={"diffusion": value},
        loss_sum={"diffusion": value * count},
        count={"diffusion": count},
        total=value,
        bins=[None] * BINS,
        corruptible=8,
        corrupted=4,
        scored=4,
        rows=16,
        clean_tokens=8,
        bytes_sent=0,
        balance=1.0,
        seconds=2.0,
        memory=3 * 10**9,
        samples=torch.tensor([[value * 4, 4.0, 5.0]] * 2, dtype=torch.float64),
    )


class FakeMetrics:
    """A step of the given loss a call; counts what is dropped."""

    def __init__(self, value: float, count: int) -> None:
        self.value, self.count, self.dropped = value, count, 0

    def drop(self) -> None:
        self.dropped += 1

    def finish(self, group: Any, slot: int, job: Any) -> Step:
        assert (group, slot) == ("the group", 2)
        assert job is torch.distributed.group.WORLD
        return step_of(self.value, self.count)


def run_on_rank(
    rank: int,
    world: int,
    path: Path | None,
    events: Events,
    value: float = 1.0,
    is_bound: bool = True,
    draws: int = 1,
    count: int = 8,
    samples: int | None = None,
) -> dict[str, Any]:
    """A process that records the events, with Megatron's own signatures."""
    from megatron.training import training

    shown: list[dict[str, float]] = []

    @functools.wraps(training.training_log)
    def log(loss_dict: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> bool:
        shown.append({name: float(v) for name, v in loss_dict.items()})
        return True

    @functools.wraps(training.evaluate_and_print_results)
    def evaluation(*args: Any, **kwargs: Any) -> str:
        return "result"

    metrics = FakeMetrics(value, count)
    with (
        mock.patch.object(training, "training_log", log),
        mock.patch.object(training, "evaluate_and_print_results", evaluation),
        mock.patch.object(training, "get_tensorboard_writer", return_value=None),
        mock.patch("megatron.training.get_tensorboard_writer", return_value=None),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        recorder = Recorder(metrics, path, is_bound, draws, samples)  # type: ignore[arg-type]
        recorder.install(lambda: "the group", 2)  # type: ignore[arg-type, return-value]
        for kind, iteration in events:
            if kind == "train":
                training.training_log(
                    {"diffusion loss": torch.tensor(value)},
                    {},
                    0.5,
                    iteration,
                    1.0,
                    False,
                    0,
                    grad_norm=0.25,
                    params_norm=None,
                    num_zeros_in_grad=None,
                    max_attention_logit=None,
                )
            else:
                prefix = f"iteration {iteration}" + (" on test set" if kind == "test" else "")
                assert (
                    training.evaluate_and_print_results(
                        prefix, None, None, None, iteration, None, None
                    )
                    == "result"
                )
    print(printed.getvalue(), end="")
    return {
        "shown": shown,
        "dropped": metrics.dropped,
        "warned": [x for x in printed.getvalue().splitlines() if "supervised" in x],
    }


def told(path: Path) -> list[tuple[str, int, float]]:
    return [(row["kind"], row["iteration"], row["loss"]) for row in read_metrics(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "metrics.jsonl"


@pytest.mark.ranks
def test_rows_of_a_run(path: Path) -> None:
    events = [("train", 1), ("train", 2), ("evaluate", 2), ("test", 2)]
    (run,) = run_ranks(1, run_on_rank, path, events)
    train, _, validation, test = read_metrics(path)
    assert [r["kind"] for r in read_metrics(path)] == ["train", "train", "validation", "test"]
    assert (train["learning_rate"], train["grad_norm"], train["skipped"]) == (0.5, 0.25, 0)
    assert "samples" not in train
    assert "bound_bits_per_token" not in train
    assert (validation["samples"], validation["draws"]) == (2, 1)
    assert validation["bound_bits_per_token"] == test["bound_bits_per_token"] > 0
    assert run["dropped"] == 2  # before each evaluation
    assert run["shown"][0] == {
        "diffusion loss": 1.0,
        "masked fraction": 0.5,
        "clean tokens/s": 4.0,
        "bytes exchanged": 0.0,
        "balance": 1.0,
        "peak memory (GB)": 3.0,
    }
    assert run["warned"] == []


def write_on_rank(rank: int, world: int, folder: Path, events: Events) -> None:
    run_on_rank(rank, world, folder / f"rank{rank}.jsonl", events)


@pytest.mark.ranks
def test_only_the_last_rank_writes(tmp_path: Path) -> None:
    run_ranks(2, write_on_rank, tmp_path, [("train", 1), ("evaluate", 1), ("train", 2)])
    assert [path.name for path in tmp_path.iterdir()] == ["rank1.jsonl"]
    assert [row["iteration"] for row in read_metrics(tmp_path / "rank1.jsonl")] == [1, 1, 2]


@pytest.mark.ranks
def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    run_ranks(1, run_on_rank, None, [("train", 1), ("evaluate", 1)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_rows_of_steps_that_are_run_again_are_replaced(path: Path) -> None:
    first = [("train", 1), ("train", 2), ("evaluate", 2), ("train", 3), ("train", 4)]
    run_ranks(1, run_on_rank, path, [*first, ("evaluate", 4)], 1.0)
    run_ranks(1, run_on_rank, path, [("train", 3), ("evaluate", 3)], 2.0)
    assert told(path) == [
        ("train", 1, 1.0),
        ("train", 2, 1.0),
        ("validation", 2, 1.0),
        ("train", 3, 2.0),
        ("validation", 3, 2.0),
    ]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.ranks
def test_a_run_resumed_at_its_end_replaces_its_evaluations_alone(path: Path) -> None:
    first = [("train", 1), ("evaluate", 1), ("train", 2), ("evaluate", 2), ("test", 2)]
    run_ranks(1, run_on_rank, path, first, 1.0)
    run_ranks(1, run_on_rank, path, [("evaluate", 2), ("test", 2)], 2.0)
    assert told(path) == [
        ("train", 1, 1.0),
        ("validation", 1, 1.0),
        ("train", 2, 1.0),
        ("validation", 2, 2.0),
        ("test", 2, 2.0),
    ]


@pytest.mark.ranks
def test_a_half_written_last_line_is_left_out_and_gone_after_a_resume(path: Path) -> None:
    run_ranks(1, run_on_rank, path, [("train", 1), ("train", 2)], 1.0)
    text = path.read_text()
    path.write_text(text + '{"kind": "train", "iteration": 3, "lo')
    assert told(path) == [("train", 1, 1.0), ("train", 2, 1.0)]
    run_ranks(1, run_on_rank, path, [("train", 3)], 2.0)
    assert told(path) == [("train", 1, 1.0), ("train", 2, 1.0), ("train", 3, 2.0)]
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.ranks
@pytest.mark.parametrize(("is_bound", "draws"), [(True, 2), (False, 1)])
def test_an_evaluation_knows_its_draws_and_whether_it_is_a_bound(
    path: Path, is_bound: bool, draws: int
) -> None:
    run_ranks(1, run_on_rank, path, [("evaluate", 1)], 1.0, is_bound, draws)
    (row,) = read_metrics(path)
    assert (row["draws"], row["samples"]) == (draws, 2 // draws)
    assert ("bound_bits_per_token" in row) == ("bound_bits_per_byte" in row) == is_bound


@pytest.mark.ranks
def test_a_step_with_nothing_supervised_is_warned_of(path: Path) -> None:
    runs = run_ranks(2, run_on_rank, path, [("train", 7)], 0.0, True, 1, 0)
    assert [len(run["warned"]) for run in runs] == [0, 1]
    assert "step 7: nothing at all was supervised" in runs[1]["warned"][0]


@pytest.mark.ranks
@pytest.mark.parametrize(("samples", "draws", "rows"), [(2, 1, 1), (3, 1, 0), (4, 2, 0)])
def test_an_evaluation_that_a_time_limit_cut_short_leaves_no_row(
    path: Path, samples: int, draws: int, rows: int
) -> None:
    """Two samples are read, of so many."""
    events = [("train", 1), ("evaluate", 1)]
    run_ranks(1, run_on_rank, path, events, 1.0, True, draws, 8, samples)
    assert [r["kind"] for r in read_metrics(path)] == ["train", "validation"][: 1 + rows]


@pytest.mark.ranks
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_null(path: Path, value: float) -> None:
    run_ranks(1, run_on_rank, path, [("train", 1)], value)
    (line,) = path.read_text(encoding="utf-8").splitlines()
    row = json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert row["loss"] is None


@pytest.mark.ranks
@pytest.mark.parametrize("line", ["garbage", "", "\0\0", "[1]", '{"kind": "train"}', '{"a": NaN'])
def test_lines_that_are_no_rows_do_not_end_a_run_and_are_kept_aside(
    path: Path, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path.parent.mkdir()
    old = '{"kind": "train", "iteration": 1, "loss": 7.0}\n' + line + "\n"
    path.write_text(old, encoding="utf-8")
    run_ranks(1, run_on_rank, path, [("train", 2)])
    assert told(path) == [("train", 1, 7.0), ("train", 2, 1.0)]
    assert path.with_suffix(".damaged").read_text(encoding="utf-8") == old
    assert "1 lines are no rows of metrics; left out" in capfd.readouterr().out
