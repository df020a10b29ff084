"""A run with experts: saved at one layout and gone on from at another, it stays the same run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from entry import pretrain, tensors
from launch import make_data
from ranks import run_ranks

from megatron_bp.training.record import read_metrics

pytestmark = pytest.mark.ranks

FLAGS = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-layer-freq [0,1]
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-shared-expert-intermediate-size 16 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001
    --save-interval 2 --train-iters 6 --clip-grad 1.0
"""
TWO = ("--block-parallel-size", "2", "--expert-model-parallel-size", "2")


def test_saved_at_one_layout_and_gone_on_from_at_another(tmp_path: Path) -> None:
    head = make_data(tmp_path)

    def run(name: str, ranks: int, *more: str) -> None:
        folder = ["--save", str(tmp_path / name), "--load", str(tmp_path / name)]
        ends = run_ranks(ranks, pretrain, [*head, *folder, *FLAGS.split(), *more], fresh=True)
        assert [code for code, _ in ends] == [0] * ranks, ends

    def rows(name: str) -> list[dict[str, Any]]:
        found = [r for r in read_metrics(tmp_path / name / "metrics.jsonl") if r["kind"] == "train"]
        assert [r["iteration"] for r in found] == [1, 2, 3, 4, 5, 6]
        return found

    run("one", 1)
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    for later in (4, 6):
        shutil.rmtree(tmp_path / "moved" / f"iter_{later:07}")
    (tmp_path / "moved" / "latest_checkpointed_iteration.txt").write_text("2")
    run("moved", 2, *TWO, "--exit-interval", "4")
    run("moved", 1)
    for got, want in zip(rows("moved"), rows("one"), strict=True):
        for key in ("loss", "grad_norm", "moe_aux_loss", "moe_z_loss"):
            assert got[key] == pytest.approx(want[key], rel=1e-5), (want["iteration"], key)
    last = [
        run_ranks(1, tensors, str(tmp_path / name / "iter_0000006"))[0] for name in ("one", "moved")
    ]
    assert last[0].keys() == last[1].keys()
    assert any("expert_bias" in name for name in last[0])
    for name, value in last[0].items():
        torch.testing.assert_close(value, last[1][name], rtol=1e-3, atol=1e-5, msg=name)
