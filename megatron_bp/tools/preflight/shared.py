"""Whether all ranks see the folder that rank 0 saves in: a small file there, its name on the board.

Rank 0 writes the file a round before others look for it, so that nobody waits.
"""

import contextlib
import json
import os
import platform
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megatron_bp.tools.preflight.board import Board

TOPIC = "saved/file"
WITHIN = 5.0  # seconds in which a file of another host is seen
PAUSE = 0.25


def nearest(save: str) -> tuple[int, Path]:
    """(levels above it, the folder): what is there of the folder that is saved in.

    Raises:
        ValueError: a file is in the way, or the folder's parents cannot be looked into.
    """
    folder = Path(save).absolute()
    levels, there = next(
        (n, path) for n, path in enumerate((folder, *folder.parents)) if os.path.lexists(path)
    )
    if not os.path.isdir(there):
        raise ValueError(
            f"--save {save}: {there} is a file, and must be a folder or not be there; choose "
            f"another, or move it away"
        )
    return levels, there


class SavedFile:
    """The file of rank 0."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._path: Path | None = None

    def put(self, args: Namespace) -> None:
        """Write it, on rank 0; where that fails, `saving` says why."""
        if self._board.rank or self._board.world == 1 or not args.save:
            return
        try:
            levels, there = nearest(args.save)
            handle, name = tempfile.mkstemp(prefix="preflight-", dir=there)
        except (ValueError, OSError):
            return
        os.close(handle)
        self._path = Path(name)
        note = [levels, self._path.name, str(there), platform.node()]
        self._board.announce(TOPIC, json.dumps(note))

    def check(self, args: Namespace) -> None:
        """Look for it, on other ranks: at the same place relative to what they save in.

        Raises:
            ValueError: it is not there.
        """
        note = self._board.heard(TOPIC)
        if self._board.rank == 0 or note is None or not args.save:
            return
        levels, name, there, host = json.loads(note)
        folder = Path(args.save).absolute()
        path = [folder, *folder.parents][: levels + 1][-1] / name
        end = time.monotonic() + WITHIN
        while not os.path.lexists(path):
            if time.monotonic() > end:
                raise ValueError(
                    f"--save {args.save}: what rank 0 writes into {there} on {host} is not seen "
                    f"here, and a checkpoint is written by all ranks into one folder; choose one "
                    f"on a disk that all hosts share"
                )
            time.sleep(PAUSE)

    def remove(self) -> None:
        """Take it away."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._path = None


@contextlib.contextmanager
def saved_file(board: Board) -> Iterator[SavedFile]:
    """Rank 0's file; it is gone at the end, whatever happens."""
    file = SavedFile(board)
    try:
        yield file
    finally:
        file.remove()
