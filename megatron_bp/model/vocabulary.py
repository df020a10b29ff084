"""Rows of the vocabulary's tables for ids that a checkpoint does not have.

Megatron pads a table to a multiple of make-vocab-size-divisible-by x TP, and loads one of another
size by setting it to zero and reading the ids that both have: an added id is then zero, or what the
checkpoint's *padding* held there. Each rank has the rows of its ids alone.
"""

# Shapes: p this rank's padded ids, A those of them that are added, H hidden size.

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Added = Literal["mean", "random"]


def vocabulary_tables(model: Any) -> dict[str, Tensor]:
    """Name -> table [p, H] of each that this pipeline stage (a bare GPTModel) holds.

    Where embedding and head are tied, the last of several stages holds a copy.
    """
    tables = {}
    if model.pre_process:
        tables["embedding"] = model.embedding.word_embeddings.weight
    if model.post_process and model.output_layer.weight is not None:
        tables["output layer"] = model.output_layer.weight
    return tables


def added_rows(table_pH: Tensor, old: int, new: int, group: dist.ProcessGroup) -> slice:
    """This rank's rows of the ids `old` <= id < `new`."""
    first = group.rank() * len(table_pH)
    start, stop = (min(max(id_ - first, 0), len(table_pH)) for id_ in (old, new))
    return slice(start, stop)


@torch.no_grad()
def grow(
    table_pH: Tensor, old: int, new: int, group: dist.ProcessGroup, fresh_AH: Tensor | None
) -> None:
    """Set the rows of the ids from `old` to `new`, in place; padding above becomes 0. Collective.

    The rows of true ids below `old` keep their bits.

    Args:
        table_pH: this rank's rows, as they were loaded.
        old: true ids of the checkpoint.
        new: true ids from here on.
        group: the ranks that share the table (TP).
        fresh_AH: what the added rows become; None for the mean of all rows below `old`.
    """
    rows = added_rows(table_pH, old, new, group)
    if fresh_AH is None:
        total = table_pH[: rows.start].to(torch.float64).sum(0)
        dist.all_reduce(total, group=group)
        table_pH[rows] = (total / old).to(table_pH.dtype)
    else:
        table_pH[rows] = fresh_AH
    table_pH[rows.stop :] = 0
