"""One real run of pretrain_bdlm.py on the CPU, and the most memory that one of its ranks held."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from megatron_bp.tools.bench.memory_runs import Run, flags_of
from megatron_bp.training.record import read_metrics

ROOT = Path(__file__).resolve().parents[3]
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
STEPS = 2  # the optimizer's state is made in the first
SAME = """
    --tokenizer-type NullTokenizer --split 100,0,0 --num-workers 0 --null-tokenizer-eod-id 0
    --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --lr 1e-4 --lr-decay-style constant --seed 3
    --eval-iters 0 --eval-interval 100000 --log-interval 1
"""


def peak(run: Run, timeout: float, gives_back: bool = True) -> int:
    """Bytes of the rank that holds most, at its peak.

    Args:
        run: what is trained.
        timeout: seconds.
        gives_back: what is freed goes back to the system, if it is larger than 1 MiB; else what
            glibc does by default.

    Raises:
        ValueError: the run failed; with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, run)
        metrics = folder / "metrics.jsonl"
        words = [str(ROOT / "pretrain_bdlm.py"), *SAME.split(), *flags_of(run)]
        words += ["--train-iters", str(STEPS), "--data-path", str(folder / "rows")]
        words += ["--data-cache-path", str(folder / "cache"), "--metrics-file", str(metrics)]
        _start(run.layout.gpus, words, folder / "log", timeout, GIVE_BACK if gives_back else {})
        rows = [row for row in read_metrics(metrics) if row["kind"] == "train"]
    assert [row["iteration"] for row in rows] == list(range(1, STEPS + 1))
    return int(rows[-1]["memory_bytes"])


def write_data(folder: Path, run: Run) -> None:
    """Documents of random ids, each as long as a packed row, in `folder`/rows."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(1)
    builder = IndexedDatasetBuilder(f"{folder}/rows.bin", np.uint16)
    for _ in range(run.task.global_batch * STEPS + 1):
        ids = rng.integers(1, run.task.shape.vocabulary - 1, run.task.length, dtype=np.uint16)
        builder.add_document(ids, [len(ids)])
    builder.finalize(f"{folder}/rows.idx")


def _start(ranks: int, words: list[str], log: Path, timeout: float, more: dict[str, str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= more | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as out:
        running = [
            subprocess.Popen(
                [sys.executable, *words],
                env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]
        try:
            failed = [process for process in running if process.wait(timeout)]
        except subprocess.TimeoutExpired:
            failed = running
        finally:
            for process in running:
                process.kill()
                process.wait()
    if failed:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ValueError(f"a run ended early, or not in {timeout:.0f} s:\n{end}")
