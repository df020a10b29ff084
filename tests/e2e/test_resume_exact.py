"""A resumed run is the same run: every tensor of the checkpoint after 6 steps, to the bit."""

from pathlib import Path

import pytest
import torch
from entry import pretrain, tensors
from launch import make_data
from ranks import run_ranks

pytestmark = pytest.mark.ranks

FLAGS = """
    --block-parallel-size 2 --save-interval 3 --train-iters 6 --lr-decay-style cosine --min-lr 1e-3
    --lr-warmup-iters 1 --clip-grad 1.0 --weight-decay 0.1
"""


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_three_steps_and_three_more_are_six(tmp_path: Path, precision: list[str]) -> None:
    head = make_data(tmp_path)

    def run(name: str, *more: str) -> None:
        folder = ["--save", str(tmp_path / name), "--load", str(tmp_path / name)]
        arguments = [*head, *folder, *FLAGS.split(), *precision, *more]
        ends = run_ranks(2, pretrain, arguments, fresh=True)
        assert [code for code, _ in ends] == [0, 0]

    def saved(name: str, step: int) -> dict[str, torch.Tensor]:
        return run_ranks(1, tensors, str(tmp_path / name / f"iter_{step:07}"))[0]

    run("whole")
    run("resumed", "--exit-interval", "3")
    assert not (tmp_path / "resumed" / "iter_0000006").exists()
    run("resumed")
    whole, resumed, before = saved("whole", 6), saved("resumed", 6), saved("whole", 3)
    assert whole.keys() == resumed.keys()
    assert any(name.startswith("optimizer") for name in whole)
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    moved = [name for name in whole if not torch.equal(whole[name], before[name])]
    assert len(moved) > len(whole) / 2  # so that there was something to compare
