"""A small Slurm on one machine: `sbatch` as a class, `srun` and `scontrol` as programs.

Nodes are addresses 127.x.y.z with processes of their own; they and the number are of one job alone.
What scripts/slurm/ uses is done as Slurm does it; an option that is not known here is an error:

- A node has 8 GPUs and 16 CPUs. With `--exclusive` a job has all of them, and `SLURM_GPUS_ON_NODE`
  says so; what was asked for is in `SLURM_GPUS_PER_NODE`.
- `#SBATCH` lines end at the first command; the command line of sbatch wins over them. What runs is
  a copy of the batch script, in the folder of sbatch or of `--chdir`.
- A step's tasks get the step's environment (`--export`), their node's name and numbers, and an
  output file of each node. srun ends with the highest code of its tasks; with
  `--kill-on-bad-exit` the first bad one ends all of the step. What `--cpus-per-task` and
  `--cpu-bind` are is not done, but told to the tasks in SLURM_CPUS_PER_TASK and SLURM_CPU_BIND.
- srun takes `--ntasks` from the SLURM_NTASKS that `--ntasks-per-node` of sbatch made, and more of
  them than its own `--nodes` and `--ntasks-per-node` say win over these, as before Slurm 23.02.5.
- `--signal=[B:]NAME@SECONDS` reaches only what Slurm started itself: the tasks of a step and not
  their children, as proctrack/cgroup has it; with `B:` the batch shell alone. It is sent once, and
  nobody gets it if no step is there. `scancel` sends SIGTERM to tasks and to the batch shell.
- `scontrol requeue` takes effect when the batch script ends, and only with `--requeue`; it brings
  back a job that is being cancelled, too.
"""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

# `show hostnames LIST` and `requeue JOB`.
SCONTROL = """
case "$1 $2" in
  "show hostnames") echo "$3" | tr , '\\n' ;;
  "requeue $SLURM_JOB_ID")
    if [ "$STAND_IN_REQUEUE" != 1 ]; then
      echo "Requested operation is presently disabled for job"
      exit 1
    fi
    : > "$STAND_IN/requeue" ;;
  *)
    echo "scontrol: error: the stand-in does not know $*"
    exit 1 ;;
esac
"""
JOB, STEP = "STAND_IN_JOB", "STAND_IN_STEP"  # in the environment of all that each starts


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [p for child in path.read_text().split() for p in tree(int(child))]
    return found


def directives(script: Path) -> dict[str, str]:
    """The options of a batch script."""
    found: dict[str, str] = {}
    for line in script.read_text().splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH --"):
            name, _, value = line.removeprefix("#SBATCH --").strip().partition("=")
            found[name] = value
    return found


def free_number() -> int:
    """A job's number whose port, as job.sh makes it, nobody listens at."""
    while True:
        number = int.from_bytes(os.urandom(3), "big")
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", 20000 + number % 10000))
            return number


class Job:
    """A batch script as `sbatch` runs it, queued again as often as it asks for."""

    KNOWN = ("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "mem", "time")
    KNOWN += ("signal", "requeue", "open-mode", "export", "chdir")

    def __init__(
        self,
        script: Path,
        arguments: list[str],
        state: Path,
        variables: dict[str, str],
        folder: Path,
        **over: str,
    ) -> None:
        """Submits it.

        Args:
            script: the batch script.
            arguments: its own.
            state: a new folder for what Slurm keeps.
            variables: of the environment that sbatch is called in.
            folder: that sbatch is called in.
            over: options of sbatch, with underscores.
        """
        self.options = directives(script) | {k.replace("_", "-"): v for k, v in over.items()}
        unknown = set(self.options) - set(self.KNOWN)
        assert not unknown, f"the stand-in does not know #SBATCH {unknown}"
        self.script, self.arguments, self.state = script, arguments, state
        self.variables, self.restarts, self.codes = variables, 0, list[int]()
        self.folder = folder / self.options.get("chdir", ".")
        self.id = str(free_number())
        first, second = (1 + byte % 250 for byte in os.urandom(2))
        self.hosts = [f"127.{first}.{second}.{i}" for i in (11, 12, 13)]
        self.output = state / "batch.log"
        (state / "bin").mkdir(parents=True)
        start = f'exec "{sys.executable}" -IS "{__file__}" "$@"'
        for name, text in (("srun", start), ("scontrol", SCONTROL)):
            (state / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (state / "bin" / name).chmod(0o755)
        shutil.copy(script, state / "slurm_script")
        self._start()

    def _of_slurm(self) -> dict[str, str]:
        """What the batch shell is told of the job."""
        nodes, gpus = int(self.options["nodes"]), self.options["gpus-per-node"]
        told = {"JOB_ID": self.id, "JOB_NODELIST": ",".join(self.hosts[:nodes]), "NODEID": "0"}
        told |= {"JOB_NUM_NODES": str(nodes), "NNODES": str(nodes), "GPUS_PER_NODE": gpus}
        counts = [int(part.rpartition(":")[2]) for part in gpus.split(",")]
        whole = "exclusive" in self.options
        told |= {"GPUS_ON_NODE": str(8 if whole else sum(counts))}
        told |= {"CPUS_ON_NODE": "16" if whole else "2"}
        if "ntasks-per-node" in self.options:
            each = self.options["ntasks-per-node"]
            told |= {"NTASKS_PER_NODE": each, "NTASKS": str(nodes * int(each))}
        if self.restarts:
            told |= {"RESTART_COUNT": str(self.restarts)}
        return {f"SLURM_{name}": value for name, value in told.items()}

    def _start(self) -> None:
        shutil.rmtree(self.state / "tasks", ignore_errors=True)
        (self.state / "tasks").mkdir()
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PMI"))}
        clean |= {"PATH": f"{self.state / 'bin'}:{clean['PATH']}", "STAND_IN": str(self.state)}
        clean |= {**self._of_slurm(), "SLURMD_NODENAME": self.hosts[0]}
        self._mark = clean[JOB] = os.urandom(16).hex()
        clean["STAND_IN_REQUEUE"] = str(int("requeue" in self.options))
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                ["bash", str(self.state / "slurm_script"), *self.arguments],
                env=clean | self.variables,
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, name: str | None = None, whole: bool = False) -> None:
        """What Slurm sends when the time of `--signal` has come.

        Args:
            name: another signal, such as TERM.
            whole: children of tasks get it too, as proctrack/linuxproc has it.
        """
        step = self.state / "signal"
        asked = name or (step.read_text() if step.exists() else self.options.get("signal"))
        if not asked:
            return
        batch, text = asked.startswith("B:"), asked.removeprefix("B:").partition("@")[0]
        sent = signal.Signals[f"SIG{text}"]
        if batch:
            self.process.send_signal(sent)
            return
        tasks = [int(p.name) for p in (self.state / "tasks").iterdir()]
        for pid in [p for task in tasks for p in tree(task)] if whole else tasks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)

    def cancel(self) -> None:
        """scancel, and what Slurm does at the time limit: SIGTERM to all that it started."""
        self.signal("TERM")
        self.process.terminate()

    def wait(self, timeout: float) -> int:
        """The exit code of the last start."""
        end = time.monotonic() + timeout
        while True:
            code = self.process.wait(max(end - time.monotonic(), 0.1))
            self.codes.append(code)
            again = self.state / "requeue"
            if not again.exists():
                return code
            again.unlink()
            self.restarts += 1
            self._start()

    def text(self) -> str:
        """What the batch script and all nodes printed."""
        logs = sorted(self.folder.glob("runs/slurm/*/*.log"))
        return "\n".join(f"--- {p}\n{p.read_text()[-6000:]}" for p in [self.output, *logs])

    def clean_up(self) -> None:
        """Ends what is left of it."""
        kill_all(JOB, self._mark)
        self.process.wait(30)


def kill_all(name: str, value: str) -> None:
    """SIGKILL to every process that has this variable in its environment."""
    needle = f"{name}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes().split(b"\0")
            if needle in environment:
                os.kill(int(folder.name), signal.SIGKILL)


def placed(nodes: int, per_node: int | None, tasks: int | None) -> list[int]:
    """The node of each task of a step."""
    if tasks is None:
        tasks = nodes * (per_node or 1)
    nodes = min(nodes, tasks)
    if per_node and tasks > nodes * per_node:
        print(f"srun: warning: can't honor --ntasks-per-node {per_node} with {tasks} tasks")
    return [task * nodes // tasks for task in range(tasks)]


def srun(arguments: list[str]) -> int:
    """Tasks of one step; the highest exit code."""
    parser = argparse.ArgumentParser("srun", allow_abbrev=False)
    parser.add_argument("-N", "--nodes", type=int, default=int(os.environ["SLURM_JOB_NUM_NODES"]))
    parser.add_argument("-n", "--ntasks", type=int, default=os.environ.get("SLURM_NTASKS"))
    parser.add_argument("--ntasks-per-node", type=int)
    parser.add_argument("--output", default="-")
    parser.add_argument("--export", default=os.environ.get("SLURM_EXPORT_ENV", "ALL"))
    parser.add_argument("--kill-on-bad-exit", type=int, default=0)
    parser.add_argument("--signal")
    parser.add_argument("--cpus-per-task", type=int)
    parser.add_argument("--cpu-bind")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    hosts = os.environ["SLURM_JOB_NODELIST"].split(",")
    if options.nodes > len(hosts):
        print(f"srun: error: Only allocated {len(hosts)} nodes asked for {options.nodes}")
        return 1
    state, mark = Path(os.environ["STAND_IN"]), os.urandom(16).hex()
    if options.signal:
        (state / "signal").write_text(options.signal)
    kept = dict(os.environ)
    if options.export != "ALL":
        names = ("PATH", "HOME", "STAND_IN", *options.export.split(","))
        kept = {k: v for k, v in kept.items() if k.startswith("SLURM") or k in names}
    places = placed(options.nodes, options.ntasks_per_node, options.ntasks)
    count = len(places)
    kept |= {"SLURM_NNODES": str(options.nodes), "SLURM_NTASKS": str(count), STEP: mark}
    kept |= {"SLURM_CPUS_PER_TASK": str(options.cpus_per_task or 1)}
    kept |= {"SLURM_CPU_BIND": options.cpu_bind or "cores"}
    tasks = []
    for task, node in enumerate(places):
        own = {"SLURM_NODEID": node, "SLURM_PROCID": task, "SLURMD_NODENAME": hosts[node]}
        own["SLURM_LOCALID"] = task - places.index(node)
        name = options.output.replace("%N", hosts[node]).replace("%t", str(task))
        with contextlib.ExitStack() as files:
            output = None if name == "-" else files.enter_context(open(name, "ab"))
            tasks.append(
                subprocess.Popen(
                    options.command,
                    env=kept | {k: str(v) for k, v in own.items()},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        (state / "tasks" / str(tasks[-1].pid)).touch()
    codes: dict[int, int] = {}
    while len(codes) < count:
        time.sleep(0.05)
        for number, task_process in enumerate(tasks):
            code = task_process.poll()
            if code is None or number in codes:
                continue
            codes[number] = code if code >= 0 else 128 - code
            (state / "tasks" / str(task_process.pid)).unlink()
            if code:
                host = hosts[places[number]]
                print(f"srun: error: {host}: task {number}: code {codes[number]}")
                if options.kill_on_bad_exit:
                    kill_all(STEP, mark)
    return max(codes.values())


if __name__ == "__main__":
    sys.exit(srun(sys.argv[1:]))
