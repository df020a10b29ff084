"""Kills ranks of real runs at random moments, and checks that each run goes on exactly.

    python tests/kills.py --kills 20 --seed 1 [--async] [--json kills.json]

A chain of runs into one folder: each is killed (SIGKILL to one rank) and the next goes on from the
last complete checkpoint. At least half of the kills fall between the first file of a save and its
completion. Required after each: torchrun ends within 60 s and names the rank, no process is left,
the tracker names a complete checkpoint, the next run loads it, and every loss in metrics.jsonl is
that of a run that nobody killed, to the bit. Kills before the first step of a run or after its end
do not count and are done again. Exit code 1 if anything is otherwise.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import entry
from launch import ASYNC, Run, losses, make_data, named_rank, saved_step
from ranks import run_ranks

from megatron_bp.training.saving import complete_steps

PROGRAM = Path(__file__).resolve().with_name("slow_saves.py")
RANKS, INTERVAL, LIMIT = 2, 3, 60
SLOW = {"SLOW_SAVES": "0.02", "SLOW_ENDS": "0.2", "SLOW_STEPS": "0.1"}


@dataclass
class Kill:
    """One kill: when it fell and what came of it."""

    number: int
    rank: int
    step: int  # the last in metrics.jsonl
    seconds: float  # since the run's first step
    saving: int | None  # step of the save that was under way
    files: int  # of that save, or of the last
    complete: bool  # whether that one was named by the tracker
    ended: float = 0.0  # seconds from the kill to torchrun's end
    named: int | None = None
    last: int = 0  # step of the last complete checkpoint


def printing(rank: int, world: int, arguments: list[str]) -> str:
    """One rank of a run; its standard output."""
    return entry.command(rank, world, ["pretrain_bdlm.py", *arguments], {})


class Chain:
    """Runs into one folder, each going on where the one before was killed."""

    def __init__(self, folder: Path, steps: int, extra: list[str]) -> None:
        self.folder, self.steps, self.extra = folder, steps, extra
        self.head = make_data(folder)
        self.errors: list[str] = []
        self.kills: list[Kill] = []
        self.started = 0
        self.new_folder()

    def new_folder(self) -> None:
        self.save = self.folder / f"run{self.started}"

    def arguments(self, save: Path) -> list[str]:
        flags = ["--save", str(save), "--load", str(save), "--save-interval", str(INTERVAL)]
        return [*self.head, *flags, "--train-iters", str(self.steps), *self.extra]

    def start(self, save: Path, **slow: str) -> Run:
        """A run that can be killed."""
        self.started += 1
        self.since = time.time()
        output = self.folder / f"output{self.started}.txt"
        return Run(RANKS, self.arguments(save), output, PROGRAM, **slow)

    def whole_run(self, save: Path) -> str:
        """A run to the end, in ranks that have imported Megatron already; what it prints."""
        arguments = [*self.arguments(save), "--block-parallel-size", str(RANKS)]
        return run_ranks(RANKS, printing, arguments, timeout=600, fresh=True)[0]

    def reference(self) -> None:
        self.whole_run(self.folder / "whole")
        self.whole = losses(self.folder / "whole")
        assert sorted(self.whole) == list(range(1, self.steps + 1))

    def check(self, what: bool, message: str) -> None:
        if not what:
            self.errors.append(message)
            print(f"VIOLATION: {message}", flush=True)

    def check_losses(self, name: str) -> None:
        found = losses(self.save)
        other = [step for step, loss in found.items() if loss != self.whole[step]]
        self.check(not other, f"{name}: losses of steps {other} differ from the unbroken run's")
        self.check(sorted(found) == list(range(1, len(found) + 1)), f"{name}: steps are missing")

    def kill(self, rng: random.Random, in_save: bool) -> None:
        """Starts a run, kills a rank of it and checks what is left; nothing if it came too late."""
        number, before = len(self.kills) + 1, saved_step(self.save)
        run = self.start(self.save, **SLOW)
        try:
            first = before + 1
            run.wait_for(lambda: f"iteration {first:8}/" in run.output)
            began, rank = time.monotonic(), rng.randrange(RANKS)
            self.check_start(f"kill {number}", run.output, before)
            if in_save:
                self.wait_for_save(run, rng, before)
            else:
                step, pause = first + rng.randrange(2 * INTERVAL), rng.uniform(0, 0.5)
                while max(losses(self.save), default=0) < step and run.process.poll() is None:
                    time.sleep(0.02)
                time.sleep(pause)
            if run.process.poll() is not None:
                return self.new_folder()
            pid = run.ranks().get(rank)
            if pid is None:
                return self.new_folder()
            kill = self.moment(number, rank, time.monotonic() - began)
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            code = run.end(LIMIT + 30)
            kill.ended = time.monotonic() - killed
            kill.named, kill.last = named_rank(run.output), saved_step(self.save)
            if kill.step >= self.steps or code == 0:
                return self.new_folder()
            self.kills.append(kill)
            name = f"kill {number}"
            self.check(kill.ended <= LIMIT, f"{name}: ended after {kill.ended:.0f} s")
            self.check(kill.named == rank, f"{name}: rank {rank} killed, {kill.named} named")
            self.check(not (pids := run.leftovers()), f"{name}: processes {pids} are left")
            last = kill.last
            self.check(
                not last or last in complete_steps(self.save), f"{name}: {last} is not whole"
            )
            print(asdict(kill), flush=True)
        finally:
            run.clean_up()
        return None

    def wait_for_save(self, run: Run, rng: random.Random, before: int) -> None:
        """Until a random moment of one of the next two saves, or of a later one if that is over."""
        step = (before // INTERVAL + rng.choice([0, 1])) * INTERVAL
        while run.process.poll() is None:
            step += INTERVAL
            target = self.save / f"iter_{step:07}"
            while not self.files(target) and run.process.poll() is None:
                time.sleep(0.005)
            end = time.monotonic() + rng.uniform(0, 1.2)
            while time.monotonic() < end and saved_step(self.save) < step:
                time.sleep(0.005)
            if saved_step(self.save) < step:
                return

    def files(self, folder: Path) -> int:
        """Files in the folder of a checkpoint that the present run wrote, not a killed one."""
        try:
            return sum(file.stat().st_mtime >= self.since for file in folder.iterdir())
        except OSError:
            return 0  # none yet, or just now written anew

    def moment(self, number: int, rank: int, seconds: float) -> Kill:
        done = saved_step(self.save)
        files = {int(f.name.removeprefix("iter_")): self.files(f) for f in self.save.glob("iter_*")}
        under_way = sorted(step for step, count in files.items() if step > done and count)
        saving = under_way[0] if under_way else None
        step = max(losses(self.save), default=0)
        count, complete = files.get(saving or done, 0), saving is None and done > 0
        return Kill(number, rank, step, round(seconds, 2), saving, count, complete)

    def check_start(self, name: str, output: str, before: int) -> None:
        loaded = re.search(r"loading distributed checkpoint from .* at iteration (\d+)", output)
        step = int(loaded[1]) if loaded else 0
        self.check(step == before, f"{name}: loaded {step}, and the last complete one is {before}")

    def finish(self) -> None:
        before = saved_step(self.save)
        self.check_start("the last run", self.whole_run(self.save), before)
        self.check_losses("the last run")
        self.check(len(losses(self.save)) == self.steps, "the last run did not get to the end")


def table(kills: list[Kill]) -> str:
    names = list(asdict(kills[0]))
    lines = [names, ["-"] * len(names)]
    for kill in kills:
        values = asdict(kill).values()
        lines.append([f"{v:.1f}" if isinstance(v, float) else str(v) for v in values])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--async", dest="asynchronous", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("kills.json"))
    options = parser.parse_args(argv)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        extra = ASYNC if options.asynchronous else []
        chain = Chain(Path(folder), options.kills * 6 + 6, extra)
        chain.reference()
        tries = 0
        while len(chain.kills) < options.kills and tries < 3 * options.kills + 3:
            tries += 1
            inside = sum(k.saving is not None for k in chain.kills)
            wanted = -(-options.kills // 2) - inside
            left = options.kills - len(chain.kills)
            chain.kill(rng, wanted >= left or rng.random() < 0.6)
            chain.check_losses(f"after {len(chain.kills)} kills")
        chain.check(len(chain.kills) == options.kills, f"only {len(chain.kills)} kills counted")
        inside = sum(k.saving is not None for k in chain.kills)
        chain.check(2 * inside >= options.kills, f"only {inside} kills fell into a save")
        chain.finish()
    print(table(chain.kills))
    found = {"kills": [asdict(k) for k in chain.kills], "violations": chain.errors}
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(chain.kills)} kills, {inside} in a save, {len(chain.errors)} violations")
    return int(bool(chain.errors))


if __name__ == "__main__":
    sys.exit(main())
