"""Starts real runs of pretrain_bdlm.py with torchrun, each in a process tree and folder of its own.

For tests of what a run does when it is killed, told to end or out of room. Only processes that
descend from a run are ever signalled.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_bp.tools.prepare import Options, prepare
from megatron_bp.training.record import read_metrics
from megatron_bp.training.saving import TRACKER

ROOT = Path(__file__).resolve().parents[1]
CONFIG = """
data:
  split: 90,10,0
  tokenizer_type: NullTokenizer
  vocab_size: 258
  null_tokenizer_eod_id: 256
  num_workers: 0
block_diffusion:
  diffusion_block_size: 4
  mask_token_id: 257
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 4
  ffn_hidden_size: 48
  swiglu: true
  normalization: RMSNorm
  disable_bias_linear: true
  position_embedding_type: rope
  seq_length: 24
training:
  global_batch_size: 2
  lr: 1.0e-2
  lr_decay_style: constant
  seed: 3
evaluation:
  eval_interval: 100000
  eval_iters: 0
logging:
  log_interval: 1
"""
ASYNC = ["--async-save", "--use-persistent-ckpt-worker"]


def make_data(folder: Path) -> list[str]:
    """Small data under `folder`; the head of a command line that trains on it."""
    rng = np.random.default_rng(1)
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for i in range(60):
        words = rng.choice(["red ", "green ", "blue ", "one\n", "two\n"], rng.integers(2, 40))
        (texts / f"{i:02}.txt").write_text("".join(words) + str(i))
    prepare(Options(input=[texts], output_prefix=folder / "data" / "words"))
    (folder / "run.yaml").write_text(CONFIG)
    return [str(folder / "run.yaml"), "--data-path", str(folder / "data" / "words")]


class Run:
    """A run that was started; its output is in a file."""

    def __init__(
        self,
        ranks: int,
        arguments: list[str],
        output: Path,
        program: Path = ROOT / "pretrain_bdlm.py",
        torchrun: bool = True,
        **environment: str,
    ) -> None:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, "-W", "ignore", *(launch if torchrun else []), str(program)]
        if ranks > 1:
            arguments = [*arguments, "--block-parallel-size", str(ranks)]
        launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        clean = {name: value for name, value in os.environ.items() if name not in launcher}
        clean |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
        clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        self.torchrun = torchrun
        self._output = output
        mark = uuid.uuid4().hex
        self._mark, clean["LAUNCHED_RUN"] = mark.encode(), mark
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, *arguments],
                env=clean,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def descendants(self) -> list[int]:
        """Living processes of the run, the launched one left out: orphans too, by a variable."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                ours = self._mark in (folder / "environ").read_bytes()
            except OSError:
                continue
            if ours and state != "Z" and int(folder.name) != self.process.pid:
                found.append(int(folder.name))
        return sorted(found)

    def ranks(self) -> dict[int, int]:
        """Rank -> process id."""
        if not self.torchrun:
            return {0: self.process.pid}
        found = {}
        for pid in self.descendants():
            try:
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = [v for v in variables if v.startswith(b"RANK=")]
            if rank and parent == self.process.pid:
                found[int(rank[0][5:])] = pid
        return found

    def wait_for(self, what: Callable[[], Any], timeout: float = 240, pause: float = 0.02) -> Any:
        """What `what()` gives once it is true; an error if the run ends or takes too long."""
        end = time.monotonic() + timeout
        while not (value := what()):
            assert self.process.poll() is None, f"ended early: {self.output[-4000:]}"
            assert time.monotonic() < end, f"nothing in {timeout} s: {self.output[-4000:]}"
            time.sleep(pause)
        return value

    def wait_for_step(self, save: Path, step: int) -> None:
        """Until metrics.jsonl has a row of `step` or later."""
        self.wait_for(lambda: max(losses(save), default=0) >= step)

    def end(self, timeout: float = 240) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {timeout} s: {self.output[-4000:]}") from None

    def leftovers(self, patience: float = 10) -> list[int]:
        """Processes of the run that still live `patience` seconds after it ended."""
        end = time.monotonic() + patience
        while (pids := self.descendants()) and time.monotonic() < end:
            time.sleep(0.1)
        return pids

    def clean_up(self) -> None:
        """Ends what is left of the run, if anything."""
        for pid in [*self.descendants(), *([self.process.pid] * (self.process.poll() is None))]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)


def losses(save: Path) -> dict[int, float]:
    """Loss of each training step in metrics.jsonl; a step twice is an error."""
    path = save / "metrics.jsonl"
    if not path.exists():
        return {}
    rows = [r for r in read_metrics(path) if r["kind"] == "train"]
    found = {r["iteration"]: r["loss"] for r in rows}
    assert len(found) == len(rows), f"{path}: a step has two rows"
    return found


def saved_step(save: Path) -> int:
    """The step that the tracker names; 0 if there is none."""
    path = save / TRACKER
    return int(path.read_text()) if path.exists() else 0


def copy_run(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


def named_rank(output: str) -> int | None:
    """The rank that torchrun names as the first failure."""
    found = re.search(r"Root Cause.*?rank +: (\d+)", output, re.DOTALL)
    return int(found[1]) if found else None
