"""Whether the installed torch and Megatron are ones that this project was made for."""

import importlib.metadata

import torch
import torch.distributed as dist

MEGATRON = "0.19.2"
TORCH = (2, 9)

# What is used of torch beyond its stable interface, and for what.
NEEDED = {
    "current_graph_task_id": (torch._C, "_current_graph_task_id", "tell a recomputation"),
    "all_to_all_single": (dist, "all_to_all_single", "hand clean gradients to their owners"),
}


class VersionError(ValueError):
    """An installed package that cannot work, with the way out."""


def check_versions() -> None:
    """Refuse a torch or a Megatron that this project cannot run on.

    Raises:
        VersionError: with what is installed, what is needed and how to get it.
    """
    megatron = importlib.metadata.version("megatron-core")
    if megatron != MEGATRON:
        raise VersionError(
            f"megatron-core {megatron} is installed, {MEGATRON} is needed: this plugin hooks into "
            f"places that are no stable interface; pip install megatron-core=={MEGATRON}"
        )
    have = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if have < TORCH:
        raise VersionError(
            f"torch {torch.__version__} is installed, at least {TORCH[0]}.{TORCH[1]} is needed; "
            f"pip install 'torch>={TORCH[0]}.{TORCH[1]}'"
        )
    for owner, name, purpose in NEEDED.values():
        if not hasattr(owner, name):
            raise VersionError(
                f"torch {torch.__version__} has no {owner.__name__}.{name}, needed to {purpose}; "
                f"use torch 2.13.0, with which this version was tested"
            )
