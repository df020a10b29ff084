"""Draws one picture, as PNG and SVG.

    python -m megatron_bp.tools.draw mask --documents 22,8+6,18 --block-size 4 --bp 4 --out mask
    python -m megatron_bp.tools.draw owners --length 262144 --random 30 --bp 8 --out owners
    python -m megatron_bp.tools.draw cost --length 131072 --random 12 --ranks 8 --out cost
    python -m megatron_bp.tools.draw bytes --length 131072 --random 30 --ranks 8 --out bytes
    python -m megatron_bp.tools.draw scaling --predicted FILE.json --out scaling
    python -m megatron_bp.tools.draw loss runs/one runs/other --out loss

Rows, owners, work and bytes come from the plan that training makes. Needs matplotlib, the extra
`plot`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_bp import picture
from megatron_bp.parallel.mode import parallel_mode
from megatron_bp.planning.shape import Attention
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.tools.draw import cost, exchanged, mask, owners, rows, scaling
from megatron_bp.training.loss_curve import draw_losses

KINDS = ("mask", "owners", "cost", "bytes", "scaling", "loss")


def parser() -> argparse.ArgumentParser:
    """Of the command."""
    top = argparse.ArgumentParser(
        "python -m megatron_bp.tools.draw",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = top.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind in KINDS:
        of_kind = kinds.add_parser(kind)
        add = of_kind.add_argument
        add("--out", required=True, metavar="PREFIX", help="PREFIX.png and PREFIX.svg are written")
        if kind == "loss":
            add("run", nargs="+", type=Path, help="folder of a run (its --save)")
        elif kind == "scaling":
            add("--predicted", type=Path, metavar="FILE", help="lines, as JSON; see scaling.py")
            add("--title", help="in place of what the paper's figures tell")
        else:
            _add_row(of_kind)
            _add_degrees(of_kind, kind)
    return top


def _add_row(of_kind: argparse.ArgumentParser) -> None:
    add = of_kind.add_argument
    add("--documents", metavar="N,P+A,...", help="tokens of each, or of its prompt and answer")
    add("--random", type=int, metavar="N", help="documents of random lengths, with --length")
    add("--seed", type=int, default=0, help="of these lengths (%(default)s)")
    add("--length", type=int, metavar="T", help="tokens of the row; alone: one document")
    add("--block-size", type=int, default=32, metavar="B", help="tokens a block (%(default)s)")
    add("--row-cost", type=int, default=1500, metavar="P", help="work of a row, in visible pairs")


def _add_degrees(of_kind: argparse.ArgumentParser, kind: str) -> None:
    add = of_kind.add_argument
    if kind in ("mask", "owners"):
        add("--bp", type=int, default=1, help="BP degree (%(default)s)")
        add("--cp", type=int, help="CP degree (that of BP)")
        if kind == "mask":
            add("--window", type=int, help="sliding window in tokens")
        return
    add("--ranks", type=int, default=8, help="that share the row, 2 or more (%(default)s)")
    if kind == "bytes":
        add("--window", type=int, default=1024, help="of the layers with one (%(default)s)")
        heads = "query heads, key heads, head dimension (%(default)s)"
        add("--heads", nargs=3, type=int, default=[32, 8, 128], metavar=("Q", "K", "D"), help=heads)


def row_of(options: argparse.Namespace) -> Sample:
    """The packed row that was asked for."""
    if options.documents is not None:
        return rows.described(options.documents, options.length)
    if options.length is None:
        raise ValueError(
            "which row? give --documents N,N,..., or --length T with --random N or not"
        )
    return rows.random_lengths(options.length, options.random or 1, options.seed)


def plan_of(options: argparse.Namespace, sample: Sample) -> tuple[SequencePlan, str]:
    """(its plan, the name of its mode)."""
    cp = options.bp if options.cp is None else options.cp
    mode = parallel_mode(options.bp, cp)
    asked = SequenceOptions(options.block_size, options.bp, cp, row_cost=options.row_cost)
    return make_plan(sample, asked), mode


def draw(options: argparse.Namespace) -> list[Path]:
    """The picture that was asked for; its files."""
    out = options.out
    if options.kind == "loss":
        from megatron_bp.training.record import read_metrics  # slow: it imports torch

        alike = len({run.name for run in options.run}) < len(options.run)
        names = [str(run) if alike else run.name for run in options.run]
        found = [read_metrics(run / "metrics.jsonl") for run in options.run]
        return draw_losses(dict(zip(names, found, strict=True)), out)
    if options.kind == "scaling":
        predicted = {}
        if options.predicted is not None:
            text = options.predicted.read_text(encoding="utf-8")
            predicted = scaling.series_of(json.loads(text))
        panels = scaling.together(scaling.PAPER, predicted)
        return scaling.draw_scaling(panels, options.title or scaling.paper_title(), out)
    sample = row_of(options)
    if options.kind in ("mask", "owners"):
        plan, mode = plan_of(options, sample)
        if options.kind == "mask":
            return mask.draw(plan, sample, mode, options.window, out)
        return owners.draw(plan, sample, mode, out)
    if options.ranks < 2:
        raise ValueError(f"--ranks {options.ranks}: modes differ from 2 ranks on")
    asked = SequenceOptions(options.block_size, row_cost=options.row_cost)
    if options.kind == "cost":
        return cost.draw(sample, options.ranks, asked, out)
    attention = Attention(*options.heads)
    forms = exchanged.layouts(options.ranks, attention)
    windows = (None, options.window)
    alone = rows.random_lengths(len(sample.document), 1, 0)
    several = [alone, sample] if len(sample.document_keys) > 1 else [sample]
    return exchanged.draw(several, asked, forms, attention, windows, out)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw, and print the files."""
    options = parser().parse_args(argv)
    try:
        picture.need_matplotlib()
        files = draw(options)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"draw: error: {error}")
    print(f"draw: {', '.join(map(str, files))}")


if __name__ == "__main__":
    main()
