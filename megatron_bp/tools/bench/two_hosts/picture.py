"""Draws the matched-time curve of a result of `bench hosts`.

    python -m megatron_bp.tools.bench.two_hosts.picture RESULT.json PREFIX

makes PREFIX.png and PREFIX.svg. Needs matplotlib, the extra `plot`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_bp import picture


def draw(result: dict[str, Any], prefix: str) -> list[str]:
    """Write the picture; the files.

    Raises:
        ValueError: the result has no curve.
    """
    curve = result["curve"]
    if not curve or not curve["forms"]:
        raise ValueError("the result has no curve: --curve-seconds was 0, or its runs failed")
    rate = result["rate"] * 8 / 1e6
    with picture.drawn(prefix, 4.2) as figure:
        axes = figure.subplots()
        for k, (name, points) in enumerate(curve["forms"].items()):
            label = f"{name} ({points[-1]['step']:.0f} steps)"
            x, y = ([point[key] for point in points] for key in ("seconds", "bits"))
            axes.plot(x, y, label=label, markersize=5, **picture.look(k))
        axes.set_xlabel(f"training time, s (two hosts, {rate:.0f} Mbit/s between them)")
        axes.set_ylabel(f"validation bound, bits per {curve['unit']}")
        axes.grid()
        axes.legend()
    return [str(file) for file in picture.files(prefix)]


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the result that is named."""
    parser = argparse.ArgumentParser("python -m megatron_bp.tools.bench.two_hosts.picture")
    parser.add_argument("result", type=Path)
    parser.add_argument("prefix")
    options = parser.parse_args(argv)
    try:
        files = draw(json.loads(options.result.read_text(encoding="utf-8")), options.prefix)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"picture: error: {error}")
    print(f"picture: {', '.join(files)}")


if __name__ == "__main__":
    main()
