"""What a dry run tells, as plain values: the JSON is these, the text is made from them.

Rows, bytes and memory are the planner's, of a step whose rows are one document of full length each.
"""

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_bp.arguments.resolved import derived
from megatron_bp.arguments.task import layout_of, task_of
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.step import Gpu, counted, most_memory, most_traffic
from megatron_bp.planning.task import Task
from megatron_bp.tools.dry_run.meta import Parameter, models
from megatron_bp.tools.ranges import ranges

REPEATED = re.compile(r"(?<=layers\.)\d+|(?<=local_experts\.)\d+")


def gather(args: Namespace, fused: bool = False) -> dict[str, Any]:
    """All but the command line and the notes.

    Args:
        args: Megatron's validated arguments.
        fused: the run's layers are Transformer Engine's, whatever `args` say.
    """
    found = {
        "degrees": _degrees(args),
        "derived": derived(args),
        "parameters": _parameters(args, models(args)),
    }
    if args.objective == "ar":
        return found
    task = replace(task_of(args), fused=fused)
    found["parameters"]["planned"] = parameters_of(args, task)
    return found | planned(task, layout_of(args))


def parameters_of(args: Namespace, task: Task) -> int:
    """The planner's count; the module for self-conditioning is no part of a shape, and is added."""
    width = args.self_conditioning_width if args.self_conditioning > 0 else None
    return task.shape.parameters + (0 if width is None else (3 * width + 1) * args.hidden_size)


def planned(task: Task, layout: Layout) -> dict[str, Any]:
    """Rows of each slot rank, and what the GPU sends that sends most, and holds that holds most."""
    counts = counted(task, layout)
    sender, flows = most_traffic(task, layout, counts)
    holder, held = most_memory(task, layout, counts)
    parts = {name: round(part) for name, part in held.parts.items()}
    return {
        "rows": [
            {"clean": r.clean, "corrupted": r.corrupted, "pairs": sum(r.pairs.values())}
            for r in counts.ranks
        ],
        "traffic": _of(sender)
        | {
            "flows": [
                {"what": f.name, "of": f.layers, "ranks": f.ranks, "bytes": round(f.bytes)}
                for f in flows
            ]
        },
        "memory": _of(holder) | {"fused": task.fused, "parts": parts, "total": sum(parts.values())},
    }


def _of(gpu: Gpu) -> dict[str, Any]:
    return {"stage": gpu[0], "slot_rank": gpu[1]}


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
