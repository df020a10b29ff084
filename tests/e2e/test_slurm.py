"""A real job under the batch scripts and a stand-in of Slurm: 2 "nodes" x 2 gloo ranks on loopback.

The scripts' own logic, with altered scripts, is tested in test_slurm_scripts.py, without training.
"""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import losses, make_data, saved_step
from slurm_ranks import Forks
from slurm_stand_in import Job

from megatron_bp.training.saving import complete_steps

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
# In place of python. The second start's preflight is one in name, which spares 6 starts of torch.
PYTHON = """#!/bin/sh
case "$SLURM_RESTART_COUNT $*" in
  1*--preflight*) exec "{python}" -IS "{tests}/slurm_torchrun.py" "$@" ;;
  *) exec "{python}" "$@" ;;
esac
"""
SLOW, SECONDS, DEAD = 2, 33, "3:4"  # the step with the signal; the rank and step of a second start


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """many_nodes.sbatch with torchrun, pretrain_bdlm.py and a config of small size."""
    project = tmp_path / "project"
    shutil.copytree(ROOT / "scripts" / "slurm", project / "scripts" / "slurm")
    (project / "pretrain_bdlm.py").touch()
    (tmp_path / "seen").mkdir()
    forks = Forks(tmp_path)
    python = tmp_path / "python"
    python.write_text(PYTHON.format(python=sys.executable, tests=ROOT / "tests"))
    python.chmod(0o755)
    variables = {"PYTHON": str(python), "PROGRAM": str(ROOT / "tests" / "slurm_ranks.py")}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore", "FORKS": forks.path}
    variables |= {"SEEN": str(tmp_path / "seen"), "SLOW_STEP": f"{SLOW}:{SECONDS}", "DIE": DEAD}
    variables["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
    save = str(tmp_path / "run")
    arguments = [*make_data(tmp_path), "--save", save, "--load", save]
    arguments += ["--train-iters", "6", "--save-interval", "1000"]
    arguments += ["--block-parallel-size", "2", "--tensor-model-parallel-size", "2"]
    script = project / "scripts" / "slurm" / "many_nodes.sbatch"
    started = Job(script, arguments, tmp_path / "state", variables, project, gpus_per_node="2")
    yield started
    started.clean_up()
    forks.close()


def notes(job: Job, kind: str, start: int) -> list[dict[str, Any]]:
    """What the ranks of a step noted, by rank."""
    found = Path(job.variables["SEEN"]).glob(f"{kind}*_of_start{start}.json")
    return sorted((json.loads(path.read_text()) for path in found), key=lambda note: note["rank"])


def wait_for(job: Job, *names: str) -> None:
    folder, end = Path(job.variables["SEEN"]), time.monotonic() + 180
    while not all((folder / name).exists() for name in names):
        assert job.process.poll() is None, f"ended early: {job.text()}"
        assert time.monotonic() < end, f"no {names}: {job.text()}"
        time.sleep(0.1)


def test_a_job_is_preempted_goes_on_and_loses_a_rank(job: Job, tmp_path: Path) -> None:
    """The signal comes in a step that is longer than the 30 s after which torchrun kills ranks."""
    save = tmp_path / "run"
    wait_for(job, *(f"slow{rank}" for rank in range(4)))
    job.signal()
    assert job.process.wait(120) == 0, job.text()
    assert saved_step(save) == SLOW, job.text()
    assert sorted(losses(save)) == list(range(1, SLOW + 1))

    # The second start goes on with the step after, until a rank dies.
    assert job.wait(240) != 0, job.text()
    dead = tmp_path / "seen" / "dead"
    assert dead.exists(), job.text()
    died = dead.stat().st_mtime
    assert time.time() - died < 60
    assert len(job.codes) == 2  # and is not queued again
    events = [json.loads(line) for line in (save / "journal.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["kind"] == "began"] == [1, SLOW + 1]
    assert complete_steps(save) == [SLOW]
    assert sorted(losses(save)) == list(range(1, 4))

    for kind, start in (("preflight", 0), ("rank", 0), ("rank", 1)):
        told = notes(job, kind, start)
        assert [(n["rank"], n["world"]) for n in told] == [(rank, 4) for rank in range(4)]
        got = [(n["SLURMD_NODENAME"], n["SLURM_NODEID"], n["LOCAL_RANK"]) for n in told]
        assert sorted(got) == [(job.hosts[n], str(n), str(i)) for n in (0, 1) for i in (0, 1)]
        assert {n["MASTER_ADDR"] for n in told} <= set(job.hosts[:2])
    printed = job.output.read_text()
    real = "preflight: all 10 checks passed; nothing was trained"
    assert printed.count(real) == 1
    assert printed.count("preflight: all 10 checks passed") == 2
    (note,) = [n for n in notes(job, "rank", 1) if n["rank"] == 3]
    log = f"rank 3, log runs/slurm/{job.id}/start1-{note['SLURMD_NODENAME']}.log"
    assert f"exit code -9, {log}" in printed, job.text()
    assert f"the first to fail is {log}, which ends with" in printed, job.text()
