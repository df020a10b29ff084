"""What an evaluation says: mean, standard error, and where it is a bound."""

import math
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from megatron_bp.training.evaluate import as_row, estimate

NAN = math.nan


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- mean and standard error ---------------------------------------------------------------------


def test_by_hand_with_equal_counts() -> None:
    """Sums 2, 4, 9 over 1 token each: mean 5, variance 13, error sqrt(13 / 3)."""
    got = estimate(column(2, 4, 9), column(1, 1, 1), 1)
    assert (got.mean, got.samples, got.draws) == (5.0, 3, 1)
    assert got.error == pytest.approx(math.sqrt(13 / 3))


def test_by_hand_with_unequal_counts() -> None:
    """15 / 6 = 2.5; residuals 0.5, -1, 0.5, sum of squares 1.5, x 3/2, root 1.5, over 6."""
    got = estimate(column(3, 4, 8), column(1, 2, 3), 1)
    assert got.mean == 2.5
    assert got.error == pytest.approx(math.sqrt(1.5 * 3 / 2) / 6)


def test_a_mean_of_means_is_something_else() -> None:
    assert estimate(column(1, 1, 1, 6), column(1, 1, 1, 3), 1).mean == 9 / 6


def test_draws_of_a_sample_are_averaged_first() -> None:
    """Draw after draw: samples A and B have sums (1, 3) and (5, 9), so 2 and 7."""
    got = estimate(column(1, 5, 3, 9), column(1, 1, 1, 1), 2)
    want = estimate(column(2, 7), column(1, 1), 1)
    assert (got.mean, got.error, got.samples, got.draws) == (4.5, want.error, 2, 2)
    assert got.error == pytest.approx(2.5)


def test_more_draws_of_the_same_noise_change_nothing() -> None:
    sums, counts = column(3, 4, 8), column(1, 2, 3)
    one, four = estimate(sums, counts, 1), estimate(sums.repeat(4), counts.repeat(4), 4)
    assert (one.mean, one.error) == pytest.approx((four.mean, four.error))


@pytest.mark.parametrize("draws", [1, 4])
def test_the_error_is_the_spread_of_the_mean_over_data_sets(draws: int) -> None:
    """Simulated: 3,000 evaluations of 60 texts whose sums grow with their counts."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    texts, runs = 60, 3000
    counts = torch.randint(20, 200, (runs, texts), generator=generator).double()
    level = 2.0 + 0.3 * normal(runs, texts)  # of each text, the same in all its draws
    noise = 0.5 * normal(runs, draws, texts)
    sums = counts[:, None] * (level[:, None] + noise)
    got = [
        estimate(s.flatten(), c.expand(draws, -1).flatten(), draws)
        for s, c in zip(sums, counts, strict=True)
    ]
    means = column(*(e.mean for e in got))
    errors = column(*(e.error for e in got))
    assert means.mean().item() == pytest.approx(2.0, abs=4 * means.std().item() / runs**0.5)
    assert errors.mean().item() == pytest.approx(means.std().item(), rel=0.05)
    inside = ((means - 2.0).abs() < 1.96 * errors).double().mean().item()
    assert 0.92 < inside < 0.96


def test_a_single_sample_has_no_error() -> None:
    got = estimate(column(6, 8), column(2, 2), 2)
    assert (got.mean, got.samples) == (3.5, 1)
    assert math.isnan(got.error)


def test_nothing_counted_is_0_without_an_error() -> None:
    got = estimate(column(0, 0), column(0, 0), 1)
    assert got.mean == 0.0
    assert math.isnan(got.error)


def test_a_sample_with_nothing_counted_pulls_nothing() -> None:
    got, want = (
        estimate(column(2, 0, 4), column(1, 0, 1), 1),
        estimate(column(2, 4), column(1, 1), 1),
    )
    assert got.mean == want.mean == 3.0


# --- as fields of a row --------------------------------------------------------------------------


def samples(bytes_of_text: tuple[float, float, float] = (2, 4, 6)) -> Tensor:
    return torch.stack([column(3, 4, 8), column(1, 2, 3), column(*bytes_of_text)], dim=1)


def test_a_bound_is_told_in_bits_per_token_and_per_byte() -> None:
    row = as_row(samples(), 1, True)
    error = math.sqrt(1.5 * 3 / 2) / 6
    assert row == {
        "samples": 3,
        "draws": 1,
        "standard_error": pytest.approx(error),
        "bound_bits_per_token": pytest.approx(2.5 / math.log(2)),
        "bound_bits_per_token_error": pytest.approx(error / math.log(2)),
        "bound_bits_per_byte": pytest.approx(1.25 / math.log(2)),
        "bound_bits_per_byte_error": pytest.approx(error / 2 / math.log(2)),
    }


def test_what_is_no_bound_is_not_called_one() -> None:
    row = as_row(samples(), 1, False)
    assert row.keys() == {"samples", "draws", "standard_error"}
    assert row["standard_error"] == pytest.approx(math.sqrt(2.25) / 6)


@pytest.mark.parametrize("bytes_of_text", [(2, NAN, 6), (NAN, NAN, NAN), (0, 0, 0)])
def test_without_known_bytes_there_is_no_bound_per_byte(
    bytes_of_text: tuple[float, float, float],
) -> None:
    row = as_row(samples(bytes_of_text), 1, True)
    assert row["bound_bits_per_token"] == pytest.approx(2.5 / math.log(2))
    assert not [name for name in row if "byte" in name]


def test_a_single_sample_has_null_errors() -> None:
    row = as_row(samples()[:1], 1, True)
    assert row["samples"] == 1
    errors = [row[name] for name in row if "error" in name]
    assert errors == [None, None, None]
    assert row["bound_bits_per_byte"] == pytest.approx(1.5 / math.log(2))


def test_draws_count_text_once() -> None:
    row = as_row(samples().repeat(2, 1), 2, True)
    want = as_row(samples(), 1, True)
    assert (row["samples"], row["draws"]) == (3, 2)
    assert row["bound_bits_per_byte"] == pytest.approx(want["bound_bits_per_byte"])
    assert row["standard_error"] == pytest.approx(want["standard_error"])


def test_an_evaluation_that_counts_nothing_bounds_nothing() -> None:
    row = as_row(torch.zeros(3, 3, dtype=torch.float64), 1, True)
    assert row == {"samples": 3, "draws": 1, "standard_error": None}


@pytest.mark.parametrize(
    ("samples", "ranks", "run", "batch", "steps"),
    [
        (12, 1, {"global_batch_size": 8}, 6, 2),
        (12, 2, {"global_batch_size": 8}, 6, 2),
        (12, 4, {"global_batch_size": 2, "block_parallel_size": 2}, 2, 6),
        (7, 1, {"global_batch_size": 4}, 1, 7),
        (1000, 2, {"global_batch_size": 4, "eval_global_batch_size": 100}, 100, 10),
        (4, 4, {}, 4, 1),
    ],
)
def test_rows_asked_for_are_read_in_steps_no_larger_than_the_runs(
    samples: int, ranks: int, run: dict[str, int], batch: int, steps: int
) -> None:
    """Host memory then does not grow with the number of rows."""
    from megatron_bp.tools.evaluate import evaluation_flags, parse

    options = parse(["runs/mine", "--data", "data", "--samples", str(samples)])
    flags = evaluation_flags(run, options, ranks)
    at = flags.index("--eval-iters")
    assert flags[at - 2 : at + 2] == [
        "--eval-global-batch-size",
        str(batch),
        "--eval-iters",
        str(steps),
    ]


@pytest.mark.parametrize("samples", [0, -2, 3])
def test_rows_that_the_ranks_cannot_share_are_refused(samples: int) -> None:
    from megatron_bp.tools.evaluate import evaluation_flags, parse

    options = parse(["runs/mine", "--data", "data", f"--samples={samples}"])
    with pytest.raises(ValueError, match=f"--samples {samples}: 2 ranks .* multiple of 2"):
        evaluation_flags({}, options, 2)


# --- the command line of tools/evaluate ----------------------------------------------------------


def flags_on_rank(rank: int, world: int, given: dict[str, Any], ranks: int) -> list[str]:
    from megatron_bp.tools.evaluate import evaluation_flags, parse

    return evaluation_flags(given, parse(["runs/a", "--data", "data/a"]), ranks)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("given", "ranks", "degrees"),
    [
        ({"block_parallel_size": 4, "context_parallel_size": 2}, 4, {"block": "4", "context": "2"}),
        ({"block_parallel_size": 4, "context_parallel_size": 2}, 2, {"block": "2"}),
        ({"block_parallel_size": 2, "context_parallel_size": 1}, 4, {"block": "2", "context": "1"}),
        ({"context_parallel_size": 2, "cp_comm_type": "all_gather"}, 2, {"context": "2"}),
        ({"context_parallel_size": 2, "cp_comm_type": "all_gather"}, 1, {"block": "1"}),
        ({}, 3, {}),
    ],
)
def test_a_run_of_any_mode_is_evaluated_on_any_ranks(
    given: dict[str, Any], ranks: int, degrees: dict[str, str]
) -> None:
    """On ranks that the run's own degrees do not fit, all share each sequence as in CSBP."""
    (flags,) = run_ranks(1, flags_on_rank, given, ranks)
    told = dict(flag.split("=", 1) for flag in flags if "=" in flag)
    want = {f"--{name}-parallel-size": value for name, value in degrees.items()}
    assert {k: v for k, v in told.items() if k.endswith("-parallel-size")} == want
    assert ("--cp-comm-type" in told) == (degrees == {"context": "2"})


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("run", "ranks", "kept"),
    [
        ({"block_parallel_size": 2, "expert_model_parallel_size": 2}, 1, False),
        ({"block_parallel_size": 2, "expert_model_parallel_size": 2}, 2, True),
        ({"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 2, False),
        ({"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 4, True),
    ],
)
def test_experts_are_shared_as_far_as_the_ranks_allow(
    run: dict[str, Any], ranks: int, kept: bool
) -> None:
    (flags,) = run_ranks(1, flags_on_rank, run, ranks)
    assert any(flag.startswith("--expert-model-parallel-size") for flag in flags) == kept


@pytest.mark.ranks
def test_the_runs_own_batch_is_that_of_the_evaluation() -> None:
    """Rows of a training micro-batch and the training batch bind an evaluation to nothing."""
    run = {"global_batch_size": 6, "micro_batch_size": 2}
    (flags,) = run_ranks(1, flags_on_rank, run, 3)
    assert "--eval-global-batch-size=6" in flags
    assert not any(flag.startswith("--micro-batch-size") for flag in flags)
    assert flags[flags.index("--global-batch-size") + 1] == "3"  # a row on each rank
