"""The batch scripts under a stand-in of Slurm, with a stand-in of torchrun that takes no time.

What a real run does under them is in tests/e2e/test_slurm.py.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_stand_in import HOSTS, Job, directives

ROOT = Path(__file__).resolve().parents[2]
# In place of python: notes its line and some variables, then starts "ranks" that end by a signal.
# Starts from the LONG-th on end at once. BAD is the code of the last rank of the second node.
LAUNCHER = r"""#!/usr/bin/env bash
echo "line: $*"
echo "set: ${SET_UP:-}, $CUDA_DEVICE_MAX_CONNECTIONS, $NCCL_NVLS_ENABLE, ${WRAPPED:-}"
if [ "${SLURM_RESTART_COUNT:-0}" -ge "${LONG:-1}" ]; then exit 0; fi
for rank in $(seq "$RANKS_PER_NODE"); do
  python3 -c '
import os, signal, sys, time
got = []
place = os.environ["SLURM_NODEID"] + "." + sys.argv[1]
if "BAD" in os.environ and place == "1.2":
    sys.exit(int(os.environ["BAD"]))
if "LATE" in os.environ:
    open(os.environ["SEEN"] + "/ready" + place, "w")
    time.sleep(1.5)
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
open(os.environ["SEEN"] + "/ready" + place, "w")
while not got:
    time.sleep(0.02)
time.sleep(0.7)
with open(os.environ["SEEN"] + "/stopped" + place, "w") as file:
    file.write(str(len(got)))
' "$rank" &
done
for _ in $(jobs -p); do
  if ! wait -n; then
    printf 'Root Cause (first observed failure):\n[0]:\n  time      : 2026-01-01_00:00:01\n'
    printf '  host      : h\n  rank      : 3 (local_rank: 1)\n  exitcode  : -9 (pid: 5)\n'
    exit 1
  fi
done
"""
Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a batch script of a copy of scripts/slurm, with edits (file, old text, new text)."""
    jobs: list[Job] = []

    def started(*edits: tuple[str, str, str], script: str = "many_nodes", **variables: str) -> Job:
        folder = tmp_path / "project" / "scripts" / "slurm"
        shutil.copytree(ROOT / "scripts" / "slurm", folder)
        (tmp_path / "project" / "pretrain_bdlm.py").touch()
        (tmp_path / "setup.sh").write_text("export SET_UP=yes$NOT_SET\n")
        (tmp_path / "python").write_text(LAUNCHER)
        (tmp_path / "python").chmod(0o755)
        (tmp_path / "seen").mkdir()
        for name, old, new in edits:
            text = (folder / name).read_text()
            assert text.count(old) == 1, f"{name} has no single {old!r}"
            (folder / name).write_text(text.replace(old, new))
        own = {"PYTHON": str(tmp_path / "python"), "SEEN": str(tmp_path / "seen")}
        own |= {"SETUP": str(tmp_path / "setup.sh")}
        arguments = ["run.yaml", "--save", "a b"]
        path = folder / f"{script}.sbatch"
        job = Job(path, arguments, tmp_path / "state", own | variables, gpus_per_node="2")
        jobs.append(job)
        return job

    yield started
    for job in jobs:
        job.clean_up()


def wait_for(job: Job, kind: str, nodes: int = 2, timeout: float = 10) -> None:
    """Until all "ranks" left their file."""
    wanted = {f"{kind}{node}.{rank}" for node in range(nodes) for rank in (1, 2)}
    seen, end = Path(job.variables["SEEN"]), time.monotonic() + timeout
    while not wanted <= {p.name for p in seen.iterdir()}:
        assert time.monotonic() < end, f"no {wanted}: {job.text()}"
        time.sleep(0.02)


def preempt(job: Job, nodes: int = 2, timeout: float = 10, **how: bool | str) -> None:
    """It is told to stop: every rank hears of it, the job is queued again, and then it ends."""
    wait_for(job, "ready", nodes, timeout)
    job.signal(**how)
    wait_for(job, "stopped", nodes, timeout)
    assert job.wait(20) == 0, job.text()
    assert job.codes == [0, 0], job.text()
    told = job.output.read_text()
    assert told.index("stopped and saved: queueing the job again") < told.index("job.sh: done")
    # A second signal could meet a Python that is ending, and kill it.
    counts = [int(p.read_text()) for p in Path(job.variables["SEEN"]).glob("stopped*")]
    assert max(counts) <= (2 if how.get("whole") else 1), counts


def node_log(job: Job, node: int, restart: int = 0) -> str:
    folder = job.script.parents[2] / "runs" / "slurm" / "4711"
    return (folder / f"start{restart}-{HOSTS[node]}.log").read_text()


def test_the_signal_reaches_every_rank_and_the_job_is_queued_again(start: Start) -> None:
    job = start(CONTAINER="env WRAPPED=yes", NCCL_NVLS_ENABLE="7")
    preempt(job)
    for node in (0, 1):
        assert "set: yes, 1, 7, yes\n" in node_log(job, node)
    for restart in (0, 1):
        meet_at_the_first_host(job, restart)


def meet_at_the_first_host(job: Job, restart: int) -> None:
    for node in (0, 1):
        assert launch_line(node, restart) in node_log(job, node, restart)


def launch_line(node: int, restart: int) -> str:
    return (
        f"line: -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d "
        f"--rdzv-id 4711-{restart} --rdzv-endpoint {HOSTS[0]}:24711 "
        f"--rdzv-conf is_host={str(node == 0).lower()},read_timeout=600 "
        f"--local-addr {HOSTS[node]} --max-restarts 0 "
        f"pretrain_bdlm.py run.yaml --save a b --exit-signal SIGUSR1\n"
    )


@pytest.mark.parametrize(
    "edit",
    [
        ("job.sh", "RDZV_HOST=${nodes%%$'\\n'*}", "RDZV_HOST=${nodes##*$'\\n'}"),
        ("job.sh", "RDZV_HOST=${nodes%%$'\\n'*}", "RDZV_HOST=$SLURM_JOB_NODELIST"),
        ("job.sh", "export RDZV_HOST", "RDZV_HOST"),
        ("node.sh", '= "$RDZV_HOST" ]', '!= "$RDZV_HOST" ]'),
        ("node.sh", '$RDZV_HOST:$RDZV_PORT"\n  --rdzv-conf', '$SLURMD_NODENAME:1"\n  --rdzv-conf'),
    ],
    ids=["last host", "all hosts", "not exported", "other host", "own host"],
)
def test_another_meeting_point_is_noticed(start: Start, edit: tuple[str, str, str]) -> None:
    job = start(edit, LONG="0")
    job.wait(20)
    with pytest.raises(AssertionError):
        meet_at_the_first_host(job, 0)


def test_one_node(start: Start) -> None:
    job = start(script="one_node")
    preempt(job, nodes=1)
    assert "--nnodes 1 " in node_log(job, 0)


@pytest.mark.parametrize("how", [{"name": "TERM"}, {"whole": True}], ids=["TERM", "whole"])
def test_other_ways_to_be_told(start: Start, how: dict[str, bool | str]) -> None:
    """SIGTERM of a preemption, and a Slurm that signals children of its tasks too."""
    preempt(start(), **how)


def test_ranks_that_are_still_starting_hear_of_it_later(start: Start) -> None:
    preempt(start(LATE="1"))


EDITS = [
    ("many_nodes.sbatch", "#SBATCH --signal=USR1@600", "#"),
    ("many_nodes.sbatch", "=USR1@600", "=B:USR1@600"),
    ("many_nodes.sbatch", "=USR1@600", "=USR2@600"),
    ("many_nodes.sbatch", "#SBATCH --requeue", "#"),
    ("many_nodes.sbatch", "#SBATCH --nodes=2", "#SBATCH --nodes=1"),
    ("job.sh", '--nodes="$SLURM_JOB_NUM_NODES"', "--nodes=1"),
    ("job.sh", 'scontrol requeue "$SLURM_JOB_ID"', ":"),
    ("node.sh", 'kill -USR1 "$rank"', 'kill -USR1 "$torchrun"'),
    ("node.sh", 'kill -USR1 "$rank"', 'kill -TERM "$rank"'),
    ("node.sh", "trap 'asked=1' USR1 TERM", "trap 'asked=1' TERM"),
    ("node.sh", '  : > "$STOP_MARK"', "  :"),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: f"{e[0]} {e[2]}".replace("/", ""))
def test_an_edit_that_breaks_preemption_is_noticed(
    start: Start, edit: tuple[str, str, str]
) -> None:
    job = start(edit)
    with pytest.raises(AssertionError):
        preempt(job, timeout=1.5)


@pytest.mark.parametrize(
    ("edit", "how", "variables"),
    [
        (("node.sh", "trap '' USR1", "trap - USR1"), {"whole": True}, {}),
        (("node.sh", "trap 'asked=1' USR1 TERM", "trap 'asked=1' USR1"), {"name": "TERM"}, {}),
        (("node.sh", " && (((0x${caught:-0} & 0x200) != 0))", ""), {}, {"LATE": "1"}),
        (("node.sh", 'told+="$rank "', ":"), {}, {}),
    ],
    ids=["whole", "TERM", "late", "twice"],
)
def test_so_is_one_that_breaks_other_ways(
    start: Start,
    edit: tuple[str, str, str],
    how: dict[str, bool | str],
    variables: dict[str, str],
) -> None:
    job = start(edit, **variables)
    with pytest.raises(AssertionError):
        preempt(job, timeout=4 if variables else 1.5, **how)


def test_a_rank_that_fails_ends_the_job_and_is_named_with_its_log(start: Start) -> None:
    job = start(BAD="9")
    begin = time.monotonic()
    assert job.wait(20) == 128 + 9, job.text()  # of the other node, which srun kills
    assert time.monotonic() - begin < 15
    assert job.codes == [137]  # not queued again
    log = f"rank 3, log runs/slurm/4711/start0-{HOSTS[1]}.log"
    told = job.output.read_text()
    assert f"job.sh: 2026-01-01_00:00:01: exit code -9, {log}\n" in told
    assert f"job.sh: the first to fail is {log}, which ends with\n" in told
    assert "line: -m torch.distributed.run" in job.output.read_text()  # the log's end


def test_the_first_of_several_failures_is_named_and_a_killed_rank_before_others(
    start: Start,
) -> None:
    """Both nodes name a failure in the same second: by its code the second node's is first."""
    cause = "Root Cause (first observed failure):\\n time : 2026-01-01_00:00:01\\n"
    told = f'printf "{cause} rank : 0 (x)\\n exitcode : 1 (x)\\n"; '
    job = start(("node.sh", "say() {", f"{told}say() {{"), BAD="9")
    assert job.wait(20) == 137, job.text()
    failures = [line for line in job.output.read_text().splitlines() if ": exit code" in line]
    assert [line.split("exit code ")[1].partition(", log")[0] for line in failures] == [
        "-9, rank 3",
        "1, rank 0",
        "1, rank 0",
    ]
    assert "the first to fail is rank 3, log" in job.output.read_text()


def test_a_job_is_not_queued_again_forever(start: Start) -> None:
    job = start(MAX_RESTARTS="0")
    wait_for(job, "ready")
    job.signal()
    assert job.wait(20) == 1
    assert job.codes == [1]
    assert "queued again 0 times, and MAX_RESTARTS=0" in job.output.read_text()


def test_without_arguments_it_says_so(start: Start) -> None:
    job = start(("many_nodes.sbatch", ' "$@"', ""))
    assert job.wait(20) == 2
    assert "job.sh: error: no arguments: give a config file" in job.output.read_text()


def test_shellcheck_has_nothing_to_say() -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("no shellcheck here")
    files = sorted(map(str, (ROOT / "scripts" / "slurm").iterdir()))
    done = subprocess.run(
        [program, "--external-sources", *files], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_both_scripts_ask_for_the_same_but_nodes() -> None:
    one, many = (
        directives(ROOT / "scripts" / "slurm" / f"{name}.sbatch")
        for name in ("one_node", "many_nodes")
    )
    assert one.pop("nodes") == "1"
    assert many.pop("nodes") == "2"
    assert one == many


def test_the_stand_in_keeps_to_the_nodes_and_codes_of_slurm(start: Start) -> None:
    """-N above the allocation is refused; tasks a node, numbers and the highest code are right."""
    told = (
        "'echo \"$SLURM_PROCID.$SLURM_LOCALID.$SLURM_NODEID of $SLURM_NNODES\"; exit $SLURM_PROCID'"
    )
    step = f"srun -N 2 --ntasks-per-node 2 bash -c {told} || code=$?; exit $code; srun"
    job = start(("job.sh", "\nsrun ", f"\n{step} "))
    assert job.wait(20) == 3, job.text()
    lines = sorted(line for line in job.output.read_text().splitlines() if " of 2" in line)
    assert lines == ["0.0.0 of 2", "1.1.0 of 2", "2.0.1 of 2", "3.1.1 of 2"]


def test_the_stand_in_refuses_more_nodes_than_there_are(start: Start) -> None:
    job = start(("job.sh", '--nodes="$SLURM_JOB_NUM_NODES"', "--nodes=3"))
    assert job.wait(20) == 1
    assert "Only allocated 2 nodes asked for 3" in job.output.read_text()
