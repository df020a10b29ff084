"""From an autoregressive checkpoint to block diffusion: rows of new ids, clean rows' logits."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conversion import FAULTS, MODEL, NEW, OLD, SHAPE, ar_head, convert_on_rank, weights_on_rank
from entry import pretrain, tensors
from launch import make_data
from ranks import run_ranks
from torch import Tensor

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
BP, CP = "--block-parallel-size", "--context-parallel-size"
SHARDED = "--use-distributed-optimizer"
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "24"]
KINDS = {"tied": [], "untied": [UNTIED], "experts": [*EXPERTS, "--moe-aux-loss-coeff", "0.01"]}
TABLES = {"tied": ["embedding.word_embeddings.weight"]}
TABLES["untied"] = [*TABLES["tied"], "output_layer.weight"]


class Runs:
    """An AR model of each of KINDS that was trained for 3 steps, on one or two TP ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.head = make_data(folder)

    def ar(self, tied: str, tp: int) -> Path:
        """Its checkpoint."""
        save = self.folder / f"ar {tied} {tp}"
        if not save.exists():
            flags = [TP, str(tp), "--train-iters", "3", "--save-interval", "3"]
            arguments = [*ar_head(self.head), "--save", str(save), *flags, *KINDS[tied]]
            ends = run_ranks(tp, pretrain, arguments, fresh=True, timeout=240)
            assert [code for code, _ in ends] == [0] * tp
        return save / "iter_0000003"

    def convert(
        self,
        start: Path,
        ranks: int,
        *flags: str,
        fault: str | None = None,
        into: str = "converted",
    ) -> list[dict[str, Any]]:
        """What each rank says of a run of one step at learning rate 0."""
        save = self.folder / into
        shutil.rmtree(save, ignore_errors=True)
        arguments = [*self.head, *MODEL.split(), "--pretrained-checkpoint", str(start.parent)]
        arguments += ["--save", str(save), "--train-iters", "1", "--save-interval", "1"]
        arguments += ["--lr", "0", *KINDS[start.parent.name.split()[1]], *flags]
        return run_ranks(ranks, convert_on_rank, arguments, fault, fresh=True, timeout=240)

    def weights(self, path: Path) -> dict[str, Tensor]:
        return run_ranks(1, weights_on_rank, str(path))[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("conversion"))


def plain_causal(weights: dict[str, Tensor], tokens: Tensor, tied: bool) -> Tensor:
    """Logits [T, V] of the checkpoint's true ids, from definitions, in float64."""
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    shape = replace(SHAPE, tied=tied)
    return oracle.gpt(weights, shape, tokens, torch.arange(len(tokens)), causal)[:, :OLD]


@pytest.mark.parametrize(
    ("ranks", "flags", "tied"),
    [
        (1, [], "tied"),
        (2, [BP, "2"], "tied"),
        (2, [BP, "2", CP, "1"], "tied"),
        (2, [CP, "2"], "untied"),
        (2, [TP, "2"], "untied"),
        (2, [TP, "2", "--sequence-parallel"], "tied"),
        (2, [PP, "2"], "tied"),
        (2, [PP, "2"], "untied"),
        (4, [TP, "2", BP, "2", "--sequence-parallel"], "untied"),
        (4, [PP, "2", BP, "2"], "tied"),
        (2, [PP, "2", "--num-layers-per-virtual-pipeline-stage", "1"], "tied"),
        (2, [SHARDED, "--overlap-grad-reduce", "--overlap-param-gather"], "tied"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else str(value),
)
def test_clean_rows_are_those_of_the_plain_causal_model(
    runs: Runs, ranks: int, flags: list[str], tied: str
) -> None:
    """Case 9, on every layout; the check sees the same, so it lets the run begin."""
    start = runs.ar(tied, 1)
    ends = runs.convert(start, ranks, *flags)
    assert [end["code"] for end in ends] == [0] * ranks, ends[0]["error"]
    truth = plain_causal(runs.weights(start), ends[0]["tokens"], tied == "tied")
    covered = set()
    for end in ends:
        if "logits" in end:
            expected = truth[end["positions"]]
            torch.testing.assert_close(end["logits"], expected, rtol=1e-4, atol=2e-5)
            covered |= set(end["positions"].tolist())
    assert covered == set(range(len(truth)))


def test_experts_too(runs: Runs) -> None:
    ends = runs.convert(runs.ar("experts", 1), 2, BP, "2", "--expert-model-parallel-size", "2")
    assert [end["code"] for end in ends] == [0, 0], ends[0]["error"]
    assert all("logits" in end for end in ends)


@pytest.mark.parametrize(
    ("before", "ranks", "flags", "tied"),
    [
        (1, 1, [], "tied"),
        (1, 2, [TP, "2"], "untied"),
        (1, 2, [TP, "2", SHARDED, "--bf16"], "tied"),
        (2, 1, ["--bf16"], "untied"),
        (2, 2, [BP, "2", SHARDED], "tied"),
        (1, 2, [PP, "2", SHARDED, "--bf16"], "tied"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else str(value),
)
def test_added_ids_get_the_mean_and_others_keep_their_bits(
    runs: Runs, before: int, ranks: int, flags: list[str], tied: str
) -> None:
    """After a step at learning rate 0: what the optimizer holds went into the model again."""
    start = runs.ar(tied, before)
    ends = runs.convert(start, ranks, *flags)
    assert [end["code"] for end in ends] == [0] * ranks, ends[0]["error"]
    check_growth(runs, start, tied, "--bf16" in flags)


def check_growth(runs: Runs, start: Path, tied: str, low: bool) -> None:
    old = runs.weights(start)
    path = runs.folder / "converted" / "iter_0000001"
    new, everything = runs.weights(path), run_ranks(1, tensors, str(path))[0]
    for name in TABLES[tied]:
        assert len(old[name]) > OLD  # so that there is padding to be confused with
        kept = old[name][:OLD]
        kept = kept.bfloat16() if low else kept
        assert torch.equal(new[name][:OLD], kept)
        mean = kept.double().mean(0)
        for row in new[name][OLD:NEW]:
            torch.testing.assert_close(row.double(), mean, rtol=8e-3 if low else 1e-6, atol=1e-7)
        assert not new[name][NEW:].any()
        main = [n for n in everything if n.startswith("optimizer") and n.endswith(f"param.{name}")]
        if low:
            assert main
        for copy in main:
            stored = everything[copy].flatten()[: new[name].numel()].view_as(new[name])
            assert torch.equal(stored.to(new[name].dtype), new[name])
    unchanged = [n for n in old if n not in TABLES["untied"]]
    assert all(torch.equal(new[n], old[n].to(new[n].dtype)) for n in unchanged)


def test_random_rows_differ_from_each_other(runs: Runs) -> None:
    start = runs.ar("tied", 1)
    ends = runs.convert(start, 2, PP, "2", "--added-embeddings", "random")
    assert [end["code"] for end in ends] == [0, 0], ends[0]["error"]
    table = runs.weights(runs.folder / "converted" / "iter_0000001")[TABLES["tied"][0]]
    assert len(torch.unique(table[OLD:NEW], dim=0)) == NEW - OLD
    assert table[OLD:NEW].std() == pytest.approx(0.15, rel=0.1)
    assert torch.equal(table[:OLD], runs.weights(start)[TABLES["tied"][0]][:OLD])


@pytest.mark.parametrize("fault", ["nothing grows", "main params stay"])
def test_a_fault_of_growth_is_noticed(runs: Runs, fault: str) -> None:
    start = runs.ar("untied", 2)
    runs.convert(start, 1, "--bf16", fault=fault)
    with pytest.raises(AssertionError):
        check_growth(runs, start, "untied", low=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_the_run_before_it_trains(runs: Runs, fault: str) -> None:
    start = runs.ar("untied", 1)
    ends = runs.convert(start, 2, BP, "2", fault=fault)
    assert [end["code"] for end in ends] == [2, 2]
    assert "the conversion does not hold" in ends[0]["error"]
    assert "Likely causes: rotary" in ends[0]["error"]
    assert not (runs.folder / "converted" / "metrics.jsonl").exists()


def test_a_flag_set_otherwise_is_named_and_the_check_can_be_left_out(runs: Runs) -> None:
    start = runs.ar("tied", 1)
    (end,) = runs.convert(start, 1, "--rotary-base", "500")
    assert end["code"] == 2
    assert "set otherwise than in the checkpoint: --rotary-base was 10000, is 500" in end["error"]
    off = ["--rotary-base", "500", "--check-conversion", "off"]
    (end,) = runs.convert(start, 1, *off)
    assert end["code"] == 0
    assert "logits" not in end


def test_a_converted_run_goes_on_without_another_check(runs: Runs) -> None:
    start = runs.ar("tied", 1)
    more = ["--load", str(runs.folder / "converted")]
    (end,) = runs.convert(start, 1, *more)
    assert end["code"] == 0
    assert "logits" in end
    arguments = [*runs.head, *MODEL.split(), "--pretrained-checkpoint", str(start.parent), *more]
    arguments += ["--save", str(runs.folder / "converted"), "--train-iters", "2", "--lr", "0"]
    arguments += ["--save-interval", "1", "--override-opt-param-scheduler"]
    (again,) = run_ranks(1, convert_on_rank, arguments, fresh=True)
    assert again["code"] == 0, again["error"]
    assert "logits" not in again
    table = TABLES["tied"][0]
    steps = [
        runs.weights(runs.folder / "converted" / f"iter_000000{step}")[table] for step in (1, 2)
    ]
    assert torch.equal(*steps)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--vocab-size", "120", "--null-tokenizer-eod-id", "2", "--mask-token-id", "1"],
            "has 121 ids and the tokenizer 120: ids cannot be taken away",
        ),
        (["--pretrained-vocabulary", "122"], "says that it has 121 true ids"),
        (["--num-layers", "1"], "holds the weights of another model: --num-layers was 4, is 1"),
        ([UNTIED], "holds the weights of another model"),
    ],
)
def test_refusals(runs: Runs, flags: list[str], words: str) -> None:
    (end,) = runs.convert(runs.ar("tied", 1), 1, *flags)
    assert end["code"] == 2
    assert words in end["error"]
