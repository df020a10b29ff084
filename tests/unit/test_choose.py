"""Which kernel is taken for which hardware, and what is refused with which way out."""

import pytest
import torch

from megatron_bp.attention.kernels import choose as module
from megatron_bp.attention.kernels.choose import choose, refusal

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)
REALLY_INSTALLED = module._installed


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_dynamo_is_off", lambda: False)
    monkeypatch.setattr(module, "_installed", lambda name: False)


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "capability", "kernel"),
    [
        ("cpu", F32, 64, None, "sdpa"),
        ("cpu", BF16, 512, None, "sdpa"),
        ("cpu", F64, 24, None, "sdpa"),
        ("cuda", BF16, 128, HOPPER, "flash"),
        ("cuda", F16, 256, AMPERE, "flash"),
        ("cuda", BF16, 512, HOPPER, "flex"),
        ("cuda", BF16, 100, HOPPER, "flex"),
        ("cuda", F32, 128, HOPPER, "flex"),
        ("cuda", F16, 64, TURING, "flex"),
        ("cuda", F64, 64, HOPPER, "tiled"),
        ("cuda", BF16, 12, HOPPER, "tiled"),
    ],
)
def test_auto_takes_what_the_hardware_can(
    device: str, dtype: torch.dtype, dim: int, capability: tuple[int, int] | None, kernel: str
) -> None:
    assert choose("auto", device, dtype, dim, capability).name == kernel


@pytest.mark.parametrize(
    ("name", "device", "dtype", "dim", "capability", "says"),
    [
        ("fast", "cpu", F32, 64, None, r"no such kernel; use one of auto, tiled, sdpa"),
        ("sdpa", "cuda", BF16, 64, HOPPER, r"on CUDA; use --attention-kernel flash"),
        ("flash", "cpu", BF16, 64, None, r"on the CPU; use --attention-kernel sdpa"),
        ("flex", "cpu", BF16, 64, None, r"on the CPU; use --attention-kernel sdpa"),
        ("flash", "cuda", F32, 64, HOPPER, r"model is float32; use --attention-kernel flex"),
        ("flash", "cuda", BF16, 512, HOPPER, r"up to 256, and the model has 512; use .* flex"),
        ("flash", "cuda", BF16, 100, HOPPER, r"8 divides, .* has 100; use --attention-kernel flex"),
        ("flash", "cuda", F16, 64, TURING, r"capability 8.0 or more, and the device has 7.x"),
        ("flash_fa3", "cuda", BF16, 64, HOPPER, r"flash_attn_interface, which is not installed"),
        ("flash_fa4", "cuda", BF16, 64, HOPPER, r"flash_attn.cute.interface, which is not inst"),
        ("flash4", "cuda", BF16, 64, HOPPER, r"not installed \(pip install 'megatron-bp\[flash\]"),
        ("flex_flash", "cuda", BF16, 64, HOPPER, r"not installed .*; use --attention-kernel flash"),
        ("flex_flash", "cuda", F32, 64, HOPPER, r"in float16, bfloat16, and the model is float32"),
        ("flex_flash", "cuda", BF16, 512, HOPPER, r"up to 256, not 512; use .* flex"),
        ("flex", "cuda", F64, 64, HOPPER, r"the model is float64; use --attention-kernel tiled"),
        ("flex", "cuda", BF16, 8, HOPPER, r"from 16, not 8"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused(
    name: str,
    device: str,
    dtype: torch.dtype,
    dim: int,
    capability: tuple[int, int] | None,
    says: str,
) -> None:
    with pytest.raises(ValueError, match=rf"^--attention-kernel {name}: .*{says}"):
        choose(name, device, dtype, dim, capability)


def test_a_package_is_no_help_on_an_old_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_installed", lambda name: True)
    assert refusal("flash_fa3", "cuda", BF16, 64, 9) is None
    assert "9.x, and the device has 10.x" in str(refusal("flash_fa3", "cuda", BF16, 64, 10))
    assert "9.x or 10.x, and" in str(refusal("flash4", "cuda", BF16, 64, 8))


def test_flex_is_refused_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_dynamo_is_off", lambda: True)
    with pytest.raises(ValueError, match="TORCHDYNAMO_DISABLE is set: unset it"):
        choose("flex", "cuda", F32, 64, HOPPER)


def test_tiled_is_never_refused() -> None:
    for device in ("cpu", "cuda"):
        for dtype in (F64, F32, F16, BF16):
            assert choose("tiled", device, dtype, 7, TURING).name == "tiled"


def test_an_installed_package_is_seen() -> None:
    assert REALLY_INSTALLED("torch.nn.functional")
    assert not REALLY_INSTALLED("torch.nn.no_such_module")
    assert not REALLY_INSTALLED("no_such_package.cute.interface")
