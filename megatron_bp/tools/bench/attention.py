"""Attention of one rank, kernels side by side with what they are held against.

Both streams: clean rows and one corrupted copy of every block, in the layout that training plans.
Forward alone, and forward with backward. The limit is torch's causal attention over the same number
of pairs, with no mask at all; other baselines are torch's attention and FlexAttention over all 2 L
rows under a mask. Each baseline stands beside a plain version of itself, written with torch alone
(`plain.py`). Times are told per visible pair of this layout: those of causal attention, which has
L (L + 1) pairs where blocks make L (L + B), are scaled to the same number.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from megatron_bp.tools.bench import attention_ways as ways
from megatron_bp.tools.bench import plain
from megatron_bp.tools.bench.machine import name_of
from megatron_bp.tools.bench.turns import Way, median, ratio, spread, table, take_turns, times

PASSES = {"forward": False, "forward and backward": True}
PLAIN = "plain "


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--length", type=int, nargs="+", default=[4096, 16384], metavar="L", help="tokens")
    add("--block", type=int, default=32, metavar="B", help="tokens a block, default 32")
    add("--heads", type=int, default=4, help="query heads, default 4")
    add("--key-heads", type=int, help="default: as many as query heads")
    add("--head-dim", type=int, default=64, help="default 64")
    add("--documents", type=int, default=1, metavar="N", help="of equal length, default 1")
    add("--dtype", choices=ways.DTYPES, default="float32", help="default float32")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    add("--kernels", nargs="*", metavar="K", help="default: all that the device can run")
    add("--baselines", nargs="*", choices=("causal", "dense", "flex"), help="default: all")
    add("--forward-only", action="store_true", help="leave out forward and backward")
    add("--backward-only", action="store_true", help="leave out the forward alone")
    add("--skip-dense", type=int, default=16384, metavar="L", help="above it no 2 L masks")
    add("--repeats", type=int, default=3, help="turns, default 3; with 2 L masks at most 2")
    add("--threads", type=int, default=1, help="default 1")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The result, as JSON.

    Raises:
        ValueError: a size or a device that cannot be.
    """
    for name in ("repeats", "threads"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")
    if options.forward_only and options.backward_only:
        raise ValueError("--forward-only with --backward-only: nothing is left; give one of them")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device; use --device cpu")
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    like = torch.empty(0, dtype=ways.DTYPES[options.dtype], device=device)
    heads = (options.heads, options.key_heads or options.heads, options.head_dim)
    notes: list[str] = []
    kernels = options.kernels
    if kernels is None:
        kernels = ways.kernels_of(like, options.head_dim, notes)
    _warm_up(options, heads, like, kernels)
    sizes = [_size(options, length, heads, like, kernels, notes) for length in options.length]
    told = ("block", "documents", "dtype", "threads")
    return {
        "machine": name_of(device),
        "device": device.type,
        "heads": heads,
        **{name: getattr(options, name) for name in told},
        "notes": notes,
        "sizes": sizes,
    }


def _warm_up(
    options: argparse.Namespace,
    heads: tuple[int, int, int],
    like: torch.Tensor,
    kernels: Sequence[str],
) -> None:
    """What only first calls do, on a small problem; what is compiled is warmed at its size."""
    length = 8 * options.block * options.documents
    problem = ways.make_problem(length, options.documents, options.block, heads, like)
    for name, call in _calls(options, problem, kernels, []):
        if ways.FLEX not in name:
            call(True)


def _size(
    options: argparse.Namespace,
    length: int,
    heads: tuple[int, int, int],
    like: torch.Tensor,
    kernels: Sequence[str],
    notes: list[str],
) -> dict[str, Any]:
    """All ways at one length."""
    problem = ways.make_problem(length, options.documents, options.block, heads, like)
    pairs = problem.visible.pairs()
    size: dict[str, Any] = {"length": length, "pairs": pairs, "passes": {}}
    calls = dict(_calls(options, problem, kernels, notes))
    for name, backward in PASSES.items():
        if options.forward_only if backward else options.backward_only:
            continue
        no_backward = like.device.type == "cpu" and backward
        taking = [
            Way(
                way,
                partial(call, backward),
                turns=2 if ways.DENSE in way else None,
                warm=ways.FLEX in way or like.device.type == "cuda",
            )
            for way, call in calls.items()
            if not (no_backward and ways.FLEX in way)
        ]
        found = take_turns(taking, options.repeats, like.device)
        for way, told in found.items():
            causal = ways.LIMIT in way
            told["pairs"] = [problem.causal_pairs if causal else pairs]
        size["passes"][name] = found
    return size


def _calls(
    options: argparse.Namespace, problem: ways.Problem, kernels: Sequence[str], notes: list[str]
) -> Iterator[tuple[str, plain.Call]]:
    """Name and call of each way, baselines first, each followed by its plain version."""
    length, documents, block = problem.length, problem.documents, problem.block
    heads, like = problem.heads, problem.like
    chosen = options.baselines
    if chosen is None:
        chosen = ("causal", "dense", "flex")
    if "causal" in chosen:
        yield ways.LIMIT, ways.limit(problem)
        yield PLAIN + ways.LIMIT, plain.causal(length, documents, heads, like)
    masks = {
        "dense": (ways.DENSE, ways.dense, plain.dense),
        "flex": (ways.FLEX, ways.flex, plain.flex),
    }
    for key, (name, make, make_plain) in masks.items():
        if key not in chosen:
            continue
        if length > options.skip_dense:
            notes.append(f"{length:,} tokens: {name} left out, as --skip-dense says")
        elif key == "flex" and os.environ.get("TORCHDYNAMO_DISABLE") == "1":
            note = f"{name} left out: TORCHDYNAMO_DISABLE is set, and it has to be compiled"
            notes += [note] if note not in notes else []
        else:
            yield name, make(problem)
            yield PLAIN + name, make_plain(length, documents, block, heads, like)
    for name in kernels:
        yield name, ways.ours(problem, name)


def lines(result: dict[str, Any]) -> list[str]:
    """The result as Markdown tables, one for each length and pass."""
    query, key, dim = result["heads"]
    clock = "seconds" if result["device"] == "cuda" else "cpu_seconds"
    out = [
        f"{result['machine']}; threads: {result['threads']}, {result['dtype']}, {query} heads x "
        f"{dim}, {key} key heads, blocks of {result['block']}, documents: {result['documents']}"
    ]
    for size in result["sizes"]:
        for name, found in size["passes"].items():
            out += ["", f"{size['length']:,} tokens, {size['pairs']:,} visible pairs, {name}:", ""]
            out += _table(found, size["pairs"], 14 if PASSES[name] else 4, result, clock)
    memory = _growth(result["sizes"])
    out += ["", *memory] if memory else []
    return out + [line for note in result["notes"] for line in ("", note)]


def _table(
    found: dict[str, Any], pairs: int, factor: int, result: dict[str, Any], clock: str
) -> list[str]:
    query, _, dim = result["heads"]
    seconds = {
        way: [s * pairs / told["pairs"][0] for s in told[clock]] for way, told in found.items()
    }
    rows = []
    for way, told in found.items():
        taken = median(seconds[way])
        assert taken is not None
        base = way.removeprefix(PLAIN)
        rows.append(
            [
                way,
                spread(seconds[way], digits=3),
                f"{factor * dim * query * pairs / taken / 1e9:,.1f}",
                spread(told["peak_bytes"], 1e6, 0),
                times(ratio(seconds[way], seconds.get(ways.LIMIT, []))),
                times(ratio(seconds.get(ways.DENSE, []), seconds[way])),
                times(ratio(seconds[base], seconds[way])) if base != way else "-",
            ]
        )
    title = "CPU seconds" if clock == "cpu_seconds" else "seconds"
    head = [f"{title} (lowest to highest)", "GFLOP/s", "peak memory, MB", "time / causal"]
    return table(["", *head, "dense mask / it", "baseline / plain"], rows)


def _growth(sizes: Sequence[dict[str, Any]]) -> list[str]:
    """Memory of each way at each length over that at the length before."""
    rows = []
    for before, after in pairwise(sizes):
        for name, found in after["passes"].items():
            for way, told in found.items():
                less = before["passes"][name].get(way)
                peak = median(told["peak_bytes"])
                if less is None or peak is None or not (small := median(less["peak_bytes"])):
                    continue
                grown = f"{before['length']:,} to {after['length']:,}"
                rows.append([name, way, grown, times(peak / small)])
    return table(["pass", "", "tokens", "memory grows"], rows) if rows else []
