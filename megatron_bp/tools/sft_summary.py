"""Fine-tuning on chats in a few lines: bounds on held-out answers before and after, and the rows.

`python -m megatron_bp.tools.sft_summary RUN` reads RUN/metrics.jsonl and RUN/before.jsonl, which an
evaluation of the checkpoint that the run starts from has written (--skip-train --metrics-file).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_bp.training.record import read_metrics

SAME = ("samples", "draws", "diffusion_count")  # of two evaluations of the same rows and noise


def summarize(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(name, value) lines of the table.

    Args:
        before: metrics of the evaluation before the first step.
        rows: metrics of the run.

    Raises:
        ValueError: a bound is missing, or the two are not of the same rows.
    """
    first, last = _bound(before, "before.jsonl"), _bound(rows, "metrics.jsonl")
    if [first[name] for name in SAME] != [last[name] for name in SAME]:
        told = ", ".join(f"{name} {first[name]} and {last[name]}" for name in SAME)
        raise ValueError(
            f"the evaluations before and after are not of the same rows ({told}): run both with "
            f"the same data, --split, --eval-iters and --eval-draws"
        )
    steps = [r for r in rows if r["kind"] == "train"]
    tokens, answers, of_all = (
        sum(r[key] for r in steps) for key in ("clean_tokens", "diffusion_count", "rows")
    )
    if not tokens:
        raise ValueError("metrics.jsonl has no training step")
    lines = [
        (f"bound on held-out answers, {when}, {_told(r, unit)}", f"{_value(r, unit)} bits/{unit}")
        for unit in ("byte", "token")
        for when, r in (("before", first), (f"step {last['iteration']}", last))
    ]
    return [
        *lines,
        ("tokens trained on, prompts and answers", f"{tokens:,}"),
        ("of these in answers, supervised", f"{answers:,} ({answers / tokens:.1%})"),
        ("rows computed", f"{of_all:,}"),
        ("of these corrupted, answers alone", f"{answers:,}"),
        ("corrupted rows if prompts had them too", f"{tokens:,}"),
    ]


def _bound(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The last evaluation with a bound."""
    found = [r for r in rows if r["kind"] == "validation" and "bound_bits_per_byte" in r]
    if not found:
        raise ValueError(
            f"{name} has no validation bound in bits per byte: see --eval-iters, and data from "
            f"`python -m megatron_bp.tools.prepare --format chats`"
        )
    return found[-1]


def _told(row: dict[str, Any], unit: str) -> str:
    return f"{row['samples']} rows x {row['draws']} draws" if unit == "byte" else "end marks too"


def _value(row: dict[str, Any], unit: str) -> str:
    error = row[f"bound_bits_per_{unit}_error"]
    spread = "" if error is None else f" +- {error:.3f}"
    return f"{row[f'bound_bits_per_{unit}']:.3f}{spread}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; exit with 1 unless the bound fell.

    Rows and noise are the same before and after: the difference is surer than either error.
    """
    parser = argparse.ArgumentParser("python -m megatron_bp.tools.sft_summary", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run (its --save)")
    options = parser.parse_args(argv)
    try:
        before, rows = (read_metrics(options.run / f"{n}.jsonl") for n in ("before", "metrics"))
        table = summarize(before, rows)
    except (OSError, ValueError) as error:
        sys.exit(f"sft_summary: error: {error}")
    width = max(len(name) for name, _ in table)
    for name, value in table:
        print(f"  {name:<{width}}  {value:>26}")
    key = "bound_bits_per_byte"
    first, last = _bound(before, "before"), _bound(rows, "metrics")
    if not last[key] < first[key]:  # NaN too
        sys.exit(
            f"sft_summary: {last[key]:.3f} bits/byte after training is not below {first[key]:.3f} "
            f"before: the model did not learn"
        )


if __name__ == "__main__":
    main()
