"""Rates of a machine from what `bench` measured there, in place of the fitted ones.

`bench attention` tells how fast attention is, `bench step` how fast a whole step: what attention
does not explain of it is products. A rate that no file tells stays as it was.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from megatron_bp.planning.hardware import Gpu
from megatron_bp.planning.rates import Rates

ATTENTION = 14  # FLOPs of a pair, head and channel: forward 4, backward 10
OURS = "block diffusion"
BASELINES = ("causal", "plain causal", "dense mask", "plain dense mask")


def read_bench(paths: Iterable[Path], gpu: Gpu, rates: Rates) -> tuple[Rates, str]:
    """(the rates, where they come from in words).

    Args:
        paths: JSON files of `bench attention` or `bench step`.
        gpu: whose data sheet they are parts of.
        rates: what stays where nothing was measured.

    Raises:
        ValueError: a file cannot be read, or is none of these.
    """
    told, steps = [], []
    for path in paths:
        content = _read(path)
        longest = max(content["sizes"], key=lambda size: size["length"])
        if "passes" in longest and "heads" in content and isinstance(content["heads"], list):
            rate = _attention(content, longest, path) / gpu.peak(_bytes(content))
            rates = replace(rates, attention=rate, combined_attention=rate)
            told.append(f"attention {rate:.0%} ({path.name})")
        elif OURS in longest.get("ways", {}):
            steps.append((path, content, longest))
        else:
            raise ValueError(
                f"--rates {path}: no measurement of attention or of a step; give the JSON of "
                f"`bench attention` or `bench step`"
            )
    for path, content, longest in steps:  # once attention's rate is known
        peak = gpu.peak(_bytes(content))
        rate = _products(content, longest, rates.attention * peak, path) / peak
        rates = replace(rates, products=rate)
        told.append(f"products {rate:.0%} ({path.name})")
    return rates, ", ".join(told)


def _read(path: Path) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--rates {path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict) or not content.get("sizes"):
        raise ValueError(f"--rates {path}: holds no `sizes`; give the JSON of `bench`")
    return content


def _bytes(content: dict[str, Any]) -> int:
    return 2 if content.get("dtype") in ("bfloat16", "float16") else 4


def _attention(content: dict[str, Any], size: dict[str, Any], path: Path) -> float:
    """FLOPs a second of the fastest of our kernels, forward and backward."""
    ways = size["passes"].get("forward and backward", {})
    heads, _, dim = content["heads"]
    found = [
        ATTENTION * heads * dim * median(way["pairs"]) / median(way["seconds"])
        for name, way in ways.items()
        if name not in BASELINES and "Flex" not in name and way.get("seconds")
    ]
    if not found:
        raise ValueError(f"--rates {path}: no kernel was measured forward and backward")
    return float(max(found))


def _products(content: dict[str, Any], size: dict[str, Any], attention: float, path: Path) -> float:
    """FLOPs a second of products, head and all else, in what attention leaves of a step."""
    way = size["ways"][OURS]
    pairs = ATTENTION * way["pairs"] * content["heads"] * content["head_dim"] * content["layers"]
    left = median(way["seconds"]) - pairs / attention
    if left <= 0:
        raise ValueError(
            f"--rates {path}: attention alone would take longer than the step that was measured "
            f"({median(way['seconds']):.2f} s): measure both on one machine, and give both files"
        )
    return float(6 * size["weights"] * way["rows"] / left)
