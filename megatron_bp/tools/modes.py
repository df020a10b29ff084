"""What each mode of a slot costs on a packed row, from the plan that training makes.

`python -m megatron_bp.tools.modes --length 131072 --documents 64 --ranks 8` prints one line a mode:
speed-up of the planned work over one rank, rows of the rank that has most, and the most rows that a
rank sends times the ranks it sends them to. Nothing is timed, and no communication is in it.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_bp.data.document import Document
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, make_plan


@dataclass(frozen=True)
class Cost:
    """Of one mode.

    Attributes:
        mode: its name, with what tells it from others of that name.
        speed_up: work of one rank / that of the worst rank of the slot.
        rows: of the rank that has most.
        sent: rows x receivers of the rank that sends most.
    """

    mode: str
    speed_up: float
    rows: int
    sent: int


def packed_row(length: int, documents: int) -> Sample:
    """A row of documents of equal length; the last takes what is left over."""
    sizes = [length // documents] * documents
    sizes[-1] += length - sum(sizes)
    return pack([Document(np.zeros(n, np.int32), np.ones(n, np.bool_), 0) for n in sizes], length)


def costs(sample: Sample, ranks: int, block_size: int, row_cost: int) -> list[Cost]:
    """The modes that `ranks` ranks can work in, CSBP first.

    Args:
        sample: the packed row.
        ranks: of the slot.
        block_size: tokens a block.
        row_cost: linear work of a row in visible pairs.
    """
    degrees = {"CSBP": (ranks, ranks), "CP": (1, ranks)}
    inner = [c for c in range(ranks - 1, 1, -1) if ranks % c == 0]
    degrees |= {f"hybrid, CP {c}": (ranks, c) for c in inner}
    degrees["BP"] = (ranks, 1)
    alone = int(make_plan(sample, SequenceOptions(block_size, row_cost=row_cost)).cost.sum())
    out = []
    for mode, (bp, cp) in degrees.items():
        options = SequenceOptions(block_size, bp, cp, row_cost=row_cost)
        plan = make_plan(sample, options)
        shares = [plan.rows_of(rank) for rank in range(ranks)]
        out.append(
            Cost(
                mode,
                alone / max(1, int(plan.cost.max())),
                max(share.num_rows for share in shares),
                max(share.num_sent for share in shares) * (cp - 1),
            )
        )
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m megatron_bp.tools.modes", description=__doc__)
    add = parser.add_argument
    add("--length", type=int, default=131072, metavar="T", help="tokens of the row")
    add("--documents", type=int, default=1, metavar="N", help="of equal length")
    add("--ranks", type=int, default=8, metavar="R", help="that share the row, 2 or more")
    add("--block-size", type=int, default=32, metavar="B", help="tokens a block")
    add("--row-cost", type=int, default=1500, metavar="P", help="linear work of a row, in pairs")
    options = parser.parse_args(argv)
    for name, least in (("documents", 1), ("ranks", 2), ("block_size", 1), ("row_cost", 0)):
        if getattr(options, name) < least:
            flag = name.replace("_", "-")
            sys.exit(f"modes: error: --{flag} {getattr(options, name)}: must be at least {least}")
    if options.length < options.documents:
        sys.exit(
            f"modes: error: --length {options.length}: must hold a token of each of "
            f"{options.documents} documents"
        )
    row = packed_row(options.length, options.documents)
    print("| mode | speed-up | rows a rank | rows sent |\n|---|---|---|---|")
    for cost in costs(row, options.ranks, options.block_size, options.row_cost):
        print(f"| {cost.mode} | {cost.speed_up:.2f} | {cost.rows:,} | {cost.sent:,} |")


if __name__ == "__main__":
    main()
