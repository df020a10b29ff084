"""What each mode of a slot costs on a packed row, from the plan that training makes.

`python -m megatron_bp.tools.modes --length 131072 --documents 64 --ranks 8` prints one line a mode:
speed-up of the planned work over one rank, rows of the rank that has most, the most rows that a
rank sends times the ranks it sends them to, and the clean rows that a rank sees and does not hold,
the mean over ranks: fewer cannot be sent. `--draws 8` does the same for documents of random length:
the worst of eight rows, and of what ranks lack the mean. Nothing is timed, and no communication is
in the speed-up.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_bp.data.document import Document
from megatron_bp.sequence.needs import lacked_spans
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan


@dataclass(frozen=True)
class Cost:
    """Of one mode.

    Attributes:
        mode: its name, with what tells it from others of that name.
        speed_up: work of one rank / that of the worst rank of the slot.
        rows: of the rank that has most.
        sent: rows x receivers of the rank that sends most, if all is sent to all.
        lacked: clean rows that a rank sees and does not hold, the mean over ranks; None in mode CP,
            where corrupted rows cross too.
    """

    mode: str
    speed_up: float
    rows: int
    sent: int
    lacked: float | None


def packed_row(length: int, documents: int) -> Sample:
    """A row of documents of equal length; the last takes what is left over."""
    sizes = [length // documents] * documents
    sizes[-1] += length - sum(sizes)
    return pack([Document(np.zeros(n, np.int32), np.ones(n, np.bool_), 0) for n in sizes], length)


def random_row(length: int, documents: int, draw: int) -> Sample:
    """A row of documents whose lengths are lognormal(0, 1), scaled to its length, at least 64."""
    drawn = np.random.default_rng(draw).lognormal(0, 1, documents)
    least = min(64, length // documents)
    sizes = np.maximum(least, (drawn * length / drawn.sum()).astype(int))
    while missing := length - sizes.sum():
        longest = sizes.argmax()
        sizes[longest] = max(least, sizes[longest] + missing)
    return pack([Document(np.zeros(n, np.int32), np.ones(n, np.bool_), 0) for n in sizes], length)


def degrees(ranks: int) -> dict[str, tuple[int, int]]:
    """(BP, CP) of each mode that `ranks` ranks can work in, by its name, CSBP first."""
    inner = [c for c in range(ranks - 1, 1, -1) if ranks % c == 0]
    hybrid = {f"hybrid, CP {c}": (ranks, c) for c in inner}
    return {"CSBP": (ranks, ranks), "CP": (1, ranks)} | hybrid | {"BP": (ranks, 1)}


def costs(
    sample: Sample, ranks: int, block_size: int, row_cost: int, max_imbalance: float = 1.03
) -> list[Cost]:
    """The modes that `ranks` ranks can work in, CSBP first.

    Args:
        sample: the packed row.
        ranks: of the slot.
        block_size: tokens a block.
        row_cost: linear work of a row in visible pairs.
        max_imbalance: see `SequenceOptions`.
    """
    alone = int(make_plan(sample, SequenceOptions(block_size, row_cost=row_cost)).cost.sum())
    out = []
    for mode, (bp, cp) in degrees(ranks).items():
        options = SequenceOptions(
            block_size, bp, cp, row_cost=row_cost, max_imbalance=max_imbalance
        )
        plan = make_plan(sample, options)
        shares = [plan.rows_of(rank) for rank in range(ranks)]
        out.append(
            Cost(
                mode,
                alone / max(1, int(plan.cost.max())),
                max(share.num_rows for share in shares),
                max(share.num_sent for share in shares) * (cp - 1),
                None if options.splits_units else mean_lacked(plan),
            )
        )
    return out


def mean_lacked(plan: SequencePlan) -> float:
    """Clean rows that a rank sees and does not hold, the mean over the slot's ranks."""
    spans = [lacked_spans(plan, rank) for rank in range(plan.options.slot)]
    return sum(int((stop - start).sum()) for start, stop in spans) / len(spans)


def over_draws(found: Sequence[Cost]) -> Cost:
    """The worst of a mode over several rows, and the mean of what ranks lack."""
    lacked = [cost.lacked for cost in found if cost.lacked is not None]
    return Cost(
        found[0].mode,
        min(cost.speed_up for cost in found),
        max(cost.rows for cost in found),
        max(cost.sent for cost in found),
        sum(lacked) / len(lacked) if lacked else None,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m megatron_bp.tools.modes", description=__doc__)
    add = parser.add_argument
    add("--length", type=int, default=131072, metavar="T", help="tokens of the row")
    add("--documents", type=int, default=1, metavar="N", help="of equal length, without --draws")
    add("--draws", type=int, default=0, metavar="K", help="rows of documents of random length")
    add("--ranks", type=int, default=8, metavar="R", help="that share the row, 2 or more")
    add("--block-size", type=int, default=32, metavar="B", help="tokens a block")
    add("--row-cost", type=int, default=1500, metavar="P", help="linear work of a row, in pairs")
    add("--max-imbalance", type=float, default=1.03, metavar="M", help="as in training")
    options = parser.parse_args(argv)
    least_values = {"documents": 1, "ranks": 2, "block_size": 1, "row_cost": 0, "draws": 0}
    for name, least in (least_values | {"max_imbalance": 1}).items():
        if not getattr(options, name) >= least:
            flag = name.replace("_", "-")
            sys.exit(f"modes: error: --{flag} {getattr(options, name)}: must be at least {least}")
    if options.length < options.documents:
        sys.exit(
            f"modes: error: --length {options.length}: must hold a token of each of "
            f"{options.documents} documents"
        )
    rows = [random_row(options.length, options.documents, k) for k in range(options.draws)]
    rows = rows or [packed_row(options.length, options.documents)]
    sizes = options.ranks, options.block_size, options.row_cost
    by_row = [costs(row, *sizes, options.max_imbalance) for row in rows]
    print("| mode | speed-up | rows a rank | rows sent | rows lacked |\n|---|---|---|---|---|")
    for found in zip(*by_row, strict=True):
        cost = over_draws(found)
        lacked = "-" if cost.lacked is None else f"{cost.lacked:,.0f}"
        print(f"| {cost.mode} | {cost.speed_up:.2f} | {cost.rows:,} | {cost.sent:,} | {lacked} |")


if __name__ == "__main__":
    main()
