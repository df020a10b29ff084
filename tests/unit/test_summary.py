"""The table that lays evaluations of runs side by side."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_bp.tools.summary import bounds, main


def evaluated(step: int, bound: float, error: float | None, unit: str = "byte") -> dict[str, Any]:
    row = {"kind": "validation", "iteration": step}
    for name in {"token", unit}:
        row |= {f"bound_bits_per_{name}": bound, f"bound_bits_per_{name}_error": error}
    return row


def test_every_step_once_by_its_last_row() -> None:
    rows = [evaluated(0, 8.0, 0.25), {"kind": "train", "iteration": 1}, evaluated(2, 5.0, None)]
    rows += [evaluated(2, 4.0, 0.125), {"kind": "validation", "iteration": 3, "loss": 1.0}]
    assert bounds("mine", rows, 9.0) == [
        ("mine, step 0", "8.000 +- 0.250 bits/byte"),
        ("mine, step 2", "4.000 +- 0.125 bits/byte"),
    ]


def test_bounds_of_tokens_alone_are_made_those_of_bytes() -> None:
    rows = [evaluated(1, 8.0, 2.0, "token")]
    assert bounds("mine", rows, 0.25) == [("mine, step 1", "2.000 +- 0.500 bits/byte")]


def test_a_run_without_a_bound_is_an_error() -> None:
    with pytest.raises(ValueError, match="mine has no validation bound"):
        bounds("mine", [{"kind": "validation", "iteration": 3, "loss": 1.0}], 1.0)


def test_several_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data.json").write_text(json.dumps({"tokens": 4, "bytes": 4}))
    for name, bound in (("a", 3.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        text = json.dumps(evaluated(7, bound, None)) + "\n"
        (tmp_path / name / "metrics.jsonl").write_text(text)
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    main([*runs, "--data", str(tmp_path / "data"), "--bounds"])
    told = (("a", "3.000"), ("b", "2.000"))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [[f"{run},", "step", "7", bound, "bits/byte"] for run, bound in told]
    with pytest.raises(SystemExit, match="2"):
        main([*runs, "--data", str(tmp_path / "data")])
