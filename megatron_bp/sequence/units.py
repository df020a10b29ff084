"""What a plan is made with and what it deals out: options and units. Integers, no torch."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_bp.sequence.blocks import Grid

CleanRelation = Literal["block", "token"]
OwnRelation = Literal["bidirectional", "causal"]
ResponseEnd = Literal["cut", "refuse"]
Scoring = Literal["none", "supervised", "all"]
Alignment = Literal["same", "next"]
Anchor = Literal["row", "block"]


@dataclass(frozen=True)
class SequenceOptions:
    """What a plan needs beyond the sample.

    Attributes:
        block_size: tokens a block.
        block_parallel_size: ranks that share the units of one sequence (BP).
        context_parallel_size: ranks that shard its clean rows (CP): 1, BP or a divisor of BP; or
            any number if BP is 1 (mode CP, which shards all rows by place and splits units).
        clean_relation: a clean row sees up to the end of its block, or up to itself.
        own_relation: a corrupted row sees its whole unit, or its unit up to itself.
        row_cost: linear work of one row in visible pairs, for the cost of a rank.
        score_clean: clean rows carry a loss (the next-token term) on "supervised" next tokens, and
            those of a document's last target block are needed too; on "all", and every row of a
            document that has a target block is.
        grid: blocks count from the document's start, or anew where a response starts or ends.
        response_end: a block is cut where a response ends inside of it; "refuse": an error where a
            prompt follows there.
        alignment: the corrupted row of a position is scored on its own token ("same"), or on the
            next one, and then its block must be computed for that ("next").
        copies: corrupted copies of each target block, each a unit.
        window_anchor: where a corrupted row's window counts from: its position, or its block's
            start, the same for all of its rows.
        max_imbalance: units are moved off the rank of their clean chunk until no rank has more than
            this many times the mean work of its clean shard group (the dearest, if there are
            several); infinite: none is moved.
        align_chunks: mode CP with whole units and chunks of whole blocks, so that only clean rows
            are sent: placed as CSBP places them if no unit is moved.
    """

    block_size: int
    block_parallel_size: int = 1
    context_parallel_size: int = 1
    clean_relation: CleanRelation = "block"
    own_relation: OwnRelation = "bidirectional"
    row_cost: int = 0
    score_clean: Scoring = "none"
    grid: Grid = "document"
    response_end: ResponseEnd = "cut"
    alignment: Alignment = "same"
    copies: int = 1
    window_anchor: Anchor = "row"
    max_imbalance: float = 1.03
    align_chunks: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that no plan can be made for."""
        if self.block_size < 1:
            raise ValueError(f"the diffusion block size must be at least 1, got {self.block_size}")
        if not 1 <= self.copies <= 256:
            raise ValueError(f"--corrupted-copies {self.copies}: must be from 1 to 256")
        bp, cp = self.block_parallel_size, self.context_parallel_size
        if bp < 1 or cp < 1 or (bp > 1 and bp % cp):
            raise ValueError(
                f"BP {bp} with CP {cp}: degrees are at least 1, and CP must divide BP unless BP is "
                f"1; set --context-parallel-size to 1, to BP or to a divisor of it"
            )

        if not self.max_imbalance >= 1:
            raise ValueError(
                f"--max-imbalance {self.max_imbalance}: the worst rank has at least the mean work; "
                f"set 1 or more, such as 1.03"
            )
        if self.align_chunks and bp > 1:
            raise ValueError(
                f"BP {bp} with chunks aligned to blocks: they are a form of mode CP, which has "
                f"BP 1; set --block-parallel-size 1"
            )

    @property
    def slot(self) -> int:
        """Ranks that work on one sequence."""
        return max(self.block_parallel_size, self.context_parallel_size)

    @property
    def groups(self) -> int:
        """Clean shard groups in the slot; slot rank r is in group r // CP."""
        return self.slot // self.context_parallel_size

    @property
    def splits_units(self) -> bool:
        """Mode CP, chunks not aligned: rows are cut by place, and corrupted K/V cross ranks."""
        return self.block_parallel_size < self.context_parallel_size and not self.align_chunks


@dataclass(frozen=True)
class Unit:
    """Corrupted rows of clean positions [start, stop), in one copy; one rank's but in mode CP."""

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
