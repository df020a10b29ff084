"""All pictures of one packed row under one layout, as the planner draws them."""

from pathlib import Path

from megatron_bp.planning.counts import options_of
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.shape import Attention
from megatron_bp.planning.task import Task
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import make_plan
from megatron_bp.tools.draw import cost, exchanged, mask, owners

# A window has a picture if it is so many of its cells wide: narrower ones show a bare diagonal.
_CELLS = 4


def draw_sample(task: Task, layout: Layout, sample: Sample, out: Path) -> list[Path]:
    """Files in the folder `out`: who sees whom, who owns what, cost per rank, bytes a layer.

    Where one rank works on a row there is no picture of costs and bytes.

    Args:
        task: its model and sequence options.
        layout: the degrees and the exchange.
        sample: a micro-batch, as `sequence.packing.join` makes it of several rows.
        out: a folder; it is made.

    Raises:
        ImportError: matplotlib is missing; its text says how to get it.
    """
    options = options_of(task.sequence, layout)
    plan = make_plan(sample, options)
    kinds = attention_kinds(task)
    windows = sorted({w for of in kinds.values() for w in of}, key=_no_window_first) or [None]
    step = mask.mask(plan, sample).step
    wide = [w for w in windows if w is None or w >= _CELLS * step]
    files = []
    for window in wide or windows[-1:]:
        name = "mask" if window is None else f"mask_window_{window}"
        files += mask.draw(plan, sample, layout.mode, window, out / name)
    files += owners.draw(plan, sample, layout.mode, out / "owners")
    if layout.slot == 1:
        return files
    files += cost.draw(sample, layout.slot, task.sequence, out / "cost")
    for number, (attention, of_kind) in enumerate(kinds.items()):
        asked = {"this layout": layout}
        asked |= exchanged.layouts(layout.slot, attention, layout.tp)
        prefix = out / ("bytes" if number == 0 else f"bytes_{number + 1}")
        files += exchanged.draw([sample], options, asked, attention, of_kind, prefix)
    return files


def attention_kinds(task: Task) -> dict[Attention, tuple[int | None, ...]]:
    """Windows of the layers that have the same heads, by these heads, in the model's order."""
    found: dict[Attention, set[int | None]] = {}
    for layer in task.shape.layers:
        if layer.attention is not None:
            a = layer.attention
            heads = Attention(a.query_heads, a.key_heads, a.head_dim)
            found.setdefault(heads, set()).add(a.window)
    return {heads: tuple(sorted(windows, key=_no_window_first)) for heads, windows in found.items()}


def _no_window_first(window: int | None) -> int:
    return 0 if window is None else window
