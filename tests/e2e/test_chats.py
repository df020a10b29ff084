"""Runs on chats: what they print, that a resumed one is the same run, and their evaluation."""

import json
import sys
from pathlib import Path

import pytest
import torch
from chat_files import chat, write_chats
from entry import ROOT, pretrain, tensors
from launch import CONFIG
from ranks import run_ranks

from megatron_bp.training.record import read_metrics

pytestmark = pytest.mark.ranks

FLAGS = """
    --chats --overlong-chats truncate --answer-fill eos --block-parallel-size 1 --save-interval 3
    --train-iters 6 --seq-length 48 --eval-iters 1 --eval-interval 3 --lr-warmup-iters 1
"""


def make_chats(folder: Path) -> list[str]:
    """Sums, of unlike length; one is longer than a row. The head of a command line."""
    chats = []
    for i in range(40):
        words = " and ".join(str(n) for n in range(i % 4 + 1))
        chats.append(chat(f"{words}? ", f"{sum(range(i % 4 + 1))}." * (1 + i % 3)))
    chats[7] = chat("?" * 20, "!" * 40)
    sizes = [sum(mask) for _, mask in chats]
    prefix = write_chats(folder / "chats", chats, sizes)
    (folder / "run.yaml").write_text(CONFIG)
    return [str(folder / "run.yaml"), "--data-path", prefix]


def evaluate(rank: int, world: int, arguments: list[str]) -> None:
    """One rank of `torchrun -m megatron_bp.tools.evaluate ARGUMENTS`."""
    sys.path.insert(0, str(ROOT))
    from megatron_bp.tools.evaluate import main

    main(arguments)


def test_three_steps_on_chats_and_three_more_are_six(tmp_path: Path) -> None:
    """On two data-parallel ranks, and on one the losses are the same: so are the rows of a step."""
    head = make_chats(tmp_path)

    def run(name: str, *more: str, ranks: int = 2) -> None:
        folder = ["--save", str(tmp_path / name), "--load", str(tmp_path / name)]
        ends = run_ranks(ranks, pretrain, [*head, *FLAGS.split(), *folder, *more], fresh=True)
        assert [code for code, _ in ends] == [0] * ranks, ends

    def saved(name: str) -> dict[str, torch.Tensor]:
        return run_ranks(1, tensors, str(tmp_path / name / "iter_0000006"))[0]

    run("whole")
    run("resumed", "--exit-interval", "3")
    run("resumed")
    whole, resumed = saved("whole"), saved("resumed")
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    run("alone", ranks=1)
    rows = [read_metrics(tmp_path / n / "metrics.jsonl") for n in ("whole", "resumed", "alone")]
    assert [row["kind"] for row in rows[0]].count("train") == 6
    for name in ("kind", "iteration", "diffusion_count", "clean_tokens"):
        whole_values, *others = [[row.get(name) for row in of_run] for of_run in rows]
        assert others == [whole_values] * 2, name
    losses, resumed_losses, alone = [[row["loss"] for row in of_run] for of_run in rows]
    assert resumed_losses == losses
    assert alone == pytest.approx(losses, rel=1e-5)

    arguments = [str(tmp_path / "whole"), "--data", head[-1], "--json", str(tmp_path / "row")]
    run_ranks(1, evaluate, arguments, fresh=True)
    told, trained = json.loads((tmp_path / "row").read_text()), rows[0][-1]
    for name in ("loss", "diffusion_count", "bound_bits_per_byte"):
        assert told[name] == pytest.approx(trained[name], rel=1e-6), name
