"""A real run whose loss is NaN: stopped with step, rank and documents named, or skipped."""

import gc
import json
from pathlib import Path

import pytest
import torch
from entry import pretrain
from launch import make_data
from ranks import RankError, run_ranks

from megatron_bp.training.record import read_metrics

pytestmark = pytest.mark.ranks

FLAGS = ["--train-iters", "3", "--save-interval", "100"]


def poison(rank: int, step: int) -> None:
    """Before step 2, one weight of rank 0 becomes NaN."""
    from megatron.core.models.gpt import GPTModel

    if (rank, step) == (0, 2):
        (model,) = (thing for thing in gc.get_objects() if isinstance(thing, GPTModel))
        with torch.no_grad():
            next(model.parameters())[0, 0] = torch.nan


def test_it_stops_and_says_where(tmp_path: Path) -> None:
    save = tmp_path / "run"
    arguments = [*make_data(tmp_path), "--save", str(save), *FLAGS]
    with pytest.raises(RankError, match="step 2, rank 0: the loss is nan on documents with keys"):
        run_ranks(1, pretrain, arguments, poison, fresh=True)
    report = json.loads((save / "nonfinite-step2-rank0.json").read_text())
    assert (report["step"], report["rank"], report["training"]) == (2, 0, True)
    assert sum(len(document["tokens"]) for document in report["documents"]) == 24
    assert [row["iteration"] for row in read_metrics(save / "metrics.jsonl")] == [1]


def test_it_skips_by_flag_on_all_ranks(tmp_path: Path) -> None:
    save = tmp_path / "run"
    skip = ["--on-nonfinite", "skip", "--block-parallel-size", "2"]
    arguments = [*make_data(tmp_path), "--save", str(save), *FLAGS, *skip]
    ends = run_ranks(2, pretrain, arguments, poison, fresh=True)
    assert [code for code, _ in ends] == [0, 0]
    rows = read_metrics(save / "metrics.jsonl")
    assert [(row["iteration"], row["skipped"]) for row in rows] == [(1, 0), (2, 1), (3, 1)]
    assert [row["loss"] is None for row in rows] == [False, True, True]
