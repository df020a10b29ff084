"""What a dry run tells, as plain values: the JSON is these, the text is made from them.

Rows, bytes and memory are the planner's, of a step whose rows are one document of full length each.
"""

import re
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron_bp.arguments.resolved import derived
from megatron_bp.arguments.task import layout_of, task_of
from megatron_bp.planning import rates
from megatron_bp.planning.counts import SlotCounts, count, full_rows, options_of
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.memory import memory
from megatron_bp.planning.task import Task
from megatron_bp.planning.traffic import traffic
from megatron_bp.sequence.plan import make_plan
from megatron_bp.tools.dry_run.meta import Parameter, models

REPEATED = re.compile(r"(?<=layers\.)\d+|(?<=local_experts\.)\d+")


def gather(args: Namespace) -> dict[str, Any]:
    """All but the command line and the notes.

    Args:
        args: Megatron's validated arguments.
    """
    found = {
        "degrees": _degrees(args),
        "derived": derived(args),
        "parameters": _parameters(args, models(args)),
    }
    if args.objective == "ar":
        return found
    task, layout = task_of(args), layout_of(args)
    planned = task.shape.parameters
    if args.self_conditioning > 0:  # a module of its own, which the planner's shape has not
        planned += found["derived"]["self_conditioning_parameters"]
    found["parameters"]["planned"] = planned
    return found | planned_step(task, layout)


def planned_step(task: Task, layout: Layout) -> dict[str, Any]:
    """Rows, bytes and memory: of each slot rank, and of the GPU that sends or holds most."""
    sample = full_rows(task.length, layout.micro_batch)
    plan = make_plan(sample, options_of(task.sequence, layout))
    windows = {layer.attention.window for layer in task.shape.layers if layer.attention is not None}
    counts = count(plan, layout, windows)
    return {
        "rows": [
            {"clean": r.clean, "corrupted": r.corrupted, "pairs": sum(r.pairs.values())}
            for r in counts.ranks
        ],
        "traffic": _traffic(task, layout, counts),
        "memory": _memory(task, layout, counts),
    }


def fold(parameters: Sequence[Parameter]) -> list[dict[str, Any]]:
    """Parameters of a rank; those that differ in the number of a layer or expert alone are one."""
    groups: dict[tuple[str, tuple[int, ...]], list[Parameter]] = {}
    for p in parameters:
        groups.setdefault((REPEATED.sub("*", p.name), p.shape), []).append(p)
    folded = []
    for (name, shape), same in groups.items():
        numbers = zip(*(map(int, REPEATED.findall(p.name)) for p in same), strict=True)
        for column in numbers:
            name = name.replace("*", ranges(sorted(set(column))), 1)
        folded.append({"name": name, "shape": list(shape), "times": len(same)})
    return folded


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: 0-2,5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{r[0]}" if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _degrees(args: Namespace) -> dict[str, Any]:
    return {
        "tp": args.tensor_model_parallel_size,
        "sequence_parallel": bool(args.sequence_parallel),
        "pp": args.pipeline_model_parallel_size,
        "ep": args.expert_model_parallel_size,
        "dp": args.data_parallel_size,
        "slot": args.context_parallel_size,
        "bp": args.block_parallel_size,
        "cp": args.bdlm_clean_shard_size,
    }


def _parameters(args: Namespace, stages: list[list[Parameter]]) -> dict[str, Any]:
    return {
        "total": sum(p.whole for stage in stages for p in stage),
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "stages": [
            {"of_a_rank": sum(p.numel for p in stage), "shapes": fold(stage)} for stage in stages
        ],
    }


def _traffic(task: Task, layout: Layout, counts: SlotCounts) -> dict[str, Any]:
    """Of the GPU that sends most in a step."""
    every = {
        (stage, rank): traffic(task, layout, counts, stage, rank)
        for stage in range(layout.pp)
        for rank in range(layout.slot)
    }
    stage, rank = max(every, key=lambda at: sum(flow.bytes for flow in every[at]))
    flows = [
        {"what": f.name, "of": f.layers, "ranks": f.ranks, "bytes": round(f.bytes)}
        for f in every[stage, rank]
    ]
    return {"stage": stage, "slot_rank": rank, "flows": flows}


def _memory(task: Task, layout: Layout, counts: SlotCounts) -> dict[str, Any]:
    """Of the GPU that holds most."""
    _, uncounted = rates.read()
    every = {
        (stage, rank): memory(task, layout, counts, stage, rank, uncounted)
        for stage in range(layout.pp)
        for rank in range(layout.slot)
    }
    stage, rank = max(every, key=lambda at: every[at].total)
    parts = {name: round(part) for name, part in every[stage, rank].parts.items()}
    return {"stage": stage, "slot_rank": rank, "parts": parts, "total": sum(parts.values())}
