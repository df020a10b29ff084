"""Whole runs on a GPU have the losses of the same run on the CPU."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # before what takes long to import
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("megatron.core")
launch = pytest.importorskip("launch")

STEPS = 3
# 16 per head: FlexAttention takes no less.
SIZES = ["--hidden-size", "64", "--seq-length", "96", "--train-iters", str(STEPS)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return launch.make_data(tmp_path_factory.mktemp("data") / "made")


def losses(data: list[str], folder: Path, *flags: str, **environment: str) -> list[float]:
    folder.mkdir()
    arguments = [*data, *SIZES, "--save", str(folder), *flags]
    run = launch.Run(1, arguments, folder / "output", TORCHDYNAMO_DISABLE="0", **environment)
    try:
        assert run.end(420) == 0, run.output[-4000:]
    finally:
        run.clean_up()
    found = launch.losses(folder)
    return [found[step] for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def on_cpu(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(data, tmp_path_factory.mktemp("cpu") / "run")


@pytest.mark.parametrize(
    ("kernel", "flags", "bound"),
    [
        ("tiled", (), 1e-4),
        ("flex", (), 1e-4),
        ("flash", ("--bf16",), 2e-2),
        ("auto", ("--bf16",), 2e-2),
    ],
    ids=["tiled", "flex", "flash", "auto"],
)
def test_losses_of_a_run(
    kernel: str,
    flags: tuple[str, ...],
    bound: float,
    data: list[str],
    on_cpu: list[float],
    tmp_path: Path,
) -> None:
    chosen = ("--attention-kernel", kernel, *flags)
    got = losses(data, tmp_path / "run", *chosen, CUDA_VISIBLE_DEVICES="0")
    assert got == pytest.approx(on_cpu, rel=bound)
