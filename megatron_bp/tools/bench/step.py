"""A training step of a small model: against autoregressive training, or ranks sharing one row.

On one rank: forward and backward of a row, every block corrupted once, against the autoregressive
step of the same model and length. Twice the latter is the floor, as there are two streams of rows.
The autoregressive model is Megatron's own with torch's causal attention; a plain transformer of the
same shape, written with torch alone, stands beside it. With --ranks, every way for ranks to share a
row: CSBP, hybrid, BP, and conventional context parallelism in its forms.

A step is forward and backward, plan and corruption included; not the optimizer, and not the
reduction of weight gradients, which are the same in all.
"""

import argparse
from functools import partial
from typing import Any

import torch

from megatron_bp.tools.bench.machine import processor
from megatron_bp.tools.bench.turns import Way, median, ratio, spread, table, take_turns, times

OURS, AR, PLAIN = "block diffusion", "autoregressive", "plain autoregressive"
SIZES = ("layers", "hidden", "heads", "key_heads", "head_dim", "block", "repeats", "threads")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--length", type=int, nargs="+", default=[4096, 8192], metavar="L", help="tokens")
    add("--layers", type=int, default=4, help="of the model, default 4")
    add("--hidden", type=int, default=256, help="default 256")
    add("--heads", type=int, default=4, help="query heads, default 4")
    add("--key-heads", type=int, default=2, help="default 2")
    add("--head-dim", type=int, default=64, help="default 64")
    add("--block", type=int, default=32, metavar="B", help="tokens a block, default 32")
    add("--kernel", default="auto", help="as --attention-kernel of training, default auto")
    add("--ranks", type=int, default=1, help="processes that share the row, default 1")
    add("--forms", nargs="+", metavar="F", help="with --ranks: which forms; default all")
    add("--repeats", type=int, default=3, help="turns, default 3")
    add("--threads", type=int, default=1, help="of each process, default 1")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The result, as JSON.

    Raises:
        ValueError: a size or a form that cannot be.
    """
    for name in (*SIZES, "ranks"):
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {getattr(options, name)}: must be at least 1")
    if options.heads % options.key_heads:
        raise ValueError(f"--key-heads {options.key_heads}: must divide --heads {options.heads}")
    if min(options.length) < 2 * options.block:
        raise ValueError(f"--length {min(options.length)}: must be at least two blocks")
    if options.forms and options.ranks == 1:
        raise ValueError("--forms: needs several --ranks")
    result = {"machine": processor(), "ranks": options.ranks, "kernel": options.kernel}
    result |= {name: getattr(options, name) for name in SIZES}
    if options.ranks > 1:
        from megatron_bp.tools.bench import step_ranks

        return result | {"sizes": step_ranks.run(options)}
    return result | {"sizes": _one_rank(options)}


def _one_rank(options: argparse.Namespace) -> list[dict[str, Any]]:
    from megatron_bp.attention.kernels.choose import choose
    from megatron_bp.attention.layout import AttentionOptions
    from megatron_bp.sequence.plan import SequenceOptions, make_plan
    from megatron_bp.sequence.visibility import visibility
    from megatron_bp.tools.bench import plain_transformer
    from megatron_bp.tools.bench.model import MASK, VOCABULARY, build, one_process, step
    from megatron_bp.tools.bench.sft import chat

    attention = AttentionOptions(choose(options.kernel, "cpu", torch.float32, options.head_dim))
    heads = (options.heads, options.key_heads, options.head_dim)
    how = SequenceOptions(options.block)
    sizes = []
    with one_process(options.threads):
        from megatron_bp.tools.bench import autoregressive

        shape = (options.layers, heads[0], heads[2], heads[1], options.hidden)
        ours, theirs = build(*shape), build(*shape, mode=None)
        plain = plain_transformer.Transformer(options.layers, options.hidden, heads, VOCABULARY)
        weights = sum(parameter.numel() for parameter in plain.parameters())
        for length in (2 * options.block, *options.length):
            sample = chat(0, length, True)
            tokens = torch.randint(0, MASK, (length + 1,))

            def diffusion(sample: Any = sample) -> object:
                return step(ours, sample, make_plan(sample, how), attention)

            ways = [
                Way(AR, partial(autoregressive.step, theirs, tokens)),
                Way(PLAIN, partial(plain_transformer.step, plain, tokens)),
                Way(OURS, diffusion),
            ]
            if length == 2 * options.block:
                take_turns(ways, 1)  # what first calls alone do
                continue
            plan = make_plan(sample, how)
            rows = plan.rows_of(0)
            pairs = visibility(plan, rows.clean, rows.corrupted).pairs()
            found: dict[str, Any] = take_turns(ways, options.repeats)
            for name, told in found.items():
                told["rows"] = rows.num_rows if name == OURS else length
                told["pairs"] = pairs if name == OURS else length * (length + 1) // 2
            sizes.append({"length": length, "weights": weights, "ways": found})
    return sizes


def lines(result: dict[str, Any]) -> list[str]:
    """The result as Markdown tables, one for each length."""
    out = [
        f"{result['machine']}; ranks: {result['ranks']}, threads of each: {result['threads']}, "
        f"float32, kernel {result['kernel']}; layers: {result['layers']}, hidden size "
        f"{result['hidden']}, {result['heads']} heads x {result['head_dim']}, "
        f"{result['key_heads']} key heads, blocks of {result['block']}",
    ]
    if result["ranks"] > 1:
        from megatron_bp.tools.bench.step_ranks import size_lines
    for size in result["sizes"]:
        out += ["", f"{size['length']:,} tokens:", ""]
        out += _lines(result, size) if result["ranks"] == 1 else size_lines(size)
    return out


def _lines(result: dict[str, Any], size: dict[str, Any]) -> list[str]:
    ways = size["ways"]
    rows = []
    for name, told in ways.items():
        seconds = told["cpu_seconds"]
        attention = 14 * told["pairs"] * result["heads"] * result["head_dim"] * result["layers"]
        taken = median(seconds)
        assert taken is not None
        gflops = (6 * size["weights"] * told["rows"] + attention) / taken / 1e9
        rows.append(
            [
                name,
                f"{told['rows']:,}",
                f"{told['pairs']:,}",
                spread(seconds),
                f"{gflops:.1f}",
                spread(told["peak_bytes"], 1e6, 0),
            ]
        )
    floor, ours = ways[AR], ways[OURS]

    def of_floor(field: str) -> str:
        return times(ratio(ours[field], [v and 2 * v for v in floor[field]]))

    of_plain = times(ratio(floor["cpu_seconds"], ways[PLAIN]["cpu_seconds"]))
    head = ["", "rows", "visible pairs", "CPU seconds (lowest to highest)", "GFLOP/s"]
    return [
        *table([*head, "peak memory above weights, MB"], rows),
        "",
        f"{OURS} / (2 x {AR}): time {of_floor('cpu_seconds')}, memory {of_floor('peak_bytes')}; "
        f"{AR} / {PLAIN}: time {of_plain}",
    ]
