"""What became of every raw document, and which of them make the data set, in which order.

Documents are read in one order and written in another: in between, their ids lie in a spool file
and their facts in the columns of a Table. Choosing is a pure function of the columns.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megatron_bp.tools.prepare.encoding import Encoded
from megatron_bp.tools.prepare.inputs import Found, order_key
from megatron_bp.tools.prepare.outcome import CODE, OF_A_FILE, REASONS
from megatron_bp.tools.prepare.reading import Batch

PLACES = 3  # told for each reason


@dataclass(frozen=True, eq=False)
class Table:
    """One entry a raw document, in the order of reading.

    Attributes:
        key: uint64, sorts the data set: from the seed, the file's name and the line.
        reason, tokens, size, turns, digest: as in `Encoded`.
        offset: int64, place of its first id in the spool, in ids.
        file, line: int64, where it was read; line 0 is the whole file.
    """

    key: NDArray[np.uint64]
    reason: NDArray[np.uint8]
    tokens: NDArray[np.int64]
    size: NDArray[np.int64]
    turns: NDArray[np.int64]
    roles: NDArray[np.int64]
    digest: NDArray[np.uint64]
    offset: NDArray[np.int64]
    file: NDArray[np.int64]
    line: NDArray[np.int64]


@dataclass
class Spool:
    """Takes batches in the order of reading: ids and masks to files, facts to columns.

    Attributes:
        path: for the ids.
        mask_path: for what is supervised, a byte an id; stays empty for texts.
        files, seed: as read, for the order of the documents.
        detail: more words on the first document of a reason, with its place.
    """

    path: Path
    mask_path: Path
    files: Sequence[Found]
    seed: int
    columns: dict[str, list[NDArray[Any]]] = field(
        default_factory=lambda: {
            "key": [np.zeros(0, np.uint64)],
            "reason": [np.zeros(0, np.uint8)],
            "tokens": [np.zeros(0, np.int64)],
            "size": [np.zeros(0, np.int64)],
            "turns": [np.zeros(0, np.int64)],
            "roles": [np.zeros(0, np.int64)],
            "digest": [np.zeros((0, 2), np.uint64)],
            "file": [np.zeros(0, np.int64)],
            "line": [np.zeros(0, np.int64)],
        }
    )
    detail: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self.stream = open(self.path, "wb")
        self.mask_stream = open(self.mask_path, "wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stream.close()
        self.mask_stream.close()

    def add(self, batch: Batch, encoded: Encoded) -> None:
        encoded.ids.tofile(self.stream)
        encoded.supervised.tofile(self.mask_stream)
        names = ((self.files[file].name, line) for file, line in batch.places)
        keys = b"".join(order_key(self.seed, name, line)[:8] for name, line in names)
        places = np.array(batch.places, np.int64)
        columns = self.columns
        columns["key"].append(np.frombuffer(keys, ">u8").astype(np.uint64))
        columns["file"].append(places[:, 0])
        columns["line"].append(places[:, 1])
        for name in ("reason", "tokens", "size", "turns", "roles", "digest"):
            columns[name].append(getattr(encoded, name))
        for i, words in encoded.detail.items():
            words = f"{place_of(self.files, *batch.places[i])}: {words}"
            self.detail.setdefault(REASONS[encoded.reason[i]], words)

    def table(self) -> Table:
        columns = {name: np.concatenate(parts) for name, parts in self.columns.items()}
        tokens = columns["tokens"]
        return Table(**columns, offset=np.cumsum(tokens) - tokens)


def select(
    table: Table, max_bytes: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Return (documents of the data set, all that were considered, each one's reason).

    The first two are places in the table in the data set's order; the reasons are the table's with
    duplicates marked: of equal texts the first in that order stays.
    """
    reason = table.reason.copy()
    of_a_file = np.isin(reason, [CODE[name] for name in OF_A_FILE])
    void = np.isin(table.file, table.file[of_a_file]) & ~of_a_file
    rows = np.flatnonzero(~void)
    order = rows[np.argsort(table.key[rows], kind="stable")]
    good = order[reason[order] == 0]
    reason[good[_seen_before(table.digest[good])]] = CODE["duplicate"]
    kept = reason[order] == 0
    if max_bytes is not None:
        full = np.flatnonzero(np.cumsum(table.size[order] * kept) >= max_bytes)
        if len(full):
            order, kept = order[: full[0] + 1], kept[: full[0] + 1]
    return order[kept], order, reason


def _seen_before(digest: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether an earlier row of `digest` [n, 2] equals this one, [n]."""
    by_value = np.lexsort((np.arange(len(digest)), digest[:, 1], digest[:, 0]))
    one = digest[by_value]
    out = np.zeros(len(digest), np.bool_)
    out[by_value[1:]] = (one[1:] == one[:-1]).all(axis=1)
    return out


def count_skipped(reason: NDArray[np.uint8]) -> Counter[str]:
    """Return how many were left out for each reason."""
    counts = np.bincount(reason, minlength=len(REASONS)).tolist()
    return Counter({name: n for name, n in zip(REASONS, counts, strict=True) if name and n})


def first_places(
    table: Table, rows: NDArray[np.int64], reason: NDArray[np.uint8], files: Sequence[Found]
) -> dict[str, list[str]]:
    """Return the first few places (name, or name:line) of each reason among `rows`, by name."""
    rank = np.empty(len(files), np.int64)
    rank[sorted(range(len(files)), key=lambda i: files[i].name)] = np.arange(len(files))
    out = {}
    for code, name in enumerate(REASONS):
        found = rows[reason[rows] == code]
        if name and len(found):
            order = np.lexsort((table.line[found], rank[table.file[found]]))
            out[name] = [place(files, table, row) for row in found[order[:PLACES]]]
    return dict(sorted(out.items()))


def place(files: Sequence[Found], table: Table, row: np.int64 | int) -> str:
    """Return where a document was read: "0/sub/b.jsonl:17"."""
    return place_of(files, int(table.file[row]), int(table.line[row]))


def place_of(files: Sequence[Found], file: int, line: int) -> str:
    """Return a place in words; line 0 is the whole file."""
    return f"{files[file].name}:{line}" if line else files[file].name
