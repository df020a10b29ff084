"""The SFT quickstart at a small size: functions as chats, bounds before and after some steps."""

from pathlib import Path

import pytest
from entry import pretrain
from ranks import run_ranks

from megatron_bp.tools import function_pairs, sft_summary
from megatron_bp.tools.prepare.command import main as prepare
from megatron_bp.training.record import read_metrics

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
SMALL = """
    --num-layers 1 --hidden-size 32 --ffn-hidden-size 64 --seq-length 128 --lr 1e-2 --min-lr 1e-3
    --lr-warmup-iters 1
"""


def test_a_model_of_text_learns_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for i in range(60):
        (tree / f"{i:02}.py").write_text(
            f"def number_{i}():\n    'Gives {i}.'\n    total = {i}\n    return total\n"
        )
    text, chats, run = (str(tmp_path / name) for name in ("text", "chats", "run"))
    prepare(["--input", str(tree), "--output-prefix", text])
    function_pairs.main(["--input", str(tree), "--output", f"{chats}.jsonl", "--max-bytes", "120"])
    template = str(ROOT / "configs" / "templates" / "plain.jinja")
    how = ["--format", "chats", "--chat-template", template]
    prepare([*how, "--input", f"{chats}.jsonl", "--output-prefix", chats])

    def start(config: str, *flags: str) -> None:
        arguments = [str(ROOT / "configs" / config), *SMALL.split(), *flags]
        ends = run_ranks(2, pretrain, arguments, fresh=True)
        assert [code for code, _ in ends] == [0, 0], ends

    base = ["--save", str(tmp_path / "base"), "--train-iters", "4", "--eval-iters", "0"]
    start("quickstart.yaml", "--data-path", text, *base)
    sft = ["--data-path", chats, "--pretrained-checkpoint", str(tmp_path / "base")]
    sft += ["--eval-iters", "1", "--split", "80,20,0"]
    Path(run).mkdir()
    start("sft_quickstart.yaml", *sft, "--skip-train", "--metrics-file", f"{run}/before.jsonl")
    start(
        "sft_quickstart.yaml", *sft, "--train-iters", "12", "--eval-interval", "12", "--save", run
    )

    steps = [r for r in read_metrics(Path(run) / "metrics.jsonl") if r["kind"] == "train"]
    assert len(steps) == 12
    assert all(0 < r["diffusion_count"] < r["clean_tokens"] < r["rows"] for r in steps)
    # Corrupted rows are the answers' tokens alone; clean ones at most all.
    assert all(r["rows"] <= r["clean_tokens"] + r["diffusion_count"] for r in steps)
    capsys.readouterr()
    sft_summary.main([run])  # fails unless the bound fell
    told = capsys.readouterr().out
    assert told.count("bits/byte") == told.count("bits/token") == 2
    assert f"{sum(r['diffusion_count'] for r in steps):,}" in told
