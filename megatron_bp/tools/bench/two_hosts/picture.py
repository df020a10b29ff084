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

# Okabe and Ito's colours, which colour-blind people tell apart; line and marker differ as well.
LOOKS = (
    {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#009E73", "marker": "^", "linestyle": ":"},
)


def draw(result: dict[str, Any], prefix: str) -> list[str]:
    """Write the picture; the files.

    Raises:
        ValueError: the result has no curve.
    """
    curve = result["curve"]
    if not curve or not curve["forms"]:
        raise ValueError("the result has no curve: --curve-seconds was 0, or its runs failed")
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "two_hosts"  # the same picture, the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for (name, points), look in zip(curve["forms"].items(), LOOKS, strict=False):
        label = f"{name} ({points[-1]['step']:.0f} steps)"
        x, y = ([point[key] for point in points] for key in ("seconds", "bits_per_byte"))
        axes.plot(x, y, label=label, markersize=5, **look)
    rate = result["rate"] * 8 / 1e6
    axes.set_xlabel(f"training time, s (two hosts, {rate:.0f} Mbit/s between them)")
    axes.set_ylabel("validation bound, bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    files = [f"{prefix}.png", f"{prefix}.svg"]
    figure.savefig(files[0], dpi=160)
    figure.savefig(files[1], metadata={"Date": None})
    pyplot.close(figure)
    return files


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the result that is named."""
    parser = argparse.ArgumentParser("python -m megatron_bp.tools.bench.two_hosts.picture")
    parser.add_argument("result", type=Path)
    parser.add_argument("prefix")
    options = parser.parse_args(argv)
    try:
        files = draw(json.loads(options.result.read_text(encoding="utf-8")), options.prefix)
    except ImportError:
        sys.exit('picture: error: no matplotlib here: .venv/bin/pip install -e ".[plot]"')
    except (OSError, ValueError) as error:
        sys.exit(f"picture: error: {error}")
    print(f"picture: {', '.join(files)}")


if __name__ == "__main__":
    main()
