"""A run in a few lines: its bounds against the data's unigram entropy, its speed and its traffic.

`python -m megatron_bp.tools.summary RUN --data PREFIX` reads RUN/metrics.jsonl and PREFIX.json;
with --bounds it tells every evaluation of one or several runs, to be laid side by side.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_bp.training.record import read_metrics


def summarize(rows: list[dict[str, Any]], data: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) lines of the table.

    Args:
        rows: the run's metrics, as `training.metrics` writes them.
        data: what `tools.prepare` says of the data.

    Raises:
        ValueError: the run has no training step or no validation bound.
    """
    steps = [r for r in rows if r["kind"] == "train"]
    bounds = [r for r in rows if r["kind"] == "validation" and "bound_bits_per_token" in r]
    if not steps or not bounds:
        raise ValueError(
            f"{len(steps)} training steps and {len(bounds)} validation bounds: run some of each "
            f"(--eval-interval, --eval-iters, --loss-weighting bound)"
        )
    missing = [key for key in ("tokens", "bytes", "unigram_bits_per_byte") if not data.get(key)]
    if missing:
        raise ValueError(
            f"the data's .json does not tell {', '.join(missing)}: it is written by `python -m "
            f"megatron_bp.tools.prepare`; prepare the data again"
        )
    per_byte = data.get("supervised_tokens", data["tokens"]) / data["bytes"]  # bytes of answers
    entropy = data["unigram_bits_per_byte"]
    first, last = (
        r.get("bound_bits_per_byte", r["bound_bits_per_token"] * per_byte)
        for r in (bounds[0], bounds[-1])
    )
    warm = steps[1:] or steps  # the first step after a start waits for much else

    def middle(key: str) -> float:
        return float(statistics.median(r[key] for r in warm))

    return [
        (f"validation bound, step {bounds[0]['iteration']}", f"{first:.3f} bits/byte"),
        (f"validation bound, step {bounds[-1]['iteration']}", f"{last:.3f} bits/byte"),
        ("unigram entropy of the data", f"{entropy:.3f} bits/byte"),
        ("last bound / unigram entropy", f"{last / entropy:.3f}"),
        ("clean tokens/s (median step)", f"{middle('clean_tokens_per_second'):,.0f}"),
        ("bytes exchanged per step, all ranks", f"{middle('bytes_sent'):,.0f}"),
        ("balance, worst/mean cost of a rank", f"{middle('balance'):.3f}"),
    ]


def bounds(name: str, rows: list[dict[str, Any]], per_byte: float) -> list[tuple[str, str]]:
    """(run and step, bound with its standard error) of each step that was evaluated.

    Args:
        name: of the run.
        rows: its metrics.
        per_byte: tokens a byte of the data, for bounds that are of tokens alone.

    Raises:
        ValueError: the run has no validation bound.
    """
    found = {
        r["iteration"]: r for r in rows if r["kind"] == "validation" and "bound_bits_per_token" in r
    }
    if not found:
        raise ValueError(f"{name} has no validation bound: see --eval-interval and --eval-iters")
    lines = []
    for step, row in sorted(found.items()):
        unit = "byte" if "bound_bits_per_byte" in row else "token"
        factor = 1.0 if unit == "byte" else per_byte
        bound, error = row[f"bound_bits_per_{unit}"], row[f"bound_bits_per_{unit}_error"]
        spread = "" if error is None else f" +- {error * factor:.3f}"
        lines.append((f"{name}, step {step}", f"{bound * factor:.3f}{spread} bits/byte"))
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; exit with 1 if the last bound is above --at-most x the entropy."""
    parser = argparse.ArgumentParser("python -m megatron_bp.tools.summary", description=__doc__)
    parser.add_argument("run", type=Path, nargs="+", help="folder of a run (its --save)")
    parser.add_argument("--data", required=True, metavar="PREFIX", help="prefix of the data")
    parser.add_argument("--at-most", type=float, metavar="X", help="fail if the ratio is larger")
    parser.add_argument("--bounds", action="store_true", help="every evaluation of each run")
    options = parser.parse_args(argv)
    if len(options.run) > 1 and not options.bounds:
        parser.error("several runs are laid side by side with --bounds; else give one")
    try:
        data = json.loads(Path(f"{options.data}.json").read_text(encoding="utf-8"))
        runs = [(run.name, read_metrics(run / "metrics.jsonl")) for run in options.run]
        if options.bounds:
            per_byte = data["tokens"] / data["bytes"]
            table = [line for name, rows in runs for line in bounds(name, rows, per_byte)]
        else:
            table = summarize(runs[0][1], data)
    except (OSError, ValueError) as error:
        sys.exit(f"summary: error: {error}")
    width = max(len(name) for name, _ in table)
    for name, value in table:
        print(f"  {name:<{width}}  {value:>18}")
    if options.bounds:
        return
    ratio = float(dict(table)["last bound / unigram entropy"])
    if options.at_most is not None and ratio > options.at_most:
        sys.exit(f"summary: the ratio {ratio} is above {options.at_most}: the model did not learn")


if __name__ == "__main__":
    main()
