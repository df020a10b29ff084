"""The few numbers that are measured, not counted: how fast, and what memory nobody counts.

All of them stand in rates.yaml beside this file, with where they come from.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Rates:
    """How fast.

    Attributes:
        products: products of rows with weights, as a part of the data sheet's peak.
        attention: attention by this project's kernels and by CSBP's in the paper, likewise.
        combined_attention: attention over combined rows, as the paper's conventional CP does it.
        link: bytes a second of K/V and their gradients that a GPU waits for, as a part of the data
            sheet's link between nodes.
    """

    products: float
    attention: float
    combined_attention: float
    link: float


@dataclass(frozen=True)
class Uncounted:
    """Memory beyond tensors that are counted.

    Attributes:
        process: bytes of a process before a model is made (CPU: its resident set, libraries
            included; on GPUs it lies outside of what torch's allocator reports).
        slack: of activations and buffers, as a factor: what allocators hold beyond what is used.
    """

    process: int
    slack: float


def read(path: Path = FILE) -> tuple[Rates, Uncounted]:
    """The numbers of a file.

    Raises:
        ValueError: one is missing, unknown or not a positive number.
    """
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return (
        Rates(**_numbers(path, content, "rates", Rates)),
        Uncounted(**_numbers(path, content, "uncounted", Uncounted)),
    )


def _numbers(path: Path, content: Any, section: str, kind: type) -> dict[str, Any]:
    values = content.get(section) if isinstance(content, dict) else None
    names = [field.name for field in fields(kind)]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise ValueError(f"{path}: {section} must hold {', '.join(names)}; it has {values}")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{path}: {section}: {name}: {value}: must be a number above 0")
    return values
