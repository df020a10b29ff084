"""SequencePlan: which corrupted rows exist and who computes which rows.

Made on the host from integers alone; the same on every rank. No torch, no process group, no noise.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_bp.sequence.blocks import BlockGrid, block_grid
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.partition import Chunk, clean_chunks, home_owners

CleanRelation = Literal["block", "token"]
OwnRelation = Literal["bidirectional", "causal"]


@dataclass(frozen=True)
class SequenceOptions:
    """What a plan needs beyond the sample.

    Attributes:
        block_size: tokens a block.
        block_parallel_size: ranks that share the units of one sequence (BP).
        context_parallel_size: ranks that shard its clean rows (CP); equal to BP, or both 1.
        clean_relation: a clean row sees up to the end of its block, or up to itself.
        own_relation: a corrupted row sees its whole unit, or its unit up to itself.
        row_cost: linear work of one row in visible pairs, for the cost of a rank.
    """

    block_size: int
    block_parallel_size: int = 1
    context_parallel_size: int = 1
    clean_relation: CleanRelation = "block"
    own_relation: OwnRelation = "bidirectional"
    row_cost: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that no plan can be made for."""
        if self.block_size < 1:
            raise ValueError(f"the diffusion block size must be at least 1, got {self.block_size}")
        if self.block_parallel_size != self.context_parallel_size:
            raise NotImplementedError(
                f"BP {self.block_parallel_size} with CP {self.context_parallel_size}: only equal "
                f"degrees (single, CSBP) can be planned"
            )


@dataclass(frozen=True)
class Unit:
    """Corrupted rows that one rank computes: clean positions [start, stop), in one copy."""

    copy: int
    document: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a row in corrupted order, as int32[U] columns; `units[i]` is a `Unit`."""

    copy: NDArray[np.int32]
    document: NDArray[np.int32]
    start: NDArray[np.int32]
    stop: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, i: int) -> Unit:
        columns = (self.copy, self.document, self.start, self.stop)
        return Unit(*(int(column[i]) for column in columns))

    @property
    def offset(self) -> NDArray[np.int64]:
        """int64[U + 1]: corrupted rows before each unit; the last entry is X, all of them."""
        return np.append(0, np.cumsum(self.stop - self.start, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class SequencePlan:
    """Everything about a packed row that does not depend on noise (T, N, U, R ranks as named).

    Attributes:
        block_of: int32[T], block of each position; -1 for padding.
        block_start, block_stop: int32[N].
        block_document_start: int32[N], first position of the block's document.
        block_index: int32[N], number of the block inside its document.
        units: the target units in corrupted order.
        unit_block: int32[U], the (first) block of each unit.
        unit_owner: int32[U], slot rank that computes the unit.
        chunks: clean chunks in order of position, with the CP rank that computes each.
        cost: int64[R], work of each slot rank in visible pairs.
        options: what it was made with.
    """

    block_of: NDArray[np.int32]
    block_start: NDArray[np.int32]
    block_stop: NDArray[np.int32]
    block_document_start: NDArray[np.int32]
    block_index: NDArray[np.int32]
    units: Units
    unit_block: NDArray[np.int32]
    unit_owner: NDArray[np.int32]
    chunks: tuple[Chunk, ...]
    cost: NDArray[np.int64]
    options: SequenceOptions

    @property
    def num_rows(self) -> int:
        """Rows of the sample over the whole slot, each counted once."""
        return int(np.count_nonzero(self.block_of >= 0)) + int(self.units.offset[-1])

    def clean_positions(self, rank: int) -> NDArray[np.int32]:
        """int32: the clean positions that CP rank `rank` computes, in order."""
        parts = [np.arange(c.start, c.stop, dtype=np.int32) for c in self.chunks if c.rank == rank]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    def owned_units(self, rank: int) -> NDArray[np.int64]:
        """int64: the units that slot rank `rank` computes, in corrupted order."""
        return np.flatnonzero(self.unit_owner == rank)


def make_plan(sample: Sample, options: SequenceOptions) -> SequencePlan:
    """The plan of one packed row. A block with no supervised token has no corrupted rows."""
    grid = block_grid(sample.document, sample.position, options.block_size)
    used = int(np.count_nonzero(grid.block_of >= 0))
    supervised = np.bincount(
        grid.block_of[:used], weights=sample.supervised[:used], minlength=len(grid.start)
    )
    target = np.flatnonzero(supervised > 0).astype(np.int32)
    units = Units(
        copy=np.zeros(len(target), dtype=np.int32),
        document=grid.document[target],
        start=grid.start[target],
        stop=grid.stop[target],
    )
    chunks = clean_chunks(grid, options.context_parallel_size)
    owner = home_owners(units.start, chunks)
    return SequencePlan(
        block_of=grid.block_of,
        block_start=grid.start,
        block_stop=grid.stop,
        block_document_start=grid.document_start,
        block_index=grid.index,
        units=units,
        unit_block=target,
        unit_owner=owner,
        chunks=chunks,
        cost=_cost(grid, chunks, target, owner, options),
        options=options,
    )


def _cost(
    grid: BlockGrid,
    chunks: tuple[Chunk, ...],
    target: NDArray[np.int32],
    owner: NDArray[np.int32],
    options: SequenceOptions,
) -> NDArray[np.int64]:
    """int64[R]: visible pairs without any window, plus `row_cost` a row, of each slot rank."""
    size = (grid.stop - grid.start).astype(np.int64)
    before = (grid.start - grid.document_start).astype(np.int64)
    triangle = size * (size + 1) // 2
    clean = size * before + (size**2 if options.clean_relation == "block" else triangle)
    own = size * before + (size**2 if options.own_relation == "bidirectional" else triangle)
    clean += size * options.row_cost
    own += size * options.row_cost
    cost = np.zeros(options.block_parallel_size, dtype=np.int64)
    chunk_of = np.searchsorted([c.start for c in chunks], grid.start, side="right") - 1
    ranks = np.array([c.rank for c in chunks], dtype=np.int64)
    if len(size):
        np.add.at(cost, ranks[chunk_of], clean)
    np.add.at(cost, owner, own[target])
    return cost
