"""What a search found, as values for a JSON file."""

from dataclasses import asdict
from typing import Any

from megatron_bp.planning.search import TIE, Judged, Outcome
from megatron_bp.planning.seconds import named
from megatron_bp.planning.task import Task
from megatron_bp.planning.words import flags, in_words


def of_outcome(task: Task, outcome: Outcome, changes: list[str]) -> dict[str, Any]:
    """One context, all layouts that fit."""
    closest = outcome.closest
    return {
        "length": task.length,
        "tie": TIE,
        "ties": len(outcome.ties()),
        "fitting": [of_layout(task, one) for one in outcome.fitting],
        "closest": None if closest is None else of_layout(task, closest),
        "dropped": [asdict(one) for one in outcome.dropped],
        "changes": changes,
    }


def of_layout(task: Task, one: Judged) -> dict[str, Any]:
    """One layout, bytes and seconds."""
    out: dict[str, Any] = {
        "layout": in_words(one.layout),
        "degrees": asdict(one.layout),
        "flags": flags(task, one.layout),
        "memory": {**one.memory.parts, "total": one.memory.total},
    }
    if (took := one.seconds) is None:
        return out
    return out | {
        "tokens_per_second": took.tokens_per_second,
        "seconds": {**asdict(took), "total": took.total},
        "traffic": [
            {**asdict(flow), "exposed_seconds": took.exposed.get(named(flow), 0.0)}
            for flow in one.flows
        ],
    }
