"""Workers, killed runs and locks: the same files under the final names, or none."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_bp.tools import prepare as tool
from megatron_bp.tools.prepare import Options, reading, workers, writing
from megatron_bp.tools.prepare.table import Spool


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Some files of JSON lines, with flaws."""
    root = tmp_path / "tree"
    root.mkdir()
    for i in range(6):
        rows = [json.dumps({"text": f"file {i} line {j} " * (j % 7)}) for j in range(50)]
        rows[i] = "{"
        (root / f"{i}.jsonl").write_text("\n".join(rows))
    return root


def run(source: Path, prefix: Path, **options: Any) -> dict[str, Any]:
    return tool.prepare(Options([source], prefix, **options))


def contents(prefix: Path) -> dict[str, bytes]:
    return {ending: Path(f"{prefix}{ending}").read_bytes() for ending in tool.ENDINGS}


# --- workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [None, 1500])
def test_any_number_of_workers_gives_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int | None
) -> None:
    monkeypatch.setattr(reading, "BATCH_ITEMS", 7)  # many batches
    run(source, tmp_path / "one", max_bytes=max_bytes)
    for n in (2, 3):
        run(source, tmp_path / f"n{n}", workers=n, max_bytes=max_bytes)
        assert contents(tmp_path / f"n{n}") == contents(tmp_path / "one")


def test_batches_in_flight_are_bounded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that runs ahead of slow workers would hold all of the input in memory."""
    monkeypatch.setattr(reading, "BATCH_ITEMS", 1)
    read = done = ahead = 0

    def counted(*args: Any) -> Any:
        nonlocal read
        for batch in reading.batches(*args):
            read += 1
            yield batch

    from megatron_bp.tools.prepare.encoding import Encoder
    from megatron_bp.tools.prepare.tokenizing import build

    options = Options([source], tmp_path / "p", workers=2)
    files = list(tool.walk([source], [], [], tool.Tally().skipped))
    every = counted(files, options, lambda n: None)
    for _ in workers.encoded_in_order(Encoder(build(()), options), every, options):
        done += 1
        ahead = max(ahead, read - done)
    assert read == done == 6 * 50
    assert ahead <= 8


def test_a_worker_that_dies_is_an_error_in_words(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*args: Any) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    monkeypatch.setattr(reading, "BATCH_ITEMS", 1)
    monkeypatch.setattr(Spool, "add", kill)
    with pytest.raises(ValueError, match=r"one of --workers 2 died, .*use fewer"):
        run(source, tmp_path / "p", workers=2)
    assert os.listdir(tmp_path) == ["tree"]


# --- killed runs ----------------------------------------------------------------------------------


def killed(action: Callable[[], object]) -> None:
    """Runs `action` in a fork that is to kill itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fork has a thread less: it takes no lock of theirs
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            action()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the fork was not killed"


def kill_at(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, after: bool = False
) -> None:
    """Makes the `call`-th call of owner.name the process's last."""
    real, calls = getattr(owner, name), 0

    def replacement(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        out = real(*args, **more)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    monkeypatch.setattr(owner, name, replacement)


KILLS = [
    (reading, "_lines", 3),
    (IndexedDatasetBuilder, "add_document", 20),
    (IndexedDatasetBuilder, "finalize", 1),
    (writing, "publish", 1),
]


@pytest.mark.parametrize(("owner", "name", "call"), KILLS)
def test_a_killed_run_leaves_no_final_name_and_the_next_works(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
) -> None:
    run(source, tmp_path / "want")
    with monkeypatch.context() as patch:
        if name == "publish":
            from megatron_bp.tools.prepare import run as steps

            owner = steps
        kill_at(patch, owner, name, call)
        killed(lambda: run(source, tmp_path / "p"))
    assert not [x for x in os.listdir(tmp_path) if x.startswith("p.")]
    assert (tmp_path / ".p.partial").is_dir()
    run(source, tmp_path / "p")
    assert contents(tmp_path / "p") == contents(tmp_path / "want")
    assert not (tmp_path / ".p.partial").exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("moved", [0, 1, 2, 3, 4])
def test_a_run_killed_between_two_moves_leaves_no_pair_and_the_next_works(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int, overwrite: bool
) -> None:
    """Also without --overwrite: what lies under the final names is the killed run's own."""
    if overwrite:
        run(source, tmp_path / "p", seed=5)
    run(source, tmp_path / "want")
    with monkeypatch.context() as patch:
        kill_at(patch, os, "replace", min(moved + 1, 4), after=moved == 4)
        killed(lambda: run(source, tmp_path / "p", overwrite=overwrite))
    assert (tmp_path / "p.idx").exists() == (moved == 4)
    if moved == 4:  # all was done but the cleaning up
        assert contents(tmp_path / "p") == contents(tmp_path / "want")
        with pytest.raises(ValueError, match=r"p\.bin exists"):
            run(source, tmp_path / "p")
    else:
        run(source, tmp_path / "p")
        assert contents(tmp_path / "p") == contents(tmp_path / "want")
    assert not (tmp_path / ".p.partial").exists()


@pytest.mark.parametrize("moved", [0, 1, 3, 5])
def test_a_killed_run_of_chats_leaves_no_mask_without_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    (tmp_path / "tree").mkdir()
    rows = [json.dumps({"prompt": f"question {i}", "completion": f"{i}"}) for i in range(9)]
    (tmp_path / "tree/a.jsonl").write_text("\n".join(rows))
    template = Path(__file__).parents[2] / "configs/templates/plain.jinja"
    options = {"format": "chats", "chat_template": template}
    run(tmp_path / "tree", tmp_path / "want", **options)
    with monkeypatch.context() as patch:
        kill_at(patch, os, "replace", min(moved + 1, 5), after=moved == 5)
        killed(lambda: run(tmp_path / "tree", tmp_path / "p", **options))
    assert (tmp_path / "p.supervised.npy").exists() == (moved > 0)
    assert (tmp_path / "p.idx").exists() == (moved == 5)
    if moved < 5:
        run(tmp_path / "tree", tmp_path / "p", **options)
    for ending in tool.ALL_ENDINGS:
        got, want = (Path(f"{tmp_path}/{name}{ending}") for name in ("p", "want"))
        assert got.read_bytes() == want.read_bytes()


def test_two_runs_at_once_are_refused(source: Path, tmp_path: Path) -> None:
    with writing.scratch(tmp_path / "p"):
        with pytest.raises(
            ValueError, match=r"\.p\.partial is in use: another run is writing .*/p"
        ):
            run(source, tmp_path / "p")
        assert (tmp_path / ".p.partial").is_dir()
        run(source, tmp_path / "q")
    run(source, tmp_path / "p")


def test_foreign_files_in_the_scratch_folder_are_not_removed(source: Path, tmp_path: Path) -> None:
    (tmp_path / ".p.partial").mkdir()
    (tmp_path / ".p.partial/mine").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        run(source, tmp_path / "p")
    assert (tmp_path / ".p.partial/mine").read_text() == "mine"


SCRIPT = """
import os, signal, sys
from pathlib import Path
from megatron_bp.tools.prepare import Options, prepare, reading, run
import multiprocessing
if __name__ == "__main__":
    reading.BATCH_ITEMS = 1
    done = run.Spool.add
    def add(*args):
        done(*args)
        print(*[p.pid for p in multiprocessing.active_children()], flush=True)
        os.kill(os.getpid(), int(sys.argv[3]))
    run.Spool.add = add
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    prepare(Options([Path(sys.argv[1])], Path(sys.argv[2]), workers=2))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_a_run_that_is_stopped(
    source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(source), str(tmp_path / "p"), str(int(number))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == {2: -2, 9: -9, 15: 143}[number], ended.stderr
    pids = [int(x) for x in ended.stdout.splitlines()[0].split()]
    assert len(pids) == 2
    for _ in range(100):
        alive = [pid for pid in pids if running(pid)]
        if not alive:
            break
        time.sleep(0.1)
    assert not alive
    left = {"script.py", "tree"} | ({".p.partial"} if number == signal.SIGKILL else set())
    assert set(os.listdir(tmp_path)) == left


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
