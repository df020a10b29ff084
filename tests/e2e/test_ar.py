"""Mode "ar": Megatron's own model and loss on packed documents, against the oracle."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conversion import OLD, SHAPE, ar_head, ar_on_rank, weights_on_rank
from entry import pretrain, tensors
from launch import make_data
from ranks import run_ranks

from megatron_bp.training.record import read_metrics

pytestmark = pytest.mark.ranks

STEP = ["--train-iters", "1", "--save-interval", "1", "--lr", "0"]
PADDED = OLD + 1  # rows of the table: Megatron's loss has padding in its softmax


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ar_head(make_data(tmp_path_factory.mktemp("ar")))


@pytest.fixture(scope="module")
def start(head: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose weights are Megatron's first ones, and the row of its one step."""
    save = tmp_path_factory.mktemp("ar start") / "run"
    (end,) = run_ranks(1, ar_on_rank, [*head, *STEP, "--save", str(save)], fresh=True)
    assert end["code"] == 0, end["error"]
    torch.save(end["rows"], save / "rows.pt")
    return save


def oracle_loss(start: Path, rows: list[Any], padded: int = PADDED) -> tuple[float, int]:
    """Sum and count over rows of (tokens, document, supervised); rows of more padding are zero."""
    weights = run_ranks(1, weights_on_rank, str(start / "iter_0000001"))[0]
    table = weights["embedding.word_embeddings.weight"]
    zeros = table.new_zeros(padded - len(table), table.shape[1])
    weights["embedding.word_embeddings.weight"] = torch.cat([table, zeros])
    total, count = 0.0, 0
    for tokens, document, supervised in rows:
        loss, number = oracle.next_token(
            weights,
            replace(SHAPE, tied=True),
            tokens.tolist(),
            document.tolist(),
            vocab=padded,
            supervised=supervised.tolist(),
        )
        total, count = total + loss.item(), count + number
    return total, count


def test_the_loss_is_the_oracles(start: Path) -> None:
    rows = torch.load(start / "rows.pt", weights_only=False)
    assert max(int(document.max()) for _, document, _ in rows) > 0  # some rows are packed
    total, count = oracle_loss(start, rows)
    (row,) = [r for r in read_metrics(start / "metrics.jsonl") if r["kind"] == "train"]
    assert row["ar_count"] == row["scored"] == count
    assert row["ar_loss_sum"] == pytest.approx(total, rel=1e-6)
    assert row["clean_tokens"] == sum(len(tokens) for tokens, _, _ in rows)
    # Each document loses its first token, and so does no other.
    starts = sum(len(np.unique(document[document >= 0])) for _, document, _ in rows)
    assert row["ar_count"] == row["clean_tokens"] - starts


def test_a_document_does_not_see_the_one_before(start: Path) -> None:
    """The oracle's loss with documents run together is another: the comparison could fail."""
    rows = torch.load(start / "rows.pt", weights_only=False)
    apart, _ = oracle_loss(start, rows)
    together, _ = oracle_loss(start, [(t, np.zeros_like(d), s) for t, d, s in rows])
    assert abs(together - apart) > 1e-3 * apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, []),
        (1, ["--micro-batch-size", "2"]),
        (2, ["--tensor-model-parallel-size", "2"]),
        (2, ["--pipeline-model-parallel-size", "2"]),
        (4, ["--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"]),
    ],
    ids=["dp", "two rows a micro-batch", "tp", "pp", "pp, dp, distributed optimizer"],
)
def test_layouts_train_the_same_model(
    head: list[str], start: Path, tmp_path: Path, ranks: int, flags: list[str]
) -> None:
    """Three steps and an evaluation from one checkpoint; padded to another multiple under TP."""
    steps = ["--train-iters", "3", "--lr", "1e-2", "--eval-interval", "3", "--eval-iters", "1"]

    def run(name: str, ranks: int, more: list[str]) -> list[dict[str, Any]]:
        folders = ["--finetune", "--load", str(start), "--metrics-file", str(tmp_path / name)]
        arguments = [*head, *steps, *folders, "--make-vocab-size-divisible-by", "122", *more]
        ends = run_ranks(ranks, ar_on_rank, arguments, fresh=True, timeout=240)
        assert [end["code"] for end in ends] == [0] * ranks, ends[0]["error"]
        read.append(ends[0]["rows"])
        return read_metrics(tmp_path / name)

    read: list[Any] = []
    alone = run("alone", 1, [])
    other = run("other", ranks, flags)
    names = ["ar_count", "clean_tokens", "kind", "iteration"]
    assert [[r[n] for n in names] for r in other] == [[r[n] for n in names] for r in alone]
    if "--tensor-model-parallel-size" in flags:
        # One TP rank pads to 122 rows; two to 244, of which the added ones are loaded as zeros.
        for rows, padded in ((alone, 122), (other, 244)):
            total, _ = oracle_loss(start, read[0][:2], padded)
            assert rows[0]["ar_loss_sum"] == pytest.approx(total, rel=1e-6)
    else:
        for row, truth in zip(other, alone, strict=True):
            assert row["ar_loss_sum"] == pytest.approx(truth["ar_loss_sum"], rel=2e-5)


def test_three_steps_and_three_more_are_six(head: list[str], tmp_path: Path) -> None:
    def run(name: str, *more: str) -> None:
        folder = ["--save", str(tmp_path / name), "--load", str(tmp_path / name)]
        steps = ["--save-interval", "3", "--train-iters", "6", "--weight-decay", "0.1"]
        ends = run_ranks(1, pretrain, [*head, *folder, *steps, *more], fresh=True)
        assert [code for code, _ in ends] == [0]

    run("whole")
    run("resumed", "--exit-interval", "3")
    run("resumed")
    step = "iter_0000006"
    whole, resumed = (
        run_ranks(1, tensors, str(tmp_path / n / step))[0] for n in ("whole", "resumed")
    )
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
