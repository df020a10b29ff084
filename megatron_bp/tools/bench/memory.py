"""Peak memory of real training runs on the CPU, against what the planner counts.

Each run is pretrain_bdlm.py with so many ranks, two steps of rows that are one document each. The
peak is that of the resident set of the rank that holds most. The planner's two measured numbers are
fitted on the runs that are not held out. By default glibc keeps freed memory of up to 32 MiB a
tensor; here it is told to give back what is larger than 1 MiB, so that what a run needs is
measured. With --twice each is run without that, too.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_bp.planning.counts import count, full_rows, options_of
from megatron_bp.planning.memory import AT_WORK, STEADY, Memory, peak
from megatron_bp.planning.rates import Uncounted, read
from megatron_bp.sequence.plan import make_plan
from megatron_bp.tools.bench import memory_measure
from megatron_bp.tools.bench.machine import processor
from megatron_bp.tools.bench.memory_runs import RUNS, Run
from megatron_bp.tools.bench.turns import table

FIELDS = ("peak_bytes", "kept_by_glibc_bytes")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--runs", nargs="*", metavar="NAME", help="which; default all, none if no name follows")
    add("--known", type=Path, metavar="FILE", help="an earlier JSON, for the other runs")
    add("--twice", action="store_true", help="also with glibc as it is by default")
    add("--timeout", type=float, default=900.0, help="seconds of a run, default 900")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The result, as JSON.

    Raises:
        ValueError: there is no run of a name, or one failed.
    """
    known = {one.name: one for one in RUNS}
    names = list(known) if options.runs is None else options.runs
    for name in names:
        if name not in known:
            raise ValueError(f"--runs {name!r}: there is none; there are {', '.join(known)}")
    peaks: dict[str, dict[str, int]] = {}
    if options.known is not None:
        peaks = json.loads(options.known.read_text(encoding="utf-8"))["peaks"]
    for name in names:
        found = dict(peaks.get(name, {}))
        for field, gives_back in zip(FIELDS, (True, False), strict=True):
            if gives_back or options.twice:
                found[field] = memory_measure.peak(known[name], options.timeout, gives_back)
        peaks[name] = found
    return {"machine": processor(), "peaks": {n: peaks[n] for n in known if n in peaks}}


def predicted(run: Run, uncounted: Uncounted) -> Memory:
    """What the planner counts for the rank that holds most."""
    task, layout = run.task, run.layout
    plan = make_plan(full_rows(task.length), options_of(task.sequence, layout))
    windows = {x.attention.window for x in task.shape.layers if x.attention is not None}
    return peak(task, layout, count(plan, layout, windows), uncounted)


def fitted(peaks: dict[str, dict[str, int]]) -> Uncounted:
    """The two numbers with the least sum of squared relative errors, held-out runs left out.

    An allocator holds no less than what is used, so slack is at least 1. Of fewer than two runs
    nothing can be fitted: those in use.
    """
    rows, wanted = [], []
    for one in RUNS:
        if one.held_out or one.name not in peaks:
            continue
        measured = peaks[one.name]["peak_bytes"]
        parts = predicted(one, Uncounted(1, 1.0)).parts
        steady = sum(parts[name] for name in STEADY)
        rows.append([1 / measured, sum(parts[name] for name in AT_WORK) / measured])
        wanted.append(1 - steady / measured)
    if len(rows) < 2:
        return read()[1]
    factors, target = np.array(rows), np.array(wanted)
    process, slack = np.linalg.lstsq(factors, target, rcond=None)[0]
    if slack < 1:
        left = target - factors[:, 1]
        process, slack = factors[:, 0] @ left / (factors[:, 0] @ factors[:, 0]), 1.0
    return Uncounted(round(process), round(slack, 3))


def lines(result: dict[str, Any]) -> list[str]:
    """The result as a Markdown table."""
    _, uncounted = read()
    fit = fitted(result["peaks"])
    rows, errors = [], {False: [0.0], True: [0.0]}
    for one in RUNS:
        if one.name not in result["peaks"]:
            continue
        told = result["peaks"][one.name]
        measured, by_default = told["peak_bytes"], told.get("kept_by_glibc_bytes")
        found = predicted(one, uncounted)
        above = (found.total - uncounted.process) / (measured - uncounted.process) - 1
        errors[one.held_out].append(abs(found.total / measured - 1))
        rows.append(
            [
                one.name + (" (held out)" if one.held_out else ""),
                str(one.layout.gpus),
                f"{measured / 1e6:,.0f}",
                f"{found.total / 1e6:,.0f}",
                f"{100 * (found.total / measured - 1):+.1f} %",
                f"{100 * above:+.1f} %",
                f"{by_default / 1e6:,.0f}" if by_default else "-",
            ]
        )
    head = ["run", "ranks", "measured, MB", "predicted, MB", "error", "error above process"]
    return [
        f"{result['machine']}; process {uncounted.process / 1e6:,.0f} MB, slack "
        f"{uncounted.slack:g}; a fit on these runs gives {fit.process / 1e6:,.0f} MB and "
        f"{fit.slack:g}",
        "",
        *table([*head, "measured as glibc is by default, MB"], rows),
        "",
        f"Largest error: {100 * max(errors[False]):.1f} %, of runs held out "
        f"{100 * max(errors[True]):.1f} %.",
    ]
