"""What every run mends in megatron-core 0.19.2 before it trains, with CUDA or without.

Each mend names the fault it is for; when Megatron moves on, this file should shrink.
"""

import atexit
import importlib
import multiprocessing
import signal
from typing import Any

import torch


def prepare_megatron() -> None:
    """Make Megatron's wheel trainable as it is installed.

    Raises:
        RuntimeError: Megatron's compiled dataset helpers do not import.
    """
    _use_shipped_helpers()
    atexit.register(end_loaders)
    optimizer: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    if not optimizer.HAVE_APEX_OR_TE and not hasattr(optimizer, "megatron_bp_mended"):
        _mend_torch_adam(optimizer.DistributedOptimizer)
        optimizer.megatron_bp_mended = True


def end_loaders() -> None:
    """At the end of a rank that failed: end its data loaders, which an error still refers to.

    Python asks them to end by SIGTERM and waits; they have Megatron's handler of it, and go on.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises when a loader is killed
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _use_shipped_helpers() -> None:
    """Megatron runs `make` for its dataset helpers at every start; its wheel has no Makefile."""
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError as error:
        raise RuntimeError(
            f"megatron.core.datasets.helpers_cpp does not import ({error}), and Megatron's data "
            f"sets need it: use a megatron-core wheel for this Python, or build it there from "
            f"helpers.cpp"
        ) from error
    datasets: Any = importlib.import_module("megatron.core.datasets.utils")
    datasets.compile_helpers = lambda: None


def _mend_torch_adam(distributed_optimizer: Any) -> None:
    """Lets the distributed optimizer load a checkpoint into torch's Adam.

    Megatron does so for Transformer Engine's Adam, which has one step count, and no longer for
    torch's, which has one per parameter.
    """
    state_dict = distributed_optimizer.state_dict
    load_state_dict = distributed_optimizer.load_state_dict
    set_states = distributed_optimizer._set_main_param_and_optimizer_states

    def state_dict_from_start(self: Any) -> Any:
        """Before the first step there is no count yet; it asserts that there is one."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if not self.optimizer.state[param]:
                    zeros = {key: torch.zeros_like(param.data) for key in self.optimizer_state_keys}
                    self.optimizer.state[param] = {"step": torch.zeros(()), **zeros}
        return state_dict(self)

    def load_own_steps(self: Any, loaded: Any) -> None:
        """It gives all parameters one tensor as their count, so each would advance all."""
        load_state_dict(self, loaded)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    def set_all_but_step(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        """The parameter groups hold the count; here comes the one before loading, or none."""
        with torch.no_grad():  # missing around dp_reshardable; fp32 shards are views of leaves
            set_states(self, param, {**tensors, "step": None})

    distributed_optimizer.state_dict = state_dict_from_start
    distributed_optimizer.load_state_dict = load_own_steps
    distributed_optimizer._set_main_param_and_optimizer_states = set_all_but_step
