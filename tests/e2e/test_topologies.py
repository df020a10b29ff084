"""Runs with TP, SP, PP and the distributed optimizer, and checkpoints that change topology."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from entry import pretrain
from launch import ASYNC, make_data
from ranks import RankError, run_ranks

from megatron_bp.training.record import read_metrics

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# 300 ids: padded to 384 on one TP rank, to 512 on two.
FLAGS = """
    --vocab-size 300 --num-layers 4 --save-interval 3 --train-iters 6 --lr-decay-style cosine
    --min-lr 1e-3 --lr-warmup-iters 1 --weight-decay 0.1 --eval-iters 1 --eval-interval 3
"""
TP = ["--tensor-model-parallel-size", "2"]
PP = ["--pipeline-model-parallel-size", "2"]
SHARDED = ["--use-distributed-optimizer"]


def bp(degree: int) -> list[str]:
    return ["--block-parallel-size", str(degree)]


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.head = [*make_data(folder), *FLAGS.split()]

    def run(self, name: str, ranks: int, *flags: str, load: str | None = None) -> list[Any]:
        """The rows of a run into the folder `name`, from the checkpoints of `load` if given."""
        save, start = self.folder / name, self.folder / (load or name)
        more = ["--save", str(save), "--load", str(start), *flags]
        ends = run_ranks(ranks, pretrain, [*self.head, *more], fresh=True, timeout=240)
        assert [code for code, _ in ends] == [0] * ranks
        return read_metrics(save / "metrics.jsonl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("topologies"))


def same_run(rows: list[Any], others: list[Any], steps: tuple[int, ...]) -> None:
    """The same loss, gradient norm and counts at each step, and in the evaluations."""
    for step in steps:
        for kind in ("train", "validation"):
            found = [
                [r for r in run if r["kind"] == kind and r["iteration"] == step][:1]
                for run in (rows, others)
            ]
            if kind == "validation" and not found[1]:
                continue
            ((row,), (other,)) = found
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-5), (kind, step)
            for name in ("clean_tokens", "diffusion_count", "scored"):
                assert row[name] == other[name], (kind, step, name)
            if kind == "train":
                assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4), step


@pytest.fixture(scope="module")
def saved(runs: Runs) -> list[Any]:
    """TP 2 with SP x BP 2: six steps, checkpoints at 3 and 6."""
    return runs.run("tp2-bp2", 4, *TP, "--sequence-parallel", *bp(2))


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(1, []), (4, bp(4)), (2, PP), (2, ["--recompute-granularity", "selective", *TP])],
    ids=["single", "bp4", "pp2", "tp2"],
)
def test_a_checkpoint_of_tp2_bp2_goes_on_anywhere(
    runs: Runs, saved: list[Any], ranks: int, flags: list[str]
) -> None:
    name = f"from-{ranks}-{'-'.join(flags)}"
    rows = runs.run(name, ranks, *flags, "--ckpt-step", "3", load="tp2-bp2")
    assert [r["iteration"] for r in rows if r["kind"] == "train"] == [4, 5, 6]
    same_run(rows, saved, (4, 5, 6))


def test_the_distributed_optimizer_changes_topology_too(runs: Runs) -> None:
    """Interleaved PP 2 x BP 2, saved asynchronously; then TP 2; and not without the optimizer."""
    chunks = ["--num-virtual-stages-per-pipeline-rank", "2"]
    first = runs.run("pp2-bp2", 4, *PP, *chunks, *bp(2), *SHARDED, *ASYNC)
    for name, ranks, flags in (("to-tp2", 2, TP), ("to-dp2", 2, ["--overlap-grad-reduce"])):
        rows = runs.run(name, ranks, *flags, *SHARDED, "--ckpt-step", "3", load="pp2-bp2")
        same_run(rows, first, (4, 5, 6))
    load = ["--load", str(runs.folder / "pp2-bp2")]
    ((code, told),) = run_ranks(1, pretrain, [*runs.head, *load], fresh=True)
    assert code == 2
    assert "was saved with --use-distributed-optimizer" in told


def test_an_evaluation_of_a_checkpoint_of_any_topology(
    runs: Runs, saved: list[Any], tmp_path: Path
) -> None:
    """On as many ranks as it trained on, and on fewer, which then share a sequence."""
    want = saved[-1]
    data = runs.head[runs.head.index("--data-path") + 1]
    for ranks in (2, 4):
        file = tmp_path / f"{ranks}.json"
        arguments = [str(runs.folder / "tp2-bp2"), "--data", data, "--json", str(file)]
        run_ranks(ranks, evaluate, arguments, fresh=True)
        row = json.loads(file.read_text())
        assert row["diffusion_count"] == want["diffusion_count"]
        assert row["loss"] == pytest.approx(want["loss"], rel=1e-6)


def evaluate(rank: int, world: int, arguments: list[str]) -> None:
    from megatron_bp.tools.evaluate import main

    main(arguments)


# --- a loss that is no number, on the last stage alone -------------------------------------------


def poison(rank: int, step: int) -> None:
    """The loss of step 2 is NaN; only the last stage has one."""
    from megatron_bp.model import output

    if not hasattr(output, "honest"):
        output.honest = output.weighted_cross_entropy
    honest = output.honest

    def nan(*args: Any, **kwargs: Any) -> Any:
        total, each = honest(*args, **kwargs)
        return total * float("nan"), each

    output.weighted_cross_entropy = nan if step == 2 else honest


def test_the_last_stages_loss_stops_all_stages_and_is_named(runs: Runs) -> None:
    flags = [*runs.head, *PP, "--save", str(runs.folder / "nan")]
    with pytest.raises(RankError) as caught:
        run_ranks(2, pretrain, flags, poison, fresh=True)
    told = str(caught.value)
    assert "NonFiniteLossError: step 2, rank 1: the loss is nan on documents with keys" in told
    assert (runs.folder / "nan" / "nonfinite-step2-rank1.json").exists()
    assert not (runs.folder / "nan" / "nonfinite-step2-rank0.json").exists()


@pytest.mark.parametrize("flags", [PP, [*TP, "--sequence-parallel", *SHARDED]], ids=["pp", "tp"])
def test_skipping_is_agreed_on_by_all_ranks(runs: Runs, flags: list[str]) -> None:
    name = f"skip-{flags[0]}"
    arguments = [*runs.head, *flags, "--on-nonfinite", "skip", "--save", str(runs.folder / name)]
    ends = run_ranks(2, pretrain, [*arguments, "--eval-iters", "0"], poison, fresh=True)
    assert [code for code, _ in ends] == [0, 0]
    train = [r for r in read_metrics(runs.folder / name / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["skipped"] for r in train] == [0, 1, 0, 0, 0, 0]
    assert all(math.isfinite(r["loss"]) for r in train if r["iteration"] > 2)
