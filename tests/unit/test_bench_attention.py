"""`bench attention`: pairs and masks by hand, baselines against definitions, and a small run."""

import json
from pathlib import Path

import pytest
import torch

from megatron_bp.tools.bench import attention, plain
from megatron_bp.tools.bench import attention_ways as ways
from megatron_bp.tools.bench.__main__ import main
from megatron_bp.tools.bench.machine import Cost
from megatron_bp.tools.bench.turns import Way, ratio, spread, take_turns

HEADS = (4, 2, 8)


def problem(length: int = 24, documents: int = 2, block: int = 4) -> ways.Problem:
    return ways.make_problem(length, documents, block, HEADS, torch.empty(0, dtype=torch.float64))


def test_pairs_by_hand() -> None:
    """Two documents of 12, blocks of 4. The last block's clean rows are seen by nobody.

    Clean: 4 x 4 + 4 x 8 = 48. Corrupted: 4 x (4 + 8 + 12) = 96. Twice 144. Causal: 2 x 12 x 13.
    """
    small = problem()
    assert small.visible.pairs() == 288
    assert small.causal_pairs == 312
    assert small.flop(288, backward=False) == 4 * 8 * 4 * 288
    assert small.flop(288, backward=True) == 14 * 8 * 4 * 288


@pytest.mark.parametrize(("length", "documents", "block"), [(24, 2, 4), (30, 3, 4), (16, 1, 16)])
def test_the_mask_is_the_rule(length: int, documents: int, block: int) -> None:
    """Of the rows that are computed, which leaves out clean ones that nobody sees."""
    small = problem(length, documents, block)
    corrupted = length + torch.arange(length)
    rows = torch.cat([torch.from_numpy(small.rows.clean).long(), corrupted])
    rule = plain.rule(length, documents, block)(0, 0, rows[:, None], rows[None])
    assert torch.equal(ways.dense_mask(small.visible, small.rows, length, "cpu"), rule)


@pytest.mark.parametrize("kernel", ["tiled", "sdpa"])
def test_ours_computes_what_the_dense_mask_does(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same inputs: output and gradients of q, k and v."""
    small = problem()
    tensors = small.tensors(small.rows.num_rows)
    first = [x.detach().transpose(0, 1)[None].clone() for x in tensors]
    heads_first = [x.requires_grad_() for x in first[:3]] + first[3:]
    monkeypatch.setattr(ways.Problem, "tensors", lambda self, rows: tensors)
    monkeypatch.setattr(ways.Problem, "heads_first", lambda self, rows: heads_first)
    ours, dense = ways.ours(small, kernel), ways.dense(small)
    torch.testing.assert_close(ours(False), dense(False)[0].transpose(0, 1))
    for mine, theirs in zip(ours(True), dense(True), strict=True):
        torch.testing.assert_close(mine, theirs[0].transpose(0, 1))


def test_the_limit_computes_causal_attention() -> None:
    small = problem()
    outs = ways.limit(small)(False)
    assert len(outs) == 4
    assert all(out.shape == (1, 4, 12, 8) for out in outs)
    assert len(ways.limit(small)(True)) == 12


def test_turns_go_back_and_forth_and_some_take_part_in_fewer() -> None:
    order: list[str] = []
    found = take_turns(
        [
            Way("a", lambda: order.append("a"), warm=True),
            Way("b", lambda: order.append("b"), turns=1),
            Way("c", lambda: order.append("c")),
        ],
        3,
    )
    assert "".join(order) == "a" + "abc" + "ca" + "ac"
    assert {name: len(told["seconds"]) for name, told in found.items()} == {"a": 3, "b": 1, "c": 3}
    assert set(found["a"]) == set(Cost._fields)


def test_ratios_are_medians_over_turns_of_ratios_inside_a_turn() -> None:
    assert ratio([1.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == 2.0
    assert ratio([2.0], [1.0, 10.0]) == 2.0
    assert ratio([None, 4.0], [1.0, 2.0]) == 2.0
    assert ratio([], [1.0]) is None
    assert spread([3e6, 1e6, 2e6], 1e6, 0) == "2 (1 to 3)"
    assert spread([None]) == "-"


def told(seconds: list[float], pairs: int, peak: int) -> dict:
    return {"cpu_seconds": seconds, "seconds": seconds, "peak_bytes": [peak], "pairs": [pairs]}


def test_causal_time_is_scaled_to_the_pairs_of_the_layout() -> None:
    """100 pairs against 80 in the same time: the same pairs would take 1.25 times as long."""
    found = {
        "causal": told([1.0, 1.0], 80, 1),
        "dense mask": told([5.0, 5.0], 100, 1),
        "tiled": told([2.5, 2.5], 100, 1),
    }
    size = {"length": 8, "pairs": 100, "passes": {"forward": found}}
    bigger = {**size, "length": 32, "passes": {"forward": {"tiled": told([1.0], 100, 4)}}}
    result = {"machine": "m", "device": "cpu", "heads": HEADS, "block": 4, "documents": 1}
    result |= {"dtype": "float32", "threads": 1, "notes": [], "sizes": [size, bigger]}
    lines = attention.lines(result)
    (causal,) = [line for line in lines if line.startswith("| causal")]
    assert "| 1.250 (1.250 to 1.250) |" in causal
    (tiled, _) = [line for line in lines if line.startswith("| tiled")]
    assert "| 2.00x | 2.00x | - |" in tiled
    assert "| forward | tiled | 8 to 32 | 4.00x |" in lines


def test_a_small_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # it would be compiled, for a minute
    file = tmp_path / "told.json"
    command = "attention --length 64 128 --block 8 --documents 2 --heads 2 --key-heads 1 "
    main(f"{command} --head-dim 16 --repeats 2 --skip-dense 64 --json {file}".split())
    out = capsys.readouterr().out
    assert "128 tokens: dense mask left out, as --skip-dense says" in out
    assert "FlexAttention left out: TORCHDYNAMO_DISABLE is set" in out
    result = json.loads(file.read_text())
    small, big = result["sizes"]
    assert small["pairs"] == 2 * 32 * 32
    both = small["passes"]["forward and backward"]
    names = ["causal", "plain causal", "dense mask", "plain dense mask", "tiled", "sdpa"]
    assert list(both) == names
    assert "dense mask" not in big["passes"]["forward"]
    assert all(len(way["cpu_seconds"]) == 2 for way in both.values())


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ("--documents 3 --length 64", "--documents 3: must divide"),
        ("--key-heads 3", "--key-heads 3: must divide"),
        ("--repeats 0", "--repeats 0: "),
        ("--kernels none --length 64", "none: no such kernel"),
        ("--kernels flash --length 64", "flash: it needs a CUDA device"),
        ("--forward-only --backward-only", "nothing is left"),
    ],
)
def test_what_cannot_be_measured(wrong: str, rule: str) -> None:
    with pytest.raises(SystemExit, match=f"bench attention: error: .*{rule}"):
        main(["attention", *wrong.split()])
