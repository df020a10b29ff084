"""Rows of a global batch by cost, so that data-parallel ranks compute like rows at the same time.

Megatron deals consecutive rows to ranks: micro-batch size x DP of them are one moment. Sorted, the
rows of any moment are neighbours, whatever DP is; the batch as a set, and so the step, is the same.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_bp.data.order import by_cost


class Costed(Protocol):
    """A source of rows whose cost is known."""

    def __len__(self) -> int: ...

    def __getitem__(self, idx: int | None) -> dict[str, Any]: ...

    def row_costs(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64: work of rows in visible pairs."""
        ...


class CostedBlend:
    """Megatron's blend of sources whose costs are known."""

    def __init__(self, blend: Any) -> None:
        self.blend = blend

    def __len__(self) -> int:
        return len(self.blend)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        item: dict[str, Any] = {"documents": ()} if idx is None else self.blend[idx]
        return item

    def row_costs(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64: work of rows in visible pairs."""
        number = np.asarray(self.blend.dataset_index)[rows]
        of_part = np.asarray(self.blend.dataset_sample_index)[rows]
        costs = np.zeros(len(rows), dtype=np.int64)
        for part in np.unique(number).tolist():
            mine = number == part
            costs[mine] = self.blend.datasets[part].row_costs(of_part[mine])
        return costs


class Balanced:
    """The rows of a source, those of each global batch in the order of their cost."""

    def __init__(self, source: Costed, batch: int) -> None:
        """Wrap a source.

        Args:
            source: rows in the order in which global batches take them.
            batch: rows of a global batch.
        """
        self.source, self.batch = source, batch
        self._first, self._order = -1, np.zeros(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        if idx is None:
            return self.source[None]
        first = idx // self.batch * self.batch
        if first != self._first:
            rows = np.arange(first, min(first + self.batch, len(self.source)))
            self._order = rows[by_cost(self.source.row_costs(rows))]
            self._first = first
        return self.source[int(self._order[idx - first])]
