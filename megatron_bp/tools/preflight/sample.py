"""Ranks that work on one sequence read the same one: the first, by a digest."""

import hashlib
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megatron_bp import arguments
from megatron_bp.batch.dataset import SampleDataset, build_datasets
from megatron_bp.tools.preflight.board import Board
from megatron_bp.tools.preflight.findings import Finding

INDEXED = "indexed"  # rank 0's word that the data sets' index is there


def check_sample(args: Namespace, replica: int, board: Board) -> Finding:
    """The first micro-batch of this rank, as the run reads it: its data sets are built as there.

    Args:
        args: Megatron's validated arguments.
        replica: this rank's place among the data-parallel ranks, which read different rows; those
            of a slot, tensor-parallel peers and stages have the same.
        board: of the ranks.

    Raises:
        ValueError: the data do not suffice, or their index is not there.
    """
    if board.rank and board.hear(INDEXED) is None:
        raise ValueError(
            f"rank 0 has not made the index of the data within {2 * board.patience:g} s: that of a "
            f"large blend takes longer at its first start, and is kept; wait longer with "
            f"--preflight-timeout {board.patience:g}, or see what rank 0 says"
        )
    try:
        built = _built(args)
    except OSError as error:
        raise ValueError(
            f"{error}: rank 0 makes this index, and all ranks read it; give --data-cache-path a "
            f"folder that all of them see"
        ) from error
    finally:
        if not board.rank:
            board.announce(INDEXED, "")
    read = next((samples for samples in built if samples is not None), None)
    if read is None:
        return Finding(True, "nothing is read")
    digests = [digest(read[row % len(read)]) for row in rows_of(args.micro_batch_size, replica)]
    name = f"first micro-batch of data-parallel rank {replica}"
    return Finding(True, "ranks of one sequence read the same one", {name: ", ".join(digests)})


def _built(args: Namespace) -> tuple[SampleDataset | None, ...]:
    """The run's data sets. Megatron's ranks wait for rank 0's index in a barrier; ours have.

    A rank that fails would leave the others in such a barrier.
    """
    evaluation = args.eval_iters * args.eval_global_batch_size if args.eval_iters else 0
    training = args.train_samples or (args.train_iters or 0) * args.global_batch_size
    sizes: list[int | None] = [0 if args.skip_train else training, evaluation, evaluation]
    distributed: Any = torch.distributed
    barrier = distributed.barrier
    distributed.barrier = lambda *args, **kwargs: None
    try:
        return build_datasets(
            arguments.dataset_config(args),
            sizes,
            arguments.evaluation_samples(args),
            args.eval_draws,
            args.micro_batch_size,
        )
    finally:
        distributed.barrier = barrier


def rows_of(micro_batch: int, replica: int) -> range:
    """Which rows of the first step a data-parallel rank begins with, as Megatron deals them."""
    return range(replica * micro_batch, (replica + 1) * micro_batch)


def digest(item: Mapping[str, Any]) -> str:
    """Of all that is in a sample."""
    found = hashlib.sha256()
    for name in sorted(item):
        found.update(name.encode() + np.asarray(item[name]).tobytes())
    return found.hexdigest()[:12]
