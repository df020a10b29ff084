"""Real runs under the batch scripts and a stand-in of Slurm: 2 "nodes" x 2 gloo ranks on loopback.

The scripts' own logic is tested in test_slurm_scripts.py, without training.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import losses, make_data, saved_step
from slurm_stand_in import HOSTS, Job

from megatron_bp.training.saving import complete_steps

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
STEPS, SLOW = 6, 3  # steps in all, and the one in which the signal comes
Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts many_nodes.sbatch of a copy of scripts/slurm, with edits (file, old text, new)."""
    jobs: list[Job] = []

    def started(*edits: tuple[str, str, str], **variables: str) -> Job:
        project = tmp_path / "project"
        shutil.copytree(ROOT / "scripts" / "slurm", project / "scripts" / "slurm")
        (project / "pretrain_bdlm.py").touch()
        (tmp_path / "seen").mkdir()
        for name, old, new in edits:
            path = project / "scripts" / "slurm" / name
            assert path.read_text().count(old) == 1, f"{name} has no single {old!r}"
            path.write_text(path.read_text().replace(old, new))
        own = {"PYTHON": sys.executable, "PROGRAM": str(ROOT / "tests" / "slurm_program.py")}
        own |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        own |= {"SEEN": str(tmp_path / "seen"), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        save = str(tmp_path / "run")
        arguments = [*make_data(tmp_path), "--save", save, "--load", save]
        arguments += ["--train-iters", str(STEPS), "--save-interval", "1000"]
        arguments += ["--block-parallel-size", "2", "--tensor-model-parallel-size", "2"]
        script = project / "scripts" / "slurm" / "many_nodes.sbatch"
        job = Job(script, arguments, tmp_path / "state", own | variables, gpus_per_node="2")
        jobs.append(job)
        return job

    yield started
    for job in jobs:
        job.clean_up()


def seen(job: Job, start: int) -> list[dict[str, Any]]:
    """What the ranks of a start noted, by rank."""
    found = [
        json.loads(path.read_text())
        for path in Path(job.variables["SEEN"]).glob(f"rank*_of_start{start}.json")
    ]
    return sorted(found, key=lambda note: note["rank"])


def signalled_in_a_step(job: Job, save: Path, patience: float = 120) -> None:
    """All that must hold of a run that is preempted in step SLOW: on 4 ranks, no step is lost."""
    folder, end = Path(job.variables["SEEN"]), time.monotonic() + patience
    while len(list(folder.glob("slow*"))) < 4:
        assert job.process.poll() is None, f"ended early: {job.text()}"
        assert time.monotonic() < end, f"step {SLOW} is not reached: {job.text()}"
        time.sleep(0.05)
    job.signal()
    assert job.process.wait(120) == 0, job.text()
    assert saved_step(save) == SLOW, job.text()
    assert sorted(losses(save)) == list(range(1, SLOW + 1))
    assert job.wait(180) == 0, job.text()
    assert job.codes == [0, 0]
    for start in (0, 1):
        notes = seen(job, start)
        assert [(n["rank"], n["world"]) for n in notes] == [(rank, 4) for rank in range(4)]
        places = [(HOSTS[node], str(node), str(local)) for node in (0, 1) for local in (0, 1)]
        got = [(n["SLURMD_NODENAME"], n["SLURM_NODEID"], n["LOCAL_RANK"]) for n in notes]
        assert sorted(got) == places
        assert {n["endpoint"].partition(":")[0] for n in notes} == {HOSTS[0]}
        assert {n["MASTER_ADDR"] for n in notes} <= set(HOSTS[:2])
    assert complete_steps(save) == [SLOW, STEPS]
    assert sorted(losses(save)) == list(range(1, STEPS + 1))
    events = [json.loads(line) for line in (save / "journal.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["kind"] == "began"] == [1, SLOW + 1]


def test_a_signal_in_a_step_longer_than_torchruns_patience_loses_no_step(
    start: Start, tmp_path: Path
) -> None:
    """torchrun kills ranks 30 s after a SIGTERM."""
    signalled_in_a_step(start(SLOW=f"{SLOW}:33"), tmp_path / "run")


@pytest.mark.parametrize(
    "edit",
    [
        ("job.sh", "RDZV_HOST=${nodes%%$'\\n'*}", "RDZV_HOST=localhost"),
        ("many_nodes.sbatch", "#SBATCH --signal=USR1@600", "#"),
        ("many_nodes.sbatch", "#SBATCH --nodes=2", "#SBATCH --nodes=1"),
        ("node.sh", '--nnodes "$SLURM_NNODES"', "--nnodes 1"),
        ("job.sh", " --exit-signal SIGUSR1", ""),
    ],
    ids=["localhost", "no-signal", "one-node", "one-nnode", "no-exit-signal"],
)
def test_an_altered_script_fails(start: Start, tmp_path: Path, edit: tuple[str, str, str]) -> None:
    job = start(edit, SLOW=f"{SLOW}:2")
    patience = 30 if "localhost" in edit[2] else 120  # no node hosts the meeting: all wait
    with pytest.raises(AssertionError):
        signalled_in_a_step(job, tmp_path / "run", patience)


def test_a_dead_rank_ends_the_job_within_a_minute_with_its_name_and_log(start: Start) -> None:
    job = start(DIE="3:2", SLOW="2:1")
    folder = Path(job.variables["SEEN"])
    end = time.monotonic() + 120
    while not (folder / "slow3").exists():
        assert time.monotonic() < end, job.text()
        time.sleep(0.05)
    begin = time.monotonic()
    assert job.wait(60) != 0, job.text()
    assert time.monotonic() - begin < 60
    assert len(job.codes) == 1  # not queued again
    (note,) = [n for n in seen(job, 0) if n["rank"] == 3]
    log = f"rank 3, log runs/slurm/4711/start0-{note['SLURMD_NODENAME']}.log"
    assert f"the first to fail is {log}" in job.output.read_text()
