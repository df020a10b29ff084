"""Two kills of kills.py, which see: ranks killed at random moments, each run going on exactly."""

import json
from pathlib import Path

import kills
import pytest


@pytest.mark.ranks
@pytest.mark.slow
def test_killed_runs_go_on_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "kills.json"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = kills.main(["--kills", "2", "--seed", "5", "--json", str(report)])
    assert code == 0, capsys.readouterr().out[-6000:]
    found = json.loads(report.read_text())["kills"]
    assert len(found) == 2
    assert sum(kill["saving"] is not None for kill in found) >= 1
