"""One pass of K/V among ranks, and one of their gradients, form by form, with nothing computed.

Beside each form stands a plain version that moves as many rows with torch alone (`plain.py`): one
all-gather, or isend and irecv round the ring. The forms also pack K and V, and bring what arrives
into the order of positions. Gradients go back with each rank's shares added up.
"""

import argparse
from typing import Any

from megatron_bp.tools.bench.machine import processor
from megatron_bp.tools.bench.turns import median, ratio, spread, table, times

PASSES = ("K/V", "gradients")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--length", type=int, nargs="+", default=[16384], metavar="L", help="tokens, default 16384")
    add("--ranks", type=int, default=2, help="processes, default 2")
    add("--block", type=int, default=32, metavar="B", help="tokens a block, default 32")
    add("--documents", type=int, default=1, metavar="N", help="of equal length, default 1")
    add("--key-heads", type=int, default=2, help="default 2")
    add("--head-dim", type=int, default=64, help="default 64")
    add("--forms", nargs="+", metavar="F", help="default: all but te")
    add("--repeats", type=int, default=5, help="turns, default 5")
    add("--threads", type=int, default=1, help="of each process, default 1")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The result, as JSON.

    Raises:
        ValueError: a size or a form that cannot be.
    """
    from megatron_bp.tools.bench import exchange_ways
    from megatron_bp.tools.bench.ranks import on_ranks

    told = ("block", "documents", "key_heads", "head_dim", "repeats", "threads")
    for name in told:
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {getattr(options, name)}: must be at least 1")
    if options.ranks < 2:
        raise ValueError(f"--ranks {options.ranks}: nothing is exchanged among fewer than 2")
    for length in options.length:
        if length % options.documents:
            raise ValueError(f"--documents {options.documents}: must divide --length {length}")
    exchange_ways.chosen(options.forms)
    result = {"machine": processor(), "ranks": options.ranks}
    result |= {name: getattr(options, name) for name in told}
    return result | {"sizes": on_ranks(exchange_ways.on_rank, options)}


def lines(result: dict[str, Any]) -> list[str]:
    """The result as Markdown tables, one for each length and pass."""
    out = [
        f"{result['machine']}; ranks: {result['ranks']}, threads of each: {result['threads']}, "
        f"float32, {result['key_heads']} key heads x {result['head_dim']}, blocks of "
        f"{result['block']}, documents: {result['documents']}",
    ]
    for size in result["sizes"]:
        for name in PASSES:
            out += ["", f"{size['length']:,} tokens, {name}:", ""]
            out += _table(size["passes"][name])
    return out


def _table(found: dict[str, Any]) -> list[str]:
    from megatron_bp.tools.bench.exchange_ways import PLAIN
    from megatron_bp.tools.bench.ranks import slowest

    rows = []
    for name, told in found.items():
        seconds = slowest(told["seconds"])
        taken, sent = median(seconds), median(sum(turn) for turn in told["bytes_sent"])
        peaks = [None if None in turn else max(turn) for turn in told["peak_bytes"]]
        assert taken is not None
        assert sent is not None
        plain = PLAIN.get(name)
        of_plain = ratio(seconds, slowest(found[plain]["seconds"])) if plain in found else None
        rows.append(
            [
                name,
                spread(seconds, 1e-3, 1),
                f"{sent / 1e6:,.2f}",
                f"{sent / taken / 1e9:.2f}",
                spread(peaks, 1e6, 1),
                times(of_plain),
            ]
        )
    head = ["", "ms (lowest to highest)", "MB sent, all ranks", "GB/s, all ranks"]
    return table([*head, "peak memory of a rank, MB", "form / plain"], rows)
