"""Runs a function on n gloo ranks: real processes, no ports, CPU only.

One fork server a pytest process imports torch and Megatron once; the rank processes forked from it
stay alive from call to call, and every call has its own rendezvous and process group. A call that
fails or hangs kills them, and the next call starts new ones.

    def both(rank: int, world: int, x: Tensor) -> Tensor:   # at module level
        torch.distributed.all_reduce(x)
        return x

    first, second = run_ranks(2, both, torch.ones(3))

CUDA is hidden from the ranks, so they take the same path on a machine with a GPU.
"""

import argparse
import atexit
import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import pkgutil
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent

# Of the fork server and so of every rank. The NVML check keeps CUDA forkable, should it be there.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "RANKS_FORK_SERVER": "1",
}
if os.path.exists("/sys/class/net/lo"):
    ENVIRONMENT["GLOO_SOCKET_IFNAME"] = "lo"

PRELOAD = (  # after cpu.py's install, which imports megatron.training
    "pytest",
    "torch.testing",
    "megatron.core",
    "megatron.core.parallel_state",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.tokenizers.text",  # imports transformers: half of the time of a small run
)

MOST_THREADS = 400  # of a rank process, before new ones take over
GRACE = 0.5  # seconds in which other ranks may still report after the first failure


class RankError(RuntimeError):
    """A rank raised, died or hung; the message holds the tracebacks."""


def run_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    fresh: bool = False,
) -> list[Any]:
    """What `function(rank, n, *args)` returned on each of n gloo ranks, in rank order.

    Args:
        n: number of ranks.
        function: importable, so defined at module level.
        args: anything that can be pickled; tensors on the CPU.
        timeout: seconds after which the call counts as hung.
        fresh: use new processes and throw them away afterwards, for functions that leave traces.

    Raises:
        RankError: with the traceback of the first failing rank, or of every hanging one.
    """
    __tracebackhide__ = True
    return _POOL.run(n, function, args, timeout, fresh)


def start() -> None:
    """Starts the fork server, whose imports then run beside whatever the caller does next."""
    _POOL.context()


def stop() -> None:
    """Ends the rank processes; the next `run_ranks` starts new ones."""
    _POOL.stop()


class _Worker:
    """The parent's end of one rank process."""

    def __init__(self, context: Any, rank: int) -> None:
        self.connection, theirs = context.Pipe()
        handle, name = tempfile.mkstemp(prefix=f"rank{rank}-output-")
        os.close(handle)
        self._output = Path(name)
        self.process = context.Process(
            target=_serve, args=(theirs, name), name=f"rank-{rank}", daemon=True
        )
        self.process.start()
        theirs.close()

    def output(self) -> str:
        """What the process wrote to stdout and stderr since `forget_output`."""
        return self._output.read_text(errors="replace")

    def forget_output(self) -> None:
        os.truncate(self._output, 0)

    def stacks(self) -> str:
        """The output, ending in where each thread of the process stands."""
        size = self._output.stat().st_size
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.05)
            if self._output.stat().st_size > size:
                time.sleep(0.05)
                break
        return self.output()

    def threads(self) -> int:
        """How many the process has; gloo leaves some behind for each process group."""
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/task"))
        except OSError:
            return 0

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(OSError):  # and what it started: see `_serve`
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.connection.close()
        self._output.unlink(missing_ok=True)


class _Pool:
    """Rank processes that live from call to call; a call with n ranks takes the first n."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._context: Any = None

    def context(self) -> Any:
        if self._context is None:
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload([__name__])  # see the end of this file
            atexit.register(self.stop)
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, sys.path)])
        with _environment({**ENVIRONMENT, "PYTHONPATH": path}):
            multiprocessing.forkserver.ensure_running()
        return self._context

    def run(
        self,
        n: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        fresh: bool,
    ) -> list[Any]:
        __tracebackhide__ = True
        name = function.__qualname__
        if "." in name:
            raise ValueError(f"{name}: a rank function must be defined at module level")
        module = sys.modules[function.__module__]
        where = (function.__module__, getattr(module, "__file__", None), name)
        payload = _pack(args)
        if fresh or not all(worker.process.is_alive() for worker in self._workers):
            self.stop()
        folder = tempfile.mkdtemp(prefix="ranks-")
        try:
            context = self.context()
            while len(self._workers) < n:
                self._workers.append(_Worker(context, len(self._workers)))
            for rank in range(n):
                self._workers[rank].forget_output()
                call = (rank, n, f"{folder}/store", timeout, list(sys.path), os.getcwd(), where)
                self._workers[rank].connection.send_bytes(pickle.dumps((call, payload)))
            results = self._collect(n, f"{name} on {n} ranks", timeout)
            for worker in self._workers[:n]:  # only now may a rank leave the process group
                worker.connection.send_bytes(b"leave")
            self._collect(n, f"after {name} on {n} ranks", 30)
            self._show_output()
            return [_unpack(result) for result in results]
        except BaseException:
            self._show_output()
            self.stop()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if fresh or any(worker.threads() > MOST_THREADS for worker in self._workers):
                self.stop()

    def _show_output(self) -> None:
        """Prints what the ranks printed, for pytest to capture with the test they belong to."""
        for rank, worker in enumerate(self._workers):
            if text := worker.output():
                print(f"--- output of rank {rank}\n{text}", flush=True)
                worker.forget_output()

    def _collect(self, n: int, what: str, timeout: float) -> list[bytes]:
        """One answer of each of n ranks, or RankError."""
        __tracebackhide__ = True
        pending = {self._workers[rank].connection: rank for rank in range(n)}
        results: dict[int, bytes] = {}
        failures: list[str] = []
        end = time.monotonic() + timeout
        while pending:
            left = end - time.monotonic()
            ready = multiprocessing.connection.wait(list(pending), max(0.0, left))
            if not ready:
                break
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    worker = self._workers[rank]
                    worker.process.join(5)
                    value = f"the process died, exit code {worker.process.exitcode}\n"
                    ok, value = False, value + worker.output()
                if ok:
                    results[rank] = value
                else:
                    if not failures:
                        end = min(end, time.monotonic() + GRACE)
                    failures.append(f"--- rank {rank} of {n}\n{value}")
        if failures:
            raise RankError(f"{what} failed\n" + "\n".join(failures))
        if pending:
            stacks = [f"--- rank {r} of {n}\n{self._workers[r].stacks()}" for r in pending.values()]
            raise RankError(f"{what} did not end within {timeout} s\n" + "\n".join(stacks))
        return [results[rank] for rank in range(n)]

    def stop(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """os.environ with these values, for the length of the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _pack(value: Any) -> bytes:
    """Not plain pickle: Megatron makes that name a function of its own in every tensor."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


# --- in the rank processes -----------------------------------------------------------------------


def _serve(connection: Any, output: str) -> None:
    """Answers calls until the parent is gone."""
    os.setsid()  # the leader of a group that can be killed whole
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    # Daemonic, so that they end with pytest; but Megatron's checkpoint writer starts processes.
    multiprocessing.current_process()._config["daemon"] = False
    environment, argv = dict(os.environ), list(sys.argv)
    while True:
        try:
            call, payload = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = (True, _call(call, payload))
        except BaseException:
            answer = (False, traceback.format_exc())
        sys.stdout.flush()
        connection.send_bytes(pickle.dumps(answer))
        if not answer[0]:
            time.sleep(3600)  # the parent kills us; leaving the group now would hide the cause
        connection.recv_bytes()
        try:
            _leave()
            os.environ.clear()
            os.environ.update(environment)
            sys.argv[:] = argv
            answer = (True, b"")
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(os.getpid(), signal.SIGKILL)


def _install_cpu_shim() -> None:
    """Megatron without CUDA, if this tree has it already and the environment has Megatron."""
    import torch

    if torch.cuda.is_available() or importlib.util.find_spec("megatron_bp") is None:
        return
    if importlib.util.find_spec("megatron_bp.cpu") is None:
        return
    if importlib.util.find_spec("megatron") is None:  # as in the environment of tests/te
        return
    install = getattr(importlib.import_module("megatron_bp.cpu"), "install", None)
    if install is not None:
        install()


def _call(call: tuple[Any, ...], payload: bytes) -> bytes:
    """Joins the process group and runs the function; its packed result."""
    import numpy
    import torch
    import torch.distributed as dist

    _install_cpu_shim()  # the fork server did, unless it could not: then this call tells why
    rank, world, store, timeout, path, folder, where = call
    sys.path[:] = path
    os.chdir(folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    function = _find(*where)
    args = _unpack(payload)
    random.seed(1234)
    numpy.random.seed(1234)
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout + 10),  # the parent's own limit comes first
    )
    return _pack(function(rank, world, *args))


def _find(module_name: str, file: str | None, name: str) -> Callable[..., Any]:
    """The function, from the module of that name and file."""
    module = sys.modules.get(module_name)
    if module is None or (file is not None and getattr(module, "__file__", None) != file):
        sys.modules.pop(module_name, None)
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            module = None
        if module is None or (file is not None and getattr(module, "__file__", None) != file):
            spec = importlib.util.spec_from_file_location(module_name, file)
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            spec.loader.exec_module(module)
    return getattr(module, name)


def _leave() -> None:
    """Destroys what a call may have left: Megatron's globals and the process group."""
    import torch.distributed as dist

    for module, destroy in (
        ("megatron.training.global_vars", "destroy_global_vars"),
        ("megatron.core.num_microbatches_calculator", "destroy_num_microbatches_calculator"),
        ("megatron.core.rerun_state_machine", "destroy_rerun_state_machine"),
        ("megatron.core.parallel_state", "destroy_model_parallel"),
    ):
        if module in sys.modules:
            getattr(sys.modules[module], destroy)()
    tracker = sys.modules.get("megatron.core.tensor_parallel.random")
    if tracker is not None and tracker._CUDA_RNG_STATE_TRACKER is not None:
        tracker._CUDA_RNG_STATE_TRACKER.reset()
    if dist.is_initialized():
        dist.destroy_process_group()


def _preload() -> None:
    """Imports in the fork server what every rank needs. What fails is left to the ranks."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):
            _install_cpu_shim()
        names = list(PRELOAD)
        with contextlib.suppress(Exception):
            package = importlib.import_module("megatron_bp").__path__
            walk = pkgutil.walk_packages(package, "megatron_bp.", onerror=lambda name: None)
            names += [module.name for module in walk if ".tools" not in module.name]
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        with contextlib.suppress(Exception):
            _read_help_texts_once()


def _read_help_texts_once() -> None:
    """Megatron parses the source of its config classes at each of a run's three parsers."""
    from megatron.training import argument_utils
    from megatron.training.arguments import add_megatron_arguments

    factory = argument_utils.ArgumentGroupFactory
    texts, read = {}, factory._get_field_docstrings

    def once(self: Any, config: type) -> dict[str, str]:
        if config not in texts:
            texts[config] = read(self, config)
        return dict(texts[config])

    factory._get_field_docstrings = once
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


_POOL = _Pool()
if multiprocessing.current_process().name == "MainProcess" and "RANKS_FORK_SERVER" in os.environ:
    _preload()
