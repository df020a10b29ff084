"""Which files are read, in which order, and as what."""

import fnmatch
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# A plain .json is a file of a source tree like any other: --format jsonl reads it line by line.
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz")


@dataclass(frozen=True)
class Found:
    """A file: its name inside the input it was found in, and where it lies."""

    name: str
    path: Path

    @property
    def gzipped(self) -> bool:
        return self.name.endswith(".gz")


def is_jsonl(name: str, format: str) -> bool:
    """Whether the file is read as JSON lines; `format` is one of options.FORMATS."""
    return format in ("jsonl", "chats") or (format == "auto" and name.endswith(JSONL_SUFFIXES))


def excluded(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern fits the whole of `name` or one of the names in it."""
    parts = (name, *name.split("/"))
    return any(fnmatch.fnmatchcase(part, pattern) for pattern in patterns for part in parts)


def walk(
    inputs: Sequence[Path], suffixes: Sequence[str], exclude: Sequence[str], skipped: Counter[str]
) -> Iterator[Found]:
    """Yield the regular files under `inputs` in sorted order; counts the others in `skipped`.

    An input that is itself a link is followed; a link inside it is not. A suffix is looked for
    before a .gz as well.
    """

    def wanted(name: str, path: Path) -> bool:
        reason = None
        if excluded(name, exclude):
            reason = "excluded"
        elif os.path.islink(path):
            reason = "symlink"
        elif not os.path.isdir(path):
            fits = (name.endswith(tuple(suffixes)), name[:-3].endswith(tuple(suffixes)))
            if not os.path.isfile(path):
                reason = "not_a_regular_file"
            elif suffixes and not fits[0] and not (name.endswith(".gz") and fits[1]):
                reason = "other_suffix"
        if reason:
            skipped[reason] += 1
        return reason is None

    def unreadable(error: OSError) -> None:
        skipped["unreadable"] += 1

    for number, given in enumerate(inputs):
        root = given.resolve()
        if root.is_file():
            if wanted(root.name, root):
                yield Found(f"{number}/{root.name}", root)
            continue
        for folder, folders, files in os.walk(root, onerror=unreadable):
            inside = Path(folder).relative_to(root)
            folders[:] = sorted(
                x for x in folders if wanted((inside / x).as_posix(), root / inside / x)
            )
            for file in sorted(files):
                name = (inside / file).as_posix()
                if wanted(name, root / name):
                    yield Found(f"{number}/{name}", root / name)


def order_key(seed: int, name: str, line: int = 0) -> bytes:
    """Return what documents are sorted by: that of two does not depend on the others."""
    place = f"{name}:{line}" if line else name
    return hashlib.sha256(os.fsencode(f"{seed}/{place}")).digest()


def shuffled(files: Iterable[Found], seed: int) -> list[Found]:
    """Return the files in the seed's order: that of two files does not depend on the others."""
    return sorted(files, key=lambda x: order_key(seed, x.name))
