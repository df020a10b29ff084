"""What ranks tell one another through the job's store: no process group, and nobody waits for ever.

Rank 0 reads what all have told and says how to go on. A rank that fails tells so like any other, so
that nobody waits for it; one that is gone is known by its silence.
"""

import time
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store

PAUSE = 0.02  # seconds between two looks; it grows to
LONGEST_PAUSE = 0.25
HERE = "here"  # of a rank that came to a meeting


class ToldToEndError(BaseException):
    """What started the ranks ends this one, as another is gone."""


class Board:
    """A place where each rank puts up notes."""

    def __init__(self, store: Store, rank: int, world: int, patience: float) -> None:
        """Of a job.

        Args:
            store: that all its ranks reach.
            rank: this one.
            world: how many there are.
            patience: seconds that a rank waits for others.
        """
        self._store, self.rank, self.world, self.patience = store, rank, world, patience
        self.ending = False  # told to end: from then on waiting is given up

    def put(self, topic: str, text: str) -> None:
        """Put up this rank's note."""
        self._store.set(f"{topic}/{self.rank}", text)
        self._store.add(f"{topic}/count", 1)

    def begin(self, topic: str, name: str) -> None:
        """Say what this rank does now, in case that it does not come back from it."""
        self._store.set(f"{topic}/now/{self.rank}", name)

    def begun(self, topic: str, rank: int) -> str | None:
        """What a rank said last that it does; None if it said nothing."""
        return self._read(f"{topic}/now/{rank}")

    def gather(self, topic: str, ranks: Sequence[int] | None = None) -> dict[int, str | None]:
        """The notes of all ranks; None of those that put up none in time.

        Args:
            topic: of the notes.
            ranks: the only ones that put some up; default: all.
        """
        ranks = range(self.world) if ranks is None else ranks
        keys = [f"{topic}/{rank}" for rank in ranks]

        def all_here() -> bool:  # one that was given up may put up a late note, and is counted
            enough = self._store.add(f"{topic}/count", 0) >= len(ranks)
            return enough and self._store.check(keys)

        self._until(all_here)
        return {r: self._read(f"{topic}/{r}") for r in ranks}

    def announce(self, topic: str, text: str) -> None:
        """Rank 0's word to all."""
        self._store.set(topic, text)

    def hear(self, topic: str) -> str | None:
        """Rank 0's word; None if it does not come. Rank 0 itself may have waited for others."""
        self._until(lambda: self._store.check([topic]), 2 * self.patience)
        return self._read(topic)

    def heard(self, topic: str) -> str | None:
        """Rank 0's word, if it has come already."""
        return self._read(topic)

    def meet(self, topic: str, ranks: Sequence[int]) -> dict[int, str | None]:
        """Wait for the ranks of a group, this one among them; what others than `HERE` said.

        None is of a rank that did not come. One that will not come may `put` up why.
        """
        self.put(topic, HERE)
        return {rank: note for rank, note in self.gather(topic, ranks).items() if note != HERE}

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _until(self, done: Callable[[], bool], patience: float | None = None) -> None:
        end = time.monotonic() + (self.patience if patience is None else patience)
        pause = PAUSE
        while not done() and time.monotonic() < end:
            if self.ending:
                raise ToldToEndError
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
