"""Which kernel a run computes its attention with: one by name, or the best one for the hardware.

Knows the limits of each kernel (device, dtype, head dimension, packages) and refuses at start-up
what a kernel cannot do. Whether a kernel is right on this machine is `self_test`'s matter.
"""

from importlib.util import find_spec

import torch

from megatron_bp.attention.kernels.contract import Kernel
from megatron_bp.attention.kernels.tiled import Tiled

FLAG = "--attention-kernel"
NAMES = ("auto", "tiled", "sdpa", "flash", "flash_fa3", "flash_fa4", "flash4", "flex", "flex_flash")
"""Values of --attention-kernel. flash: torch's FlashAttention ops and its own FlashAttention-2.
flash_fa3, flash_fa4: the same ops, which torch is first told to answer with FA3 or FA4. flash4:
FA4's own functions, with its negative right window. flex: FlexAttention in Triton; flex_flash: in
FA4."""

FLASH_MAX_HEAD_DIM = 256
FLEX_MIN_HEAD_DIM = 16
HALF = (torch.float16, torch.bfloat16)

# What `flash_fa3`, `flash_fa4`, `flash4` and `flex_flash` need: a module, the package that has it,
# and the compute capabilities (major) that it runs on.
_FA3 = ("flash_attn_interface", "FlashAttention-3, built from its source", (9,))
_FA4 = ("flash_attn.cute.interface", "pip install 'megatron-bp[flash]'", (9, 10))
_PACKAGES = {"flash_fa3": _FA3, "flash_fa4": _FA4, "flash4": _FA4, "flex_flash": _FA4}


def choose(
    name: str,
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int] | None = None,
) -> Kernel:
    """The kernel of this name; of "auto", the fastest that can do what is asked.

    auto is sdpa on a CPU; on CUDA flash, where it can, else flex, and in float64 tiled.

    Args:
        name: one of NAMES.
        device_type: "cpu" or "cuda", where the model is.
        dtype: the model's.
        head_dim: of queries, keys and values.
        capability: of the CUDA device, (major, minor); None: ask it, which a CPU has not.

    Raises:
        ValueError: no such kernel, or it cannot do what is asked.
    """
    if name not in NAMES:
        raise ValueError(f"{FLAG} {name}: no such kernel; use one of {', '.join(NAMES)}")
    if capability is None and device_type == "cuda":
        capability = torch.cuda.get_device_capability()
    major = capability[0] if capability is not None else 0
    if name == "auto":
        name = _best(device_type, dtype, head_dim, major)
    reason = refusal(name, device_type, dtype, head_dim, major)
    if reason is not None:
        best = _best(device_type, dtype, head_dim, major)
        raise ValueError(f"{FLAG} {name}: {reason}; use {FLAG} {best} (what auto takes here)")
    return _make(name)


def refusal(
    name: str, device_type: str, dtype: torch.dtype, head_dim: int, major: int
) -> str | None:
    """Why the kernel `name` (not auto) cannot do this; None where it can.

    Args:
        name: see `choose`, as for the next three.
        device_type: see there.
        dtype: see there.
        head_dim: see there.
        major: of the compute capability, on CUDA.
    """
    if name == "tiled":
        return None
    if name == "sdpa":
        if device_type == "cpu":
            return None
        return f"it computes on a CPU, and the model is on {_on(device_type)}"
    if device_type != "cuda":
        return f"it needs a CUDA device, and the model is on {_on(device_type)}"
    if name.startswith("flex"):
        reason = _flex_refusal(name, dtype, head_dim)
    else:
        reason = _flash_refusal(dtype, head_dim, major)
    return reason or _package_refusal(name, major)


def _on(device_type: str) -> str:
    return {"cpu": "the CPU", "cuda": "CUDA"}.get(device_type, device_type)


def _best(device_type: str, dtype: torch.dtype, head_dim: int, major: int) -> str:
    """What auto takes: the first that is not refused."""
    order = ["sdpa"] if device_type == "cpu" else ["flash", "flex"]
    for name in order:
        if refusal(name, device_type, dtype, head_dim, major) is None:
            return name
    return "tiled"


def _flash_refusal(dtype: torch.dtype, head_dim: int, major: int) -> str | None:
    if dtype not in HALF:
        return f"FlashAttention computes in float16 or bfloat16, and the model is {_name(dtype)}"
    if head_dim > FLASH_MAX_HEAD_DIM or head_dim % 8:
        return (
            f"FlashAttention takes head dimensions that 8 divides, up to {FLASH_MAX_HEAD_DIM}, "
            f"and the model has {head_dim}"
        )
    if major < 8:
        return f"FlashAttention needs compute capability 8.0 or more, and the device has {major}.x"
    return None


def _flex_refusal(name: str, dtype: torch.dtype, head_dim: int) -> str | None:
    types = HALF if name == "flex_flash" else (torch.float32, *HALF)
    if dtype not in types:
        names = ", ".join(_name(each) for each in types)
        return f"it computes in {names}, and the model is {_name(dtype)}"
    if head_dim < FLEX_MIN_HEAD_DIM:
        return f"FlexAttention takes head dimensions from {FLEX_MIN_HEAD_DIM}, not {head_dim}"
    if name == "flex_flash" and head_dim > FLASH_MAX_HEAD_DIM:
        return f"it takes head dimensions up to {FLASH_MAX_HEAD_DIM}, not {head_dim}"
    if _dynamo_is_off():
        return (
            "FlexAttention without torch.compile builds all scores, and TORCHDYNAMO_DISABLE is "
            "set: unset it"
        )
    return None


def _package_refusal(name: str, major: int) -> str | None:
    """Of a kernel that needs a package: why it is not to be had."""
    if name not in _PACKAGES:
        return None
    module, source, majors = _PACKAGES[name]
    if not _installed(module):
        return f"it needs the module {module}, which is not installed ({source})"
    if major not in majors:
        able = " or ".join(f"{each}.x" for each in majors)
        return f"it needs compute capability {able}, and the device has {major}.x"
    return None


def _installed(module: str) -> bool:
    """Whether `module` is there, without importing it; its parents are imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _dynamo_is_off() -> bool:
    return bool(torch._dynamo.config.disable)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _make(name: str) -> Kernel:
    """The kernel; its module is imported only now, as some need what others do not."""
    if name == "tiled":
        return Tiled()
    if name == "sdpa":
        from megatron_bp.attention.kernels.sdpa import Sdpa

        return Sdpa()
    if name.startswith("flex"):
        from megatron_bp.attention.kernels.flex import Flex

        return Flex(name, "FLASH" if name == "flex_flash" else "TRITON")
    from megatron_bp.attention.kernels.flash import make_flash

    return make_flash(name)
