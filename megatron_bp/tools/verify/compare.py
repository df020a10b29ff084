"""How nearly a layout computes what the reference does, by name; pure functions of numbers.

A gradient's error is ||g - g0|| / ||g0|| of the whole parameter, in float64. Where ||g0|| is under
the floor, rounding of the sum that it is left of is too large a part of it for that ratio to be
held: such parameters are listed, may differ by the tolerance times a usual parameter's norm instead
of their own, and may be few.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

FP32 = 1e-5
# Of the usual norm, the root mean square over parameters. Layouts were seen to differ by 5e-9 of
# the usual norm in parameters whose own is small, which is 5e-6 of a norm at the floor.
FLOOR = 1e-3
FEW = 0.05  # of the parameters may be under the floor
# A 16-bit layout may err this many times as much as the 16-bit reference does against fp32.
BUDGET = 2.0
BF16_LOSS = 2.0**-9  # rounding of one bf16 number; of a loss, at least
# What the 16-bit reference itself may err: beyond, it is broken and no budget.
BF16_MOST_GRADIENT, BF16_MOST_STEP = 0.5, 0.1
VOCABULARY_ROWS = ("embedding.word_embeddings.weight", "output_layer.weight")

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What a layout left.

    Attributes:
        gradients: full name -> full tensor.
        rows: of the metrics file, one a step.
        vocabulary, padded: true and padded number of ids.
    """

    gradients: Mapping[str, Tensor]
    rows: Sequence[Row]
    vocabulary: int
    padded: int


@dataclass(frozen=True)
class GradientReport:
    """How the gradients compare.

    Attributes:
        errors: name -> relative error, of parameters at or above the floor.
        under_floor: name -> difference relative to the usual norm, of the others.
        floor: as a norm.
        failures: in words, each with the parameter's name.
    """

    errors: dict[str, float]
    under_floor: dict[str, float]
    floor: float
    failures: tuple[str, ...]

    @property
    def worst(self) -> tuple[str, float]:
        """Name and error of the worst parameter; ("", 0) if there is none."""
        return max(self.errors.items(), key=lambda item: _order(item[1]), default=("", 0.0))


@dataclass(frozen=True)
class StepReport:
    """How losses and norms compare: the largest relative differences of each step."""

    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    failures: tuple[str, ...]


def compare_gradients(
    got: Run, want: Run, tolerance: Callable[[str], float] = lambda name: FP32
) -> GradientReport:
    """Every parameter of `got` with that of `want`.

    Args:
        got: the layout.
        want: the reference.
        tolerance: largest relative error of a parameter.
    """
    failures = [f"{name} is missing" for name in sorted(want.gradients.keys() - got.gradients)]
    failures += [f"{name} is extra" for name in sorted(got.gradients.keys() - want.gradients)]
    norms = {name: _norm(_true_rows(name, g, want)) for name, g in want.gradients.items()}
    usual = math.sqrt(sum(n * n for n in norms.values()) / max(1, len(norms)))
    floor = FLOOR * usual
    errors: dict[str, float] = {}
    under: dict[str, float] = {}
    for name in sorted(want.gradients.keys() & got.gradients):
        mine, theirs = got.gradients[name], want.gradients[name]
        failures += [f"{name}: gradient in the padded rows"] * _has_padding(name, mine, got)
        mine, theirs = _true_rows(name, mine, got), _true_rows(name, theirs, want)
        if mine.shape != theirs.shape:
            failures.append(f"{name} is {[*mine.shape]}, not {[*theirs.shape]}")
            continue
        difference = _norm(mine.double() - theirs.double())
        if norms[name] < floor or norms[name] == 0:
            under[name] = difference / usual if usual else difference
            if not under[name] <= tolerance(name):
                failures.append(
                    f"{name} {under[name]:.1e} of the usual norm, its own being under the floor "
                    f"(at most {tolerance(name):.1e})"
                )
            continue
        errors[name] = difference / norms[name]
        if not errors[name] <= tolerance(name):
            failures.append(f"{name} {errors[name]:.1e} (at most {tolerance(name):.1e})")
    if len(under) > FEW * len(norms):
        failures.append(
            f"{len(under)} of {len(norms)} parameters are under the floor: too many to certify"
        )
    return GradientReport(errors, under, floor, tuple(failures))


def compare_steps(
    got: Sequence[Row], want: Sequence[Row], tolerance: Callable[[str], float] = lambda name: FP32
) -> StepReport:
    """Losses and gradient norms within a tolerance, counts and corruption exactly, of every step.

    Args:
        got: rows of the layout.
        want: rows of the reference.
        tolerance: largest relative difference of a field.
    """
    failures: list[str] = []
    if len(got) != len(want):
        failures.append(f"{len(got)} steps, not {len(want)}")
    loss: list[float] = []
    norm: list[float] = []
    for step, (mine, theirs) in enumerate(zip(got, want, strict=False), start=1):
        errors = {name: _relative(mine.get(name), theirs.get(name)) for name in _close(theirs)}
        loss.append(max((e for n, e in errors.items() if n != "grad_norm"), key=_order))
        norm.append(errors["grad_norm"])
        failures += [
            f"step {step}: {name} {mine.get(name)}, not {theirs[name]}"
            for name, error in errors.items()
            if not error <= tolerance(name)
        ]
        failures += [
            f"step {step}: {name} {mine.get(name)}, not {theirs[name]}"
            for name in _exact(theirs)
            if mine.get(name) != theirs[name]
        ]
    return StepReport(tuple(loss), tuple(norm), tuple(failures))


def bf16_gradient_tolerance(reference: GradientReport) -> Callable[[str], float]:
    """Twice what the 16-bit reference errs in that parameter, or in the median one if that is more.

    Args:
        reference: the 16-bit reference against the fp32 one.
    """
    errors = sorted(reference.errors.values())
    middle = errors[len(errors) // 2] if errors else 0.0
    return lambda name: BUDGET * max(reference.errors.get(name, 0.0), middle)


def bf16_step_tolerance(reference: StepReport) -> Callable[[str], float]:
    """Twice what the 16-bit reference errs in its worst step, or one rounding."""
    loss, norm = max(reference.loss, default=0.0), max(reference.grad_norm, default=0.0)
    return lambda name: BUDGET * max(norm if name == "grad_norm" else loss, BF16_LOSS)


def _close(row: Row) -> list[str]:
    """Fields that may differ by rounding."""
    numbers = [n for n, v in row.items() if isinstance(v, int | float)]
    return [n for n in numbers if n == "loss" or n.endswith("_loss") or n == "grad_norm"]


def _exact(row: Row) -> list[str]:
    """Fields that say which tokens were scored and corrupted."""
    return [n for n in row if n.endswith("_count") or n in ("scored", "masked_fraction", "skipped")]


def _relative(got: Any, want: Any) -> float:
    if not isinstance(got, int | float):
        return math.inf
    if got == want:
        return 0.0
    error = abs(got - want) / abs(want) if want else math.inf
    return error if math.isfinite(error) else math.inf


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _true_rows(name: str, gradient: Tensor, run: Run) -> Tensor:
    """Without the rows of the padded vocabulary."""
    padded = name in VOCABULARY_ROWS and len(gradient) == run.padded
    return gradient[: run.vocabulary] if padded else gradient


def _has_padding(name: str, gradient: Tensor, run: Run) -> bool:
    """Whether the padded rows of a vocabulary have a gradient, which they must not."""
    if name not in VOCABULARY_ROWS or len(gradient) != run.padded:
        return False
    return bool(gradient[run.vocabulary :].count_nonzero())
