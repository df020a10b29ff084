"""Two kills of kills.py, which see: ranks killed at random moments, each run going on exactly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.ranks
@pytest.mark.slow
def test_killed_runs_go_on_exactly(tmp_path: Path) -> None:
    program, report = Path(__file__).with_name("kills.py"), tmp_path / "kills.json"
    command = [sys.executable, str(program), "--kills", "2", "--seed", "5", "--json", str(report)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    kills = json.loads(report.read_text())["kills"]
    assert len(kills) == 2
    assert sum(kill["saving"] is not None for kill in kills) >= 1
