"""The part of `bench step` in which ranks share one row, every form side by side.

On each rank every form has a model of its own, and they take turns. A step lasts until the slowest
rank is done.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.attention.heads import refuse_heads
from megatron_bp.attention.kernels.choose import choose
from megatron_bp.attention.kernels.contract import Kernel
from megatron_bp.attention.layout import AttentionOptions
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequenceOptions, make_plan
from megatron_bp.sequence.visibility import visibility
from megatron_bp.tools.bench.ranks import on_ranks, slowest, take_turns
from megatron_bp.tools.bench.sft import chat
from megatron_bp.tools.bench.turns import median, ratio, spread, table, times
from megatron_bp.tools.bench.two_hosts.forms import CSBP, FORMS, Form
from megatron_bp.tools.bench.waits import Waits

EXCHANGES: dict[str, Any] = {"p2p": "ring", "a2a": "all_gather", "clean_all_gather": "all_gather"}


@dataclass(frozen=True)
class Layout:
    """A form as the library takes it."""

    mode: tuple[int, int]
    sequence: SequenceOptions
    attention: AttentionOptions


def forms_of(options: argparse.Namespace) -> tuple[Form, ...]:
    """The forms that are asked for, or all that so many ranks can have.

    Raises:
        ValueError: there is none of a name, or the ranks or heads cannot make it.
    """
    ranks, names = options.ranks, options.forms
    known = {form.name: form for form in FORMS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"--forms {name}: there is none; there are {', '.join(known)}")
        if name == "hybrid" and (ranks < 4 or ranks % 2):
            raise ValueError(f"--forms hybrid: needs an even number of at least 4 --ranks, {ranks}")
    chosen = [known[name] for name in names] if names else list(FORMS)
    if not names and (ranks < 4 or ranks % 2):
        chosen.remove(known["hybrid"])
    if any(form.name == "cp:a2a" for form in chosen):
        refuse_heads(options.heads, options.key_heads, ranks)
    return tuple(chosen)


def layout_of(form: Form, ranks: int, block: int, kernel: Kernel) -> Layout:
    """What the flags of a form make of it."""
    bp, cp = (1 if part == 0 else ranks // part for part in form.degrees)
    how = form.name.partition(":")[2] or "all_gather"
    more: dict[str, Any] = {"align_chunks": True} if how == "clean_all_gather" else {}
    return Layout(
        (bp, cp),
        SequenceOptions(block, bp, cp, **more),
        AttentionOptions(
            kernel,
            ExchangeOptions(EXCHANGES.get(how, how)),
            over_heads=how == "a2a",
        ),
    )


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each length what every form took, an entry a turn of values of every rank."""
    forms_of(options)
    sizes: list[dict[str, Any]] = on_ranks(_rank, options)
    return sizes


def _rank(rank: int, options: argparse.Namespace, waits: Waits) -> list[dict[str, Any]]:
    from megatron_bp.tools.bench.model import build, step

    kernel = choose(options.kernel, "cpu", torch.float32, options.head_dim)
    forms = {
        form.name: layout_of(form, options.ranks, options.block, kernel)
        for form in forms_of(options)
    }
    shape = (options.layers, options.heads, options.head_dim, options.key_heads, options.hidden)
    models = {name: build(*shape, mode=layout.mode) for name, layout in forms.items()}

    def forward_backward(name: str, sample: Sample) -> int:
        layout = forms[name]
        plan = make_plan(sample, layout.sequence)
        return step(models[name], sample, plan, layout.attention).bytes_sent

    def calls(length: int) -> dict[str, Callable[[], int]]:
        sample = chat(0, length, True)
        return {name: partial(forward_backward, name, sample) for name in forms}

    take_turns(calls(2 * options.ranks * options.block), 1, waits)  # what first calls alone do
    sizes = []
    for length in options.length:
        told: dict[str, Any] = take_turns(calls(length), options.repeats, waits)
        for name, layout in forms.items():
            plan = make_plan(chat(0, length, True), layout.sequence)
            rows = [plan.rows_of(peer) for peer in range(options.ranks)]
            told[name]["rows"] = [mine.num_rows for mine in rows]
            told[name]["pairs"] = [visibility(plan, r.clean, r.corrupted).pairs() for r in rows]
        sizes.append({"length": length, "forms": told})
    return sizes


def size_lines(size: dict[str, Any]) -> list[str]:
    """One length as a Markdown table."""
    forms = size["forms"]
    base = forms.get(CSBP, next(iter(forms.values())))
    seconds = {name: slowest(told["seconds"]) for name, told in forms.items()}
    against = slowest(base["seconds"])
    rows = []
    for name, told in forms.items():
        exposed = [sum(turn) / len(turn) for turn in told["exposed_seconds"]]
        peaks = [None if None in turn else max(turn) for turn in told["peak_bytes"]]
        sent = median(sum(turn) for turn in told["bytes_sent"])
        share = ratio(exposed, seconds[name])
        rows.append(
            [
                name,
                f"{sum(told['rows']):,}",
                f"{max(told['pairs']) * len(told['pairs']) / sum(told['pairs']):.3f}",
                spread(seconds[name]),
                times(ratio(seconds[name], against)),
                spread(slowest(told["cpu_seconds"])),
                f"{spread(exposed)}, {share or 0:.0%}",
                f"{(sent or 0) / 1e6:,.1f}",
                spread(peaks, 1e6, 0),
            ]
        )
    head = ["", "rows", "pairs, max / mean", "seconds", f"/ {CSBP}", "CPU seconds of a rank"]
    head += ["exposed communication, s, share", "MB sent, all ranks", "peak memory of a rank, MB"]
    return table(head, rows)
