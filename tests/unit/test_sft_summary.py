"""The table of a fine-tuning run."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_bp.tools.sft_summary import main

BOUND: dict[str, Any] = {
    "kind": "validation",
    "iteration": 0,
    "samples": 10,
    "draws": 1,
    "diffusion_count": 500,
    "bound_bits_per_byte": 3.0,
    "bound_bits_per_byte_error": 0.1,
    "bound_bits_per_token": 2.75,
    "bound_bits_per_token_error": None,
}
STEP = {"kind": "train", "clean_tokens": 1000, "diffusion_count": 400, "rows": 1350}


def write(folder: Path, **after: Any) -> str:
    steps = [STEP | {"iteration": i} for i in (1, 2)]
    last = BOUND | {"iteration": 2, "bound_bits_per_byte": 2.0} | after
    (folder / "before.jsonl").write_text(json.dumps(BOUND) + "\n")
    rows = [*steps, BOUND | {"iteration": 1}, last]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(folder)


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([write(tmp_path)])
    told = dict(line.strip().rsplit("  ", 1) for line in capsys.readouterr().out.splitlines())
    told = {name.strip(): value.strip() for name, value in told.items()}
    name = "bound on held-out answers"
    assert told[f"{name}, before, 10 rows x 1 draws"] == "3.000 +- 0.100 bits/byte"
    assert told[f"{name}, step 2, 10 rows x 1 draws"] == "2.000 +- 0.100 bits/byte"
    assert told[f"{name}, before, end marks too"] == "2.750 bits/token"
    assert told["tokens trained on, prompts and answers"] == "2,000"
    assert told["of these in answers, supervised"] == "800 (40.0%)"
    assert told["rows computed"] == "2,700"
    assert told["of these corrupted, answers alone"] == "800"
    assert told["corrupted rows if prompts had them too"] == "2,000"


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ({"bound_bits_per_byte": 3.0}, "the model did not learn"),
        ({"bound_bits_per_byte": float("nan")}, "the model did not learn"),
        ({"samples": 9}, "not of the same rows"),
        ({"diffusion_count": 501}, "not of the same rows"),
    ],
)
def test_it_fails(tmp_path: Path, after: dict[str, Any], reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        main([write(tmp_path, **after)])


def test_without_an_evaluation_or_a_step(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(BOUND) + "\n")
    with pytest.raises(SystemExit, match="no training step"):
        main([folder])
    (tmp_path / "before.jsonl").write_text("")
    with pytest.raises(SystemExit, match=r"before.jsonl has no validation bound"):
        main([folder])
