"""Lets Megatron's own `pretrain` run on plain CPUs with gloo, for development and tests.

Megatron asks for CUDA by name in some hundred places. `install` redirects the few torch functions
that these places go through, then some functions of Megatron; no Megatron source is edited.

Torch's functions are replaced by name, not caught by a `TorchFunctionMode`: a mode costs 2 to 4
microseconds on *every* torch call and holds for one thread only (not for checkpoint writers); this
costs at most 0.5, on factories and `.to` alone. It misses factories that were bound before
(`from torch import zeros`) and `with torch.device("cuda"):`; Megatron trains without either.

`torch.cuda.is_available()` stays False, so code that asks still gets the true answer. Tensors are
on one device only: `x.cuda()` and `x.cpu()` are x itself, never a copy.
"""

import contextlib
import functools
import importlib
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._device
from torch import Tensor

#: Megatron flags that a CPU run needs: flag -> value, None for a switch.
FLAGS: dict[str, str | None] = {
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--use-cpu-initialization": None,
    "--no-masked-softmax-fusion": None,
    "--no-bias-gelu-fusion": None,
    "--no-bias-swiglu-fusion": None,
    "--no-bias-dropout-fusion": None,
    "--no-rope-fusion": None,
    "--no-gradient-accumulation-fusion": None,
    "--no-persist-layer-norm": None,
}
_installed = False


def needed() -> bool:
    """True where torch finds no CUDA device."""
    return not torch.cuda.is_available()


def install() -> None:
    """Redirects torch's and Megatron's CUDA calls to the CPU, once, for the whole process.

    Imports `megatron.training`; call it before anything else does.

    Raises:
        RuntimeError: CUDA is present.
    """
    global _installed
    if not needed():
        raise RuntimeError(
            f"torch finds {torch.cuda.device_count()} CUDA device(s), and the CPU redirection is "
            "for machines without: do not call install(), or hide them: CUDA_VISIBLE_DEVICES=''."
        )
    if _installed:
        return
    _set_environment()
    _redirect_cuda()
    _redirect_tensors()
    _redirect_megatron()
    _installed = True
    if os.environ["RANK"] == "0":
        print(
            "megatron_bp: no CUDA device found: running on the CPU with gloo (for development and "
            "tests; memory figures are the resident set of the process)",
            file=sys.stderr,
            flush=True,
        )


def _set_environment() -> None:
    """Fills in what torchrun would set for one rank; switches torch's compiler off."""
    if int(os.environ.setdefault("WORLD_SIZE", "1")) > 1 and "RANK" not in os.environ:
        raise RuntimeError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but RANK is not set, and several ranks need "
            "both: start them with torchrun, or unset WORLD_SIZE to run one."
        )
    if os.environ["WORLD_SIZE"] == "1":
        # Port 0: the only rank's store picks a free port as it binds, so nobody can take it before.
        one = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update({name: os.environ.get(name, value) for name, value in one.items()})
    # Megatron asks this of devices before Blackwell when tensor or context parallel.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Loaded now, as its table of torch's functions cannot be built once they are replaced.
    _replace(importlib.import_module("torch._dynamo.config"), disable=True)


def _replace(owner: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _itself(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


class _Stream:
    """The one order of work of a CPU, where a call returns when its work is done."""

    cuda_stream = priority = 0
    __init__ = wait_stream = wait_event = synchronize = __exit__ = _nothing
    __enter__ = _itself

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event()
        event.record()
        return event


class _Event:
    """A point in wall-clock time."""

    wait = synchronize = _nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds from this event to `end`."""
        if self._seconds is None or end._seconds is None:
            raise RuntimeError("elapsed_time needs two recorded events: call record() on both.")
        return (end._seconds - self._seconds) * 1e3


def _resident(*args: Any, **kwargs: Any) -> int:
    """Bytes of memory this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak_resident(*args: Any, **kwargs: Any) -> int:
    """The most bytes since the process started: nothing resets it."""
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, _resident())


def _memory_stats(*args: Any, **kwargs: Any) -> dict[str, int]:
    """What Megatron logs; nothing counts allocations on a CPU, so that entry is 0."""
    stats = {"allocation.all.current": 0}
    for kind in ("allocated", "reserved", "active"):
        stats[f"{kind}_bytes.all.current"] = _resident()
        stats[f"{kind}_bytes.all.peak"] = _peak_resident()
    return stats


def _get_rng_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _redirect_cuda() -> None:
    names = ("set_device", "synchronize", "empty_cache", "set_stream", "reset_peak_memory_stats")
    rng = {"get_rng_state": _get_rng_state, "set_rng_state": _set_rng_state}
    _replace(
        torch.cuda,
        **dict.fromkeys(names, _nothing),
        **dict.fromkeys(("memory_allocated", "memory_reserved", "device_memory_used"), _resident),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _peak_resident),
        memory_stats=_memory_stats,
        current_device=lambda: 0,
        device_count=lambda: 1,  # at 0 Megatron makes no process groups and seeds nothing
        # As it is, but fixed: with PYTORCH_NVML_BASED_CUDA_CHECK set it asks device_count.
        is_available=lambda: False,
        get_device_capability=lambda *args: (0, 0),
        get_device_properties=lambda *args: SimpleNamespace(name="cpu", major=0, minor=0),
        Stream=_Stream,
        Event=_Event,
        **dict.fromkeys(("current_stream", "default_stream"), _Stream),
        **dict.fromkeys(("stream", "device"), lambda *args: contextlib.nullcontext()),
        is_current_stream_capturing=lambda: False,
        manual_seed=torch.manual_seed,
        initial_seed=torch.initial_seed,
        **rng,
        **{kind: getattr(torch, kind) for kind in ("FloatTensor", "HalfTensor", "BFloat16Tensor")},
    )
    _replace(torch.cuda.random, **rng)


def _is_cuda(device: Any) -> bool:
    """Whether `device`, as torch takes it, names a CUDA device; a bare index does."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make`, but on the CPU where it is asked for CUDA, and never in pinned memory."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return made


def _redirect_tensors() -> None:
    # What `with torch.device("meta")` covers. Torch keeps this set of functions: it has to be made
    # before they are replaced.
    factories = {id(factory) for factory in torch.utils._device._device_constructors()}
    names = [n for n, value in vars(torch).items() if id(value) in factories or n.endswith("_like")]
    _replace(torch, **{name: _on_cpu(getattr(torch, name)) for name in names})
    names = [name for name in dir(Tensor) if name.startswith("new_")]
    _replace(Tensor, **{name: _on_cpu(getattr(Tensor, name)) for name in names})
    tensor_to, tensor_type = _on_cpu(Tensor.to), Tensor.type

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and _is_cuda(args[0]):
            args = ("cpu", *args[1:])
        return tensor_to(self, *args, **kwargs)

    def type_(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return tensor_type(self, *args, **kwargs)
        return str(tensor_type(self)).replace("torch.", "torch.cuda.", 1)  # Megatron sorts by it

    _replace(Tensor, to=to, type=type_, cuda=_itself, pin_memory=_itself, record_stream=_nothing)
    _replace(torch.nn.Module, cuda=_itself)


def _redirect_megatron() -> None:
    core = "megatron.core"
    importlib.import_module(f"{core}.jit").disable_jit_fuser()
    rng = importlib.import_module(f"{core}.tensor_parallel.random")
    _replace(rng, _get_cuda_rng_state=_get_rng_state, _set_cuda_rng_state=_set_rng_state)

    def split_sizes(sizes: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """As Megatron does for CUDA tensors alone: all_to_all takes no tensor of sizes."""
        return sizes.numpy() if as_numpy and isinstance(sizes, Tensor) else sizes

    dispatcher = importlib.import_module(f"{core}.transformer.moe.token_dispatcher")
    _replace(dispatcher, maybe_move_tensor_to_cpu=split_sizes)
    writer = importlib.import_module(f"{core}.dist_checkpointing.strategies.filesystem_async")
    prepare = writer.FileSystemWriterAsync.prepare_write_data

    def prepare_copies(self: Any, plan: Any, planner: Any) -> None:
        """An asynchronous save would share the live weights, which train on while it writes."""
        prepare(self, plan, planner)
        self.write_buckets = [
            (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
            for file, key, (data, tensors) in self.write_buckets
        ]

    _replace(writer.FileSystemWriterAsync, prepare_write_data=prepare_copies)
    training = importlib.import_module("megatron.training.training")
    initialize = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    # Its warm-up for fused kernels, of which there are none, would draw from the one generator of a
    # CPU, as often as the row is long, between the seeding and the first weight.
    _replace(training, initialize_megatron=initialize, set_jit_fusion_options=_nothing)
