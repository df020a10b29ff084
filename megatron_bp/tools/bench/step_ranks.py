"""The part of `bench step` in which ranks share one row, every form side by side.

Processes are started here; in each, all forms have a model of their own (same weights), and take
turns. A step lasts until the slowest rank is done.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from megatron_bp.attention.exchange.choose import ExchangeOptions
from megatron_bp.attention.heads import refuse_heads
from megatron_bp.attention.kernels.choose import choose
from megatron_bp.attention.kernels.contract import Kernel
from megatron_bp.attention.layout import AttentionOptions
from megatron_bp.sequence.plan import SequenceOptions, make_plan
from megatron_bp.sequence.visibility import visibility
from megatron_bp.tools.bench.machine import cost
from megatron_bp.tools.bench.sft import chat
from megatron_bp.tools.bench.turns import median, ratio, spread, table, times
from megatron_bp.tools.bench.two_hosts.forms import CSBP, FORMS, Form
from megatron_bp.tools.bench.waits import Waits, watching

FIELDS = ("seconds", "cpu_seconds", "exposed_seconds", "peak_bytes", "bytes_sent")
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
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (options, folder), nprocs=options.ranks)
        sizes: list[dict[str, Any]] = json.loads((Path(folder) / "sizes.json").read_text())
    return sizes


def _rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    from megatron_bp.tools.bench.model import build, one_of_ranks

    kernel = choose(options.kernel, "cpu", torch.float32, options.head_dim)
    forms = {
        form.name: layout_of(form, options.ranks, options.block, kernel)
        for form in forms_of(options)
    }
    shape = (options.layers, options.heads, options.head_dim, options.key_heads, options.hidden)
    with one_of_ranks(rank, options.ranks, folder, options.threads), watching() as waits:
        models = {name: build(*shape, mode=layout.mode) for name, layout in forms.items()}
        _turns(2 * options.ranks * options.block, models, forms, waits, options, 1)  # first calls
        sizes = [
            _turns(length, models, forms, waits, options, options.repeats)
            for length in options.length
        ]
        if rank == 0:
            (Path(folder) / "sizes.json").write_text(json.dumps(sizes), encoding="utf-8")
        dist.barrier()


def _turns(
    length: int,
    models: dict[str, Any],
    forms: dict[str, Layout],
    waits: Waits,
    options: argparse.Namespace,
    repeats: int,
) -> dict[str, Any]:
    """What each form took at one length, values of all ranks."""
    from megatron_bp.tools.bench.model import Done, step

    sample = chat(0, length, True)
    told: dict[str, Any] = {name: {field: [] for field in FIELDS} for name in forms}
    for turn in range(repeats):
        for name in list(forms)[:: 1 if turn % 2 == 0 else -1]:
            layout = forms[name]
            done: list[Done] = []

            def call(name: str = name, layout: Layout = layout, done: list[Done] = done) -> None:
                plan = make_plan(sample, layout.sequence)
                done.append(step(models[name], sample, plan, layout.attention))

            dist.barrier()
            waits.take()
            taken = cost(call)
            values = [*taken[:2], waits.take().seconds, taken.peak_bytes, done[0].bytes_sent]
            every: list[Any] = [None] * options.ranks
            dist.all_gather_object(every, values)
            for field, of_ranks in zip(FIELDS, zip(*every, strict=True), strict=True):
                told[name][field].append(of_ranks)
    for name, layout in forms.items():
        plan = make_plan(sample, layout.sequence)
        rows = [plan.rows_of(rank) for rank in range(options.ranks)]
        told[name]["rows"] = [mine.num_rows for mine in rows]
        told[name]["pairs"] = [visibility(plan, r.clean, r.corrupted).pairs() for r in rows]
    return {"length": length, "forms": told}


def size_lines(size: dict[str, Any]) -> list[str]:
    """One length as a Markdown table."""
    forms = size["forms"]
    base = forms.get(CSBP, next(iter(forms.values())))
    slowest = {name: [max(turn) for turn in told["seconds"]] for name, told in forms.items()}
    against = [max(turn) for turn in base["seconds"]]
    rows = []
    for name, told in forms.items():
        exposed = [sum(turn) / len(turn) for turn in told["exposed_seconds"]]
        peaks = [None if None in turn else max(turn) for turn in told["peak_bytes"]]
        sent = median(sum(turn) for turn in told["bytes_sent"])
        share = ratio(exposed, slowest[name])
        rows.append(
            [
                name,
                f"{sum(told['rows']):,}",
                f"{max(told['pairs']) * len(told['pairs']) / sum(told['pairs']):.3f}",
                spread(slowest[name]),
                times(ratio(slowest[name], against)),
                spread([max(turn) for turn in told["cpu_seconds"]]),
                f"{spread(exposed)}, {share or 0:.0%}",
                f"{(sent or 0) / 1e6:,.1f}",
                spread(peaks, 1e6, 0),
            ]
        )
    head = ["", "rows", "pairs, max / mean", "seconds", f"/ {CSBP}", "CPU seconds of a rank"]
    head += ["exposed communication, s, share", "MB sent, all ranks", "peak memory of a rank, MB"]
    return table(head, rows)
