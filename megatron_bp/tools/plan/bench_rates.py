"""Rates of a machine from what `bench` measured there, in place of the fitted ones.

`bench step` gives one rate to products and attention together, which a step cannot tell apart;
`bench attention` one to attention alone. A rate that no file tells stays as it was.
"""

import json
import math
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
    found: dict[str, float] = {}
    told = []
    for path in paths:
        try:
            attention, rate = _rate(path, gpu)
        except (LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise ValueError(
                f"--rates {path}: is no complete measurement ({type(error).__name__}: {error}); "
                f"give the JSON of `bench attention` or `bench step` as it was written"
            ) from error
        if not 0 < rate < math.inf:
            raise ValueError(f"--rates {path}: gives {rate:.0%} of the peak; measure again")
        if attention:
            found["attention"] = rate
            told.append(f"attention {rate:.0%} of the peak ({path.name})")
        else:
            found = {"products": rate, "attention": rate} | found
            told.append(f"a whole step {rate:.0%} of the peak ({path.name})")
    return replace(rates, **found), ", ".join(told)


def _rate(path: Path, gpu: Gpu) -> tuple[bool, float]:
    """(whether of attention alone, part of the peak) at the longest rows of a file."""
    content = _read(path)
    longest = max(content["sizes"], key=lambda size: size["length"])
    peak = gpu.peak(_bytes(content))
    if "passes" in longest and isinstance(content.get("heads"), list):
        return True, _attention(content, longest, path) / peak
    if OURS in longest.get("ways", {}):
        return False, _step(content, longest) / peak
    raise ValueError(
        f"--rates {path}: no measurement of attention or of a step; give the JSON of "
        f"`bench attention` or `bench step`"
    )


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
    heads, dim = content["heads"][0], content["heads"][-1]
    found = [
        ATTENTION * heads * dim * median(way["pairs"]) / median(way["seconds"])
        for name, way in ways.items()
        if name not in BASELINES and "Flex" not in name and way.get("seconds")
    ]
    if not found:
        raise ValueError(f"--rates {path}: no kernel was measured forward and backward")
    return float(max(found))


def _step(content: dict[str, Any], size: dict[str, Any]) -> float:
    """FLOPs a second of a step, products, attention and all."""
    way = size["ways"][OURS]
    pairs = ATTENTION * way["pairs"] * content["heads"] * content["head_dim"] * content["layers"]
    return float((6 * size["weights"] * way["rows"] + pairs) / median(way["seconds"]))
