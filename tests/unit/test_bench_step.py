"""`bench step` and `bench exchange`: baselines against one another, bytes by hand, small runs."""

import argparse
import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.tools.bench import exchange_ways, plain_transformer, step, step_ranks
from megatron_bp.tools.bench.__main__ import main

ROOT = Path(__file__).parents[2]
SHAPE = "--hidden 24 --heads 4 --key-heads 2 --head-dim 8 --block 4 --layers 2 --repeats 1"


def options(**more: Any) -> argparse.Namespace:
    values = {"ranks": 4, "forms": None, "heads": 4, "key_heads": 2}
    return argparse.Namespace(**{**values, **more})


@pytest.mark.ranks
def test_the_autoregressive_baseline_is_a_plain_transformer() -> None:
    """Megatron's model with torch's causal attention, and the plain one, with the same weights."""
    import ranks

    losses, largest = ranks.run_ranks(1, both_models, fresh=True)[0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert largest < 1e-5


def both_models(rank: int, world: int) -> tuple[list[float], float]:
    torch.distributed.destroy_process_group()
    from megatron_bp.tools.bench import autoregressive
    from megatron_bp.tools.bench.model import build, one_process

    with one_process(1):
        theirs = build(2, 4, 8, 2, 24, mode=None)
        plain = plain_transformer.Transformer(2, 24, (4, 2, 8), 256)
        weights = dict(theirs.named_parameters())
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(weight_of(name, weights))
        tokens = torch.randint(0, 255, (18,))
        losses = [autoregressive.step(theirs, tokens), plain_transformer.step(plain, tokens)]
        positions = torch.arange(17)[None]
        theirs(tokens[None, :-1], positions, None, labels=tokens[None, 1:]).sum().backward()
        plain(tokens).backward()
        largest = 0.0
        grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
        for name, parameter in plain.named_parameters():
            wanted = weight_of(name, grads)
            error = (parameter.grad - wanted).abs().max() / wanted.abs().max()
            largest = max(largest, error.item())
        return losses, largest


def weight_of(name: str, theirs: dict[str, Any]) -> torch.Tensor:
    """Megatron's weight under the plain model's name; Q, K, V stand there by key head."""
    if name == "embedding.weight":
        return theirs["embedding.word_embeddings.weight"]
    if not name.startswith("layers."):
        kinds = {"norm.weight": "decoder.final_layernorm.weight"}
        return theirs[kinds.get(name, "output_layer.weight")]
    _, number, kind, _ = name.split(".")
    names = {
        "norm1": "input_layernorm",
        "norm2": "pre_mlp_layernorm",
        "qkv": "self_attention.linear_qkv",
        "out": "self_attention.linear_proj",
        "up": "mlp.linear_fc1",
        "down": "mlp.linear_fc2",
    }
    found = theirs[f"decoder.layers.{number}.{names[kind]}.weight"]
    if kind != "qkv":
        return found
    q, k, v = found.view(2, 4, 8, 24).split((2, 1, 1), dim=1)
    return torch.cat([part.reshape(-1, 24) for part in (q, k, v)])


@pytest.mark.ranks
def test_a_small_run_on_one_rank(tmp_path: Path) -> None:
    import ranks

    told, result = ranks.run_ranks(1, small, str(tmp_path / "told.json"), fresh=True)[0]
    (size,) = result["sizes"]
    ways = size["ways"]
    assert {name: way["rows"] for name, way in ways.items()} == {
        step.AR: 64,
        step.PLAIN: 64,
        step.OURS: 60 + 64,
    }
    assert ways[step.OURS]["pairs"] == 64 * 64
    assert ways[step.AR]["pairs"] == 64 * 65 // 2
    assert "block diffusion / (2 x autoregressive): time " in told


def small(rank: int, world: int, file: str) -> tuple[str, dict]:
    torch.distributed.destroy_process_group()  # the benchmark makes its own
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        main(f"step --length 64 {SHAPE} --kernel tiled --json {file}".split())
    return told.getvalue(), json.loads(Path(file).read_text())


def test_the_floor_is_twice_the_autoregressive_step() -> None:
    def way(seconds: float, peak: int, rows: int) -> dict:
        return {"cpu_seconds": [seconds], "peak_bytes": [peak], "rows": rows, "pairs": 100}

    ways = {step.AR: way(1.0, 10, 8), step.PLAIN: way(0.8, 10, 8), step.OURS: way(3.0, 30, 16)}
    result = {"heads": 1, "head_dim": 1, "layers": 1}
    line = step._lines(result, {"ways": ways, "weights": 1})[-1]
    assert "time 1.50x, memory 1.50x" in line
    assert line.endswith("time 1.25x")


def test_a_step_lasts_until_the_slowest_rank_is_done() -> None:
    """Two turns of two ranks: exposed is the mean over ranks, peak and seconds the most."""
    told = {
        "seconds": [[1.0, 2.0], [4.0, 1.0]],
        "cpu_seconds": [[1.0, 1.5], [1.0, 1.0]],
        "exposed_seconds": [[0.2, 0.6], [2.0, 0.0]],
        "peak_bytes": [[1e6, 3e6], [1e6, 3e6]],
        "bytes_sent": [[1e6, 2e6], [1e6, 2e6]],
        "rows": [10, 12],
        "pairs": [100, 300],
    }
    lines = step_ranks.size_lines({"forms": {"csbp:all_gather": told}})
    cells = [cell.strip() for cell in lines[-1].split("|")[1:-1]]
    assert cells[:3] == ["csbp:all_gather", "22", "1.500"]
    assert cells[3:5] == ["3.00 (2.00 to 4.00)", "1.00x"]
    assert cells[6] == "0.70 (0.40 to 1.00), 22%"
    assert cells[7:] == ["3.0", "3 (3 to 3)"]


def test_which_forms_ranks_can_have() -> None:
    names = [form.name for form in step_ranks.forms_of(options())]
    assert {"csbp:all_gather", "cp:a2a", "hybrid", "bp"} <= set(names)
    assert "hybrid" not in [form.name for form in step_ranks.forms_of(options(ranks=2))]
    for wrong, rule in [
        ({"forms": ["none"]}, "--forms none: there is none"),
        ({"forms": ["hybrid"], "ranks": 2}, "--forms hybrid: needs an even number"),
        ({"forms": ["cp:a2a"], "ranks": 3}, "a2a over 3 ranks with 4 query"),
    ]:
        with pytest.raises(ValueError, match=rule):
            step_ranks.forms_of(options(**wrong))
    with pytest.raises(ValueError, match="--forms none: there is none"):
        exchange_ways.chosen(["none"])


def run_benchmark(command: str, file: Path) -> Any:
    """In a process of its own, which forks the ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_bp.tools.bench", *command.split(), "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(file.read_text())


@pytest.mark.ranks
@pytest.mark.slow
def test_a_small_run_on_two_ranks(tmp_path: Path) -> None:
    """64 tokens, block 4, 2 ranks; a clean row's K|V are 2 x 2 x 8 x 4 = 128 B, in float32.

    2 layers of 3 passes with one other rank: 768 B a row, of the rank that sends most. CSBP: 15
    blocks are needed; cut in four parts of 4, of which rank 0 has the first and the last (28 rows)
    and rank 1 the others (32 rows): 32 x 768. CP: 124 rows, 62 a rank. BP sends nothing.
    """
    forms = "csbp:all_gather cp:all_gather bp"
    result = run_benchmark(
        f"step --ranks 2 --length 64 {SHAPE} --kernel tiled --forms {forms}", tmp_path / "told.json"
    )
    told = result["sizes"][0]["forms"]
    assert told["csbp:all_gather"]["bytes_sent"] == [[32 * 768] * 2]
    assert told["cp:all_gather"]["bytes_sent"] == [[62 * 768] * 2]
    assert told["bp"]["bytes_sent"] == [[0, 0]]
    assert all(min(exposed) > 0 for exposed in told["cp:all_gather"]["exposed_seconds"])
    assert told["bp"]["exposed_seconds"] == [[0, 0]]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_small_exchange(tmp_path: Path) -> None:
    """As above, without the model: one pass of 32 or 62 rows of 128 B; needed rows in all 28 + 28.

    Rank 0 has the last unit, which sees the 32 clean rows of rank 1; rank 1's last unit sees the
    first 16 rows of rank 0.
    """
    result = run_benchmark(
        "exchange --ranks 2 --length 64 --block 4 --head-dim 8 --repeats 1", tmp_path / "told.json"
    )
    found = result["sizes"][0]["passes"]
    sent = {name: told["bytes_sent"][0] for name, told in found["K/V"].items()}
    assert sent["csbp:all_gather"] == sent["plain all_gather, clean rows"] == [32 * 128] * 2
    assert sent["cp:all_gather"] == sent["plain all_gather, all rows"] == [62 * 128] * 2
    assert sent["csbp:needed_rows"] == [16 * 128, 32 * 128]
    assert sent["csbp:ring"] == [28 * 128, 32 * 128]
    back = {name: told["bytes_sent"][0] for name, told in found["gradients"].items()}
    assert back["csbp:needed_rows"] == [32 * 128, 16 * 128]


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        ("step --layers 0", "--layers 0: must be at least 1"),
        ("step --key-heads 3", "--key-heads 3: must divide"),
        ("step --length 32", "--length 32: must be at least two blocks"),
        ("step --forms bp", "--forms: needs several --ranks"),
        ("exchange --ranks 1", "--ranks 1: nothing is exchanged"),
        ("exchange --documents 3", "--documents 3: must divide"),
    ],
)
def test_what_cannot_be_measured(command: str, rule: str) -> None:
    with pytest.raises(SystemExit, match=f"error: {rule}"):
        main(command.split())
