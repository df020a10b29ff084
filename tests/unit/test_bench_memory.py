"""The planner's memory against measured runs, and the runs themselves."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megatron_bp.arguments.flags import full_parser
from megatron_bp.planning.rates import Uncounted, read
from megatron_bp.tools.bench import memory
from megatron_bp.tools.bench.__main__ import main
from megatron_bp.tools.bench.memory_runs import RUNS, flags_of

FILE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "memory.json"
HELD_OUT = {
    "CSBP 4, 32K",
    "hybrid 4/2, 16K",
    "PP 2, 4K",
    "CSBP 2 with EP 2, 4K",
}
_, IN_USE = read()


def peaks() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads(FILE.read_text())["peaks"]
    return found


@cache
def errors(uncounted: Uncounted) -> dict[str, float]:
    """Of each measured run."""
    measured = peaks()
    return {
        one.name: memory.predicted(one, uncounted).total / measured[one.name]["peak_bytes"] - 1
        for one in RUNS
        if one.name in measured
    }


def test_every_run_is_within_15_percent_of_its_measured_peak() -> None:
    found = errors(IN_USE)
    assert len(found) >= 10
    assert max(abs(error) for error in found.values()) <= 0.15, found


def test_the_runs_that_are_held_out_are_those_that_were_named_before() -> None:
    assert {one.name for one in RUNS if one.held_out} == HELD_OUT <= set(peaks())


def test_held_out_runs_are_not_fitted_on() -> None:
    measured = peaks()
    fit = memory.fitted(measured)
    spoilt = {
        name: {"peak_bytes": (3 if name in HELD_OUT else 1) * told["peak_bytes"]}
        for name, told in measured.items()
    }
    assert memory.fitted(spoilt) == fit
    name = next(name for name in measured if name not in HELD_OUT)
    assert memory.fitted(spoilt | {name: {"peak_bytes": 10**10}}) != fit


def test_the_numbers_in_use_are_those_that_were_fitted() -> None:
    fit = memory.fitted(peaks())
    assert IN_USE.process == pytest.approx(fit.process, rel=0.02)
    assert IN_USE.slack == pytest.approx(fit.slack, rel=0.02)


@pytest.mark.parametrize("name", ["process", "slack"])
@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_either_number_a_fifth_off_is_seen_in_the_table(name: str, factor: float) -> None:
    off = replace(IN_USE, **{name: factor * getattr(IN_USE, name)})
    before, after = (
        sum(abs(error) for error in errors(u).values()) / len(errors(u)) for u in (IN_USE, off)
    )
    assert after > before + 0.02


def test_the_flags_of_a_run_are_what_the_planner_counts() -> None:
    parser = full_parser()
    for one in RUNS:
        args = parser.parse_args(flags_of(one))
        shape, layout = one.task.shape, one.layout
        assert (args.num_layers, args.hidden_size) == (len(shape.layers), shape.hidden), one.name
        assert args.tensor_model_parallel_size == layout.tp
        assert args.pipeline_model_parallel_size == layout.pp
        assert (args.block_parallel_size, args.context_parallel_size) == (layout.bp, layout.cp)
        assert args.sequence_parallel == layout.sequence_parallel
        assert (args.recompute_granularity == "full") == (layout.recompute == "full")
        assert args.global_batch_size == layout.dp * layout.micro_batches * layout.micro_batch


def test_known_peaks_make_a_table_with_nothing_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["memory", "--runs", "--known", str(FILE)])
    told = capsys.readouterr().out
    rows = [line for line in told.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(peaks())
    assert sum("(held out)" in row for row in rows) == len(HELD_OUT)
    assert re.search(r"Largest error: [\d.]+ %, of runs held out [\d.]+ %\.", told)


def test_a_run_that_there_is_none_of(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="--runs 'large': there is none; there are single 8K, "):
        main(["memory", "--runs", "large"])
