"""Files under the final names: all or none, whenever the process dies.

Everything is made in P's scratch folder .P.partial, which a lock keeps to one run; what a killed
run left in it is removed by the next.
"""

import contextlib
import fcntl
import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_bp.tools.prepare.tokenizing import Ids

# In the order in which they get final names. MASK is of chats only.
MASK = ".supervised.npy"
ENDINGS = (".bin", ".bytes.npy", ".json", ".idx")
ALL_ENDINGS = (MASK, *ENDINGS)
STEM, SPOOL, SPOOL_MASK, LOCK, PUBLISHING = "data", "spool", "spool.mask", "lock", "publishing"


@contextlib.contextmanager
def scratch(prefix: Path) -> Iterator[Path]:
    """Hand out P's empty scratch folder, and remove it with what is in it, whatever happens.

    Raises:
        ValueError: it cannot be made, or another run has it.
    """
    folder = prefix.parent / f".{prefix.name}.partial"
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(
            f"Cannot write in {prefix.parent} ({error.strerror}): choose another --output-prefix."
        ) from error
    try:
        _lock(lock, folder, prefix)
        if (folder / PUBLISHING).exists() and not os.path.lexists(f"{prefix}.idx"):
            _remove(prefix)  # killed between the first and the last move
        _empty(folder)
        try:
            yield folder
        finally:
            _empty(folder)
            (folder / LOCK).unlink()
            folder.rmdir()
    finally:
        os.close(lock)


def _lock(lock: int, folder: Path, prefix: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = os.fstat(lock).st_nlink == 0  # the run that had it has just ended
    except BlockingIOError:
        taken = True
    if taken:
        raise ValueError(
            f"{folder} is in use: another run is writing {prefix}; wait for it, or give another "
            f"--output-prefix."
        )


def _empty(folder: Path) -> None:
    """Remove what a run makes in it, and nothing else: rmdir then fails on what is not ours."""
    for name in (SPOOL, SPOOL_MASK, PUBLISHING, *(f"{STEM}{ending}" for ending in ALL_ENDINGS)):
        (folder / name).unlink(missing_ok=True)


def _remove(prefix: Path) -> None:
    for ending in ALL_ENDINGS:
        Path(f"{prefix}{ending}").unlink(missing_ok=True)


def refuse_to_overwrite(prefix: Path) -> None:
    """Raise a ValueError if a file has one of the final names."""
    for ending in ALL_ENDINGS:
        if os.path.lexists(f"{prefix}{ending}"):
            raise ValueError(
                f"{prefix}{ending} exists: give another --output-prefix, or --overwrite."
            )


def write_indexed(stem: Path, dtype: type[np.integer], documents: Iterable[Ids]) -> None:
    """Write `stem`.bin and .idx, each array of ids a document of one sequence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Megatron misses on a machine without a GPU
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{stem}.bin", dtype)
    for ids in documents:
        builder.add_document(ids, [len(ids)])
    builder.finalize(f"{stem}.idx")


def write_mask(stem: Path, tokens: int, masks: Iterable[NDArray[np.bool_]]) -> int:
    """Write `stem`.supervised.npy and return how many tokens are supervised.

    Args:
        stem: of the file.
        tokens: in all.
        masks: of the documents in the order of the .bin, bool[n] each.
    """
    bits = np.lib.format.open_memmap(f"{stem}{MASK}", "w+", np.uint8, (-(-tokens // 8),))
    left, at, supervised = np.zeros(0, np.bool_), 0, 0
    for mask in masks:
        supervised += int(mask.sum())
        left = np.concatenate([left, mask])
        whole = len(left) // 8
        bits[at : at + whole] = np.packbits(left[: 8 * whole], bitorder="little")
        left, at = left[8 * whole :], at + whole
    if len(left):
        bits[at] = np.packbits(left, bitorder="little")[0]
    assert 8 * at + len(left) == tokens
    bits.flush()
    return supervised


def checksums(stem: Path) -> dict[str, str]:
    """Return the sha256 of all files but .json, by ending without its dot."""
    out = {}
    for ending in (".bin", ".idx", ".bytes.npy", MASK):
        if not os.path.exists(f"{stem}{ending}"):
            continue
        with open(f"{stem}{ending}", "rb") as stream:
            out[ending[1:]] = hashlib.file_digest(stream, "sha256").hexdigest()
    return out


def publish(folder: Path, prefix: Path) -> None:
    """Move the files to their final names, the index last: without it there is no data set."""
    (folder / PUBLISHING).touch()  # tells the next run whose the files are, if this one is killed
    Path(f"{prefix}.idx").unlink(missing_ok=True)  # an old one must not stand beside new data
    Path(f"{prefix}{MASK}").unlink(missing_ok=True)  # nor one of chats beside new texts
    try:
        for ending in ALL_ENDINGS:
            if ending == MASK and not (folder / f"{STEM}{MASK}").exists():
                continue
            os.replace(folder / f"{STEM}{ending}", f"{prefix}{ending}")
    except BaseException:
        _remove(prefix)
        raise
