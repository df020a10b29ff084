"""The verdict on each layout: a table for people, JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_bp.tools.verify.compare import GradientReport, StepReport

REPLICAS = 1e-6  # largest relative difference between copies of a gradient


@dataclass(frozen=True)
class Verdict:
    """What is known of a layout.

    Attributes:
        name: of its topology, or of a reference.
        facts: what its first rank wrote; empty if it did not run.
        rows: of its metrics file.
        gradients, steps: how it compares; None for the reference, or if it did not run.
        failures: why it fails; empty if it passes.
        refused: its arguments were refused.
    """

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    rows: Sequence[dict[str, Any]] = ()
    gradients: GradientReport | None = None
    steps: StepReport | None = None
    failures: tuple[str, ...] = ()
    refused: bool = False

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.failures


def replica_failures(facts: dict[str, Any]) -> tuple[str, ...]:
    """Copies of one parameter that differ between ranks."""
    found = []
    for key, what in (("gradient_replicas", "gradient"), ("weight_replicas", "weight")):
        error, name = facts.get(key, (0.0, ""))
        if not error <= REPLICAS:
            found.append(f"{name}: its {what} differs between the ranks that hold it ({error:.1e})")
    return tuple(found)


HEAD = ("layout", "loss", "norm", "worst parameter", "error", "floor", "verdict")


def table(verdicts: Sequence[Verdict]) -> str:
    """One line a layout; the reference shows its numbers, the others relative differences."""
    lines = [HEAD, *(_cells(v) for v in verdicts)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    told = ["  ".join(c.ljust(w) for c, w in zip(x, widths, strict=True)).rstrip() for x in lines]
    return "\n".join(told)


def told(verdict: Verdict) -> str:
    """Groups and rows of a layout, then what speaks against it."""
    lines = [f"{verdict.name}: {'ok' if verdict.passed else 'FAILED'}"]
    if verdict.facts:
        groups = " ".join(f"{name}={n}" for name, n in verdict.facts["groups"].items())
        rows = " ".join(f"{clean}+{own}" for clean, own in verdict.facts["rows"])
        lines.append(f"  groups: {groups}")
        lines.append(
            f"  rows of each rank (clean+corrupted): {rows}; micro-batches: "
            f"{verdict.facts['micro_batches']}"
        )
    if verdict.gradients is not None and verdict.gradients.under_floor:
        lines.append(f"  under the floor: {', '.join(verdict.gradients.under_floor)}")
    lines += [f"  {failure}" for failure in verdict.failures[:10]]
    more = len(verdict.failures) - 10
    return "\n".join(lines + ([f"  and {more} more"] if more > 0 else []))


def write_json(path: Path, verdicts: Sequence[Verdict], settings: dict[str, Any]) -> None:
    """Everything that is known, to a file."""
    content = settings | {"layouts": [_plain(v) for v in verdicts]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _cells(verdict: Verdict) -> tuple[str, ...]:
    end = "ok" if verdict.passed else "refused" if verdict.refused else "FAILED"
    if verdict.gradients is None or verdict.steps is None:
        first = verdict.rows[0] if verdict.rows else {}
        number = [f"{first[n]:.6f}" if n in first else "-" for n in ("loss", "grad_norm")]
        return (verdict.name, *number, "-", "-", "-", end if verdict.failures else "-")
    name, error = verdict.gradients.worst
    under, of = len(verdict.gradients.under_floor), len(verdict.gradients.errors)
    return (
        verdict.name,
        f"{max(verdict.steps.loss, default=0.0):.1e}",
        f"{max(verdict.steps.grad_norm, default=0.0):.1e}",
        name,
        f"{error:.1e}",
        f"{under}/{under + of}",
        end,
    )


def _plain(verdict: Verdict) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "layout": verdict.name,
        "passed": verdict.passed,
        "refused": verdict.refused,
        "failures": list(verdict.failures),
        **verdict.facts,
        "steps": list(verdict.rows),
    }
    if verdict.steps is not None and verdict.gradients is not None:
        name, error = verdict.gradients.worst
        plain |= {
            "loss_errors": list(verdict.steps.loss),
            "grad_norm_errors": list(verdict.steps.grad_norm),
            "worst_parameter": name,
            "worst_error": error,
            "errors": verdict.gradients.errors,
            "under_floor": verdict.gradients.under_floor,
            "floor": verdict.gradients.floor,
        }
    return plain
