"""Self-conditioning in real runs: resumed to the bit, and begun from a checkpoint without it."""

from pathlib import Path

import pytest
import torch
from entry import pretrain, tensors
from launch import losses, make_data
from ranks import run_ranks

pytestmark = pytest.mark.ranks

MODULE = [f"self_conditioning.{name}.weight" for name in ("norm", "gate", "up", "down")]
CONDITIONED = ["--self-conditioning", "0.6", "--self-conditioning-width", "12"]
LAYOUTS = {
    "overlap": "--block-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather",
    "sequence parallel, bf16": "--tensor-model-parallel-size 2 --sequence-parallel --bf16",
}


def run(head: list[str], flags: str, save: Path, *more: str) -> list[tuple[int, str]]:
    usual = ["--save", str(save), "--save-interval", "3"]
    return run_ranks(2, pretrain, [*head, *usual, *flags.split(), *more], fresh=True)


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    (found,) = run_ranks(1, tensors, str(folder / f"iter_{step:07}"))
    return found


def weights(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [n for n in found if n.removeprefix("model.").startswith("self_conditioning")]
    return {n.removeprefix("model."): found[n] for n in names}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_and_three_more_are_six(tmp_path: Path, layout: str) -> None:
    head, flags = make_data(tmp_path), LAYOUTS[layout]
    steps = [*CONDITIONED, "--train-iters", "6"]
    for name, more in (("whole", []), ("resumed", ["--exit-interval", "3"]), ("resumed", [])):
        ends = run(head, flags, tmp_path / name, "--load", str(tmp_path / name), *steps, *more)
        assert [code for code, _ in ends] == [0, 0]
    whole, resumed = saved(tmp_path / "whole", 6), saved(tmp_path / "resumed", 6)
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    assert sorted(weights(whole)) == sorted(MODULE)
    before = weights(saved(tmp_path / "whole", 3))
    for name, value in weights(whole).items():
        assert not torch.equal(value, before[name]), f"{name} never moved"


def test_a_new_run_from_a_checkpoint_without_the_module(tmp_path: Path) -> None:
    head, flags = make_data(tmp_path), LAYOUTS["overlap"]
    plain, new = tmp_path / "plain", tmp_path / "new"
    steps = ["--train-iters", "3"]
    assert [code for code, _ in run(head, flags, plain, *steps)] == [0, 0]
    goes_on = run(head, flags, plain, "--load", str(plain), *CONDITIONED, "--train-iters", "6")
    assert [code for code, _ in goes_on] == [2, 2]
    assert "was trained without self-conditioning" in goes_on[0][1]
    for name, start in (
        ("same", ["--load", str(plain), "--finetune"]),
        ("new", ["--load", str(plain), "--finetune", *CONDITIONED]),
        ("pretrained", ["--pretrained-checkpoint", str(plain), *CONDITIONED]),
    ):
        ends = run(head, flags, tmp_path / name, *start, *steps)
        assert [code for code, _ in ends] == [0, 0]
    # The module begins as zero, and from the second step on it is part of the model.
    same, first = losses(tmp_path / "same"), losses(new)
    assert first == losses(tmp_path / "pretrained")
    assert first[1] == same[1]
    assert first[3] != same[3]
    assert sorted(weights(saved(new, 3))) == sorted(MODULE)
    narrow = ["--self-conditioning", "0.6", "--self-conditioning-width", "7"]
    other = run(head, flags, tmp_path / "x", "--load", str(new), "--finetune", *narrow, *steps)
    assert [code for code, _ in other] == [2, 2]
    assert "has 12 hidden units; give that width" in other[0][1]
