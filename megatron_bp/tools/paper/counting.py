"""FLOPs and bytes of a cell of the paper's tables, by the plan that training makes."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.planning.counts import SlotCounts, count, full_rows, options_of
from megatron_bp.planning.flops import Flops, flops
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.shape_file import read_task
from megatron_bp.planning.task import Task
from megatron_bp.planning.traffic import traffic
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.tools.paper.figures import Cell, Scheme, Setting

SHAPES = Path(__file__).parents[3] / "configs" / "shapes"
HIDDEN = ("gradients", "parameters")  # flows that a backward hides, by how their names begin


@dataclass(frozen=True)
class Counted:
    """Of one step.

    Attributes:
        work: of the slot rank that has most; all wait for it in every layer.
        sent: bytes of K/V and their gradients, the mean over the ranks of the slot.
        beside: other bytes that are not hidden: sums over tensor-parallel ranks, rows to experts.
        tokens: of all replicas.
        task: what was counted.
        layout: under which layout.
        counts: its rows and pairs.
    """

    work: Flops
    sent: float
    beside: float
    tokens: int
    task: Task
    layout: Layout
    counts: SlotCounts


def layout_of(setting: Setting, scheme: Scheme) -> Layout:
    """How 16 GPUs share a step; everything is recomputed.

    CP gathers all rows. CSBP gathers clean rows, of layers with a window those that are needed.
    """
    return Layout(
        tp=setting.tp,
        ep=setting.ep,
        dp=setting.dp,
        bp=1 if scheme == "CP" else setting.slot,
        cp=setting.slot,
        exchange=ExchangeOptions("all_gather" if scheme == "CP" else "auto"),
    )


def counted(cell: Cell, scheme: Scheme, one_pass: bool = False, aligned: bool = False) -> Counted:
    """A cell's step.

    All clean rows are computed, those of the last block too, and no unit moves, as in the paper's
    figures.

    Args:
        cell: of the tables.
        scheme: which column.
        one_pass: as this project computes, where the paper takes two.
        aligned: CP whose chunks are whole blocks, and which gathers clean rows alone.
    """
    setting = cell.setting
    task = _task(setting.shape)
    sequence = replace(task.sequence, score_clean="all", max_imbalance=float("inf"), row_cost=0)
    task = replace(
        task,
        length=cell.length,
        global_batch=setting.dp,
        sequence=sequence,
        passes="one" if one_pass else setting.passes,
    )
    layout = replace(layout_of(setting, scheme), aligned=aligned)
    windows = frozenset(x.attention.window for x in task.shape.layers if x.attention is not None)
    # Layouts that deal out rows alike share their counts.
    rows = Layout(bp=layout.bp, cp=layout.cp, aligned=aligned, exchange=layout.exchange)
    counts = _counts(cell.length, sequence, rows, windows)
    ranks = range(layout.slot)
    flows = [traffic(task, layout, counts, 0, rank) for rank in ranks]
    every = [flow for of_rank in flows for flow in of_rank if not flow.name.startswith(HIDDEN)]
    sent = sum(flow.bytes for flow in every if flow.name == "K/V") / layout.slot
    return Counted(
        work=max((flops(task, layout, counts, 0, r) for r in ranks), key=lambda work: work.total),
        sent=sent,
        beside=sum(flow.bytes for flow in every) / layout.slot - sent,
        tokens=cell.length * setting.dp,
        task=task,
        layout=layout,
        counts=counts,
    )


@cache
def _task(shape: str) -> Task:
    return read_task(SHAPES / f"{shape}.yaml")


@cache
def _counts(
    length: int, sequence: SequenceOptions, layout: Layout, windows: frozenset[int | None]
) -> SlotCounts:
    plan = _plan(length, options_of(sequence, layout))
    return count(plan, layout, windows)


@cache
def _plan(length: int, options: SequenceOptions) -> SequencePlan:
    return make_plan(full_rows(length), options)
