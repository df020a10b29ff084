"""The paper's figures, as its authors published them.

From the abstract and the project page of arXiv 2609.19242, version 1: 16 x H200, block 256; each
clean token counts once. A later set of ratios has other runs behind it; none is mixed in here. Left
out: pure BP, of which the degree is not told, contiguous blocks, and drafters.
"""

from dataclasses import dataclass
from typing import Literal

GPUS = 16
PEAK = 989e12  # dense bfloat16 FLOP/s of an H200
NETWORK = 50e9  # bytes a second of a GPU to another node: 400 Gb/s
BLOCK = 256
K = 1024

Scheme = Literal["CP", "CSBP"]


@dataclass(frozen=True)
class Setting:
    """A model and how 16 GPUs share it; the slot works on one sequence.

    Attributes:
        shape: file in configs/shapes.
        slot: CP degree of the baseline and BP degree of CSBP.
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks.
        passes: see `Task`.
    """

    shape: str
    slot: int
    tp: int = 1
    ep: int = 1
    passes: Literal["one", "two"] = "one"

    @property
    def dp(self) -> int:
        """Replicas."""
        return GPUS // (self.slot * self.tp)


SETTINGS = {
    "Nemotron 3B": Setting("nemotron_3b", 4),
    "Nemotron 8B": Setting("nemotron_8b", 4),
    "Nemotron 14B": Setting("nemotron_14b", 8),
    "DiffusionGemma 26B-A4B": Setting("diffusion_gemma_26b_a4b", 8, ep=2, passes="two"),
    "Qwen3.8-27B": Setting("qwen3_8_27b", 8, tp=2),
    "Qwen3.5-27B": Setting("qwen3_8_27b", 8, tp=2),
}


@dataclass(frozen=True)
class Cell:
    """Tokens a second of a model at a context, by scheme; and peak memory in GiB where given."""

    model: str
    length: int
    tokens: dict[Scheme, int]
    peak: dict[Scheme, float] | None = None

    @property
    def setting(self) -> Setting:
        """Its layout."""
        return SETTINGS[self.model]


def _cell(
    model: str,
    length: int,
    cp: int,
    csbp: int,
    peak: tuple[float, float] | None = None,
) -> Cell:
    memory: dict[Scheme, float] | None = None
    if peak is not None:
        memory = {"CP": peak[0], "CSBP": peak[1]}
    return Cell(model, length * K, {"CP": cp, "CSBP": csbp}, memory)


CELLS = (
    _cell("Nemotron 3B", 256, 13_434, 16_027, (57.1, 57.0)),
    _cell("Nemotron 8B", 256, 9_668, 11_379, (97.5, 97.5)),
    _cell("Nemotron 14B", 64, 20_092, 22_152),
    _cell("Nemotron 14B", 128, 13_114, 15_136),
    _cell("Nemotron 14B", 256, 7_884, 9_301, (91.1, 90.6)),
    _cell("DiffusionGemma 26B-A4B", 64, 22_154, 27_653),
    _cell("DiffusionGemma 26B-A4B", 128, 14_584, 21_049),
    _cell("DiffusionGemma 26B-A4B", 256, 10_557, 15_359, (118.1, 113.6)),
    _cell("DiffusionGemma 26B-A4B", 512, 6_079, 9_815),
    _cell("Qwen3.8-27B", 64, 4_697, 5_905),
    _cell("Qwen3.8-27B", 128, 3_742, 4_853),
    _cell("Qwen3.8-27B", 256, 2_623, 3_490, (120.7, 111.1)),
    _cell("Qwen3.5-27B", 256, 2_641, 3_351, (120.7, 111.1)),
)


@dataclass(frozen=True)
class Times:
    """Where a step's time goes, in seconds; and GiB of K/V that a GPU sends.

    Attributes:
        step: all of it. Forward and backward were timed apart, and add up to a little more.
        forward: see there.
        backward: what is recomputed included.
        exposed: communication of attention that nothing hides.
        sent: of attention, by each GPU.
    """

    step: float
    forward: float
    backward: float
    exposed: float
    sent: float


TIMES: dict[str, dict[Scheme, Times]] = {
    "Nemotron 14B": {
        "CP": Times(66.50, 17.57, 49.46, 3.034, 210.00),
        "CSBP": Times(56.37, 13.00, 45.02, 2.414, 105.00),
    },
    "DiffusionGemma 26B-A4B": {
        "CP": Times(49.66, 10.99, 36.50, 10.939, 433.13),
        "CSBP": Times(34.13, 5.83, 26.62, 0.723, 28.30),
    },
}
