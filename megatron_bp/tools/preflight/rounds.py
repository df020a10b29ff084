"""Rounds of checks: each rank puts up what it found, rank 0 judges and says how to go on."""

import contextlib
import io
import json
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_bp.tools.preflight.board import Board
from megatron_bp.tools.preflight.findings import (
    Finding,
    Verdict,
    dumped,
    failed,
    judge,
    loaded,
    summary,
    table,
)

EVERYONE = "everyone"  # beside checks: it fails if a rank does not answer
Check = Callable[[], Finding]


class Rounds:
    """Rounds of checks; on rank 0 their verdicts, too."""

    def __init__(self, board: Board) -> None:
        """On a board that all ranks of the job reach."""
        self.board = board
        self._hosts: dict[int, str] = {}
        self._expected = list(range(board.world))  # those that have answered so far
        self._verdicts: list[Verdict] = []
        self._topic = "start"

    def told_to_end(self, number: int, frame: Any) -> None:
        """Raises nothing: what is under way might swallow it."""
        self.board.ending = True

    def do(self, topic: str, checks: Mapping[str, Check]) -> set[str]:
        """Do checks; names of those that some rank did not pass, and `EVERYONE` if one is silent.

        Raises:
            SystemExit: rank 0 is gone.
        """
        self._topic, board = topic, self.board
        found = {}
        for name, check in checks.items():
            board.begin(topic, name)
            found[name] = run(check)
        signal.signal(signal.SIGTERM, self.told_to_end)  # Megatron's arguments set one of their own
        board.put(topic, json.dumps([platform.node(), dumped(found)]))
        if board.rank == 0:
            board.announce(f"{topic}/verdict", json.dumps(self._judge(topic, list(checks))))
        heard = board.hear(f"{topic}/verdict")
        if heard is None:
            print(
                f"preflight: rank {board.rank}: rank 0 is silent in round `{topic}`; if it is at "
                f"work still, wait longer with --preflight-timeout {board.patience:g}",
                file=sys.stderr,
                flush=True,
            )
            raise SystemExit(2)
        return set(json.loads(heard))

    def _judge(self, topic: str, names: list[str]) -> list[str]:
        told: dict[int, dict[str, Finding]] = {}
        silent = []
        for rank, note in self.board.gather(topic, self._expected).items():
            if note is not None:
                self._hosts[rank], findings = json.loads(note)
                told[rank] = loaded(findings)
                continue
            silent.append(rank)
            within = self.board.begun(topic, rank)  # then it is silent there, and not elsewhere
            unseen = Finding(None, f"did not come back from `{within}`")
            told[rank] = {name: unseen for name in names if within not in (None, name)}
        verdicts = [
            judge(name, {rank: told[rank].get(name) for rank in told}, self._hosts)
            for name in names
        ]
        self._verdicts += verdicts
        print("\n".join(table(verdicts)), flush=True)
        self._expected = [rank for rank in self._expected if rank not in silent]
        return [v.check for v in verdicts if not v.ok] + ([EVERYONE] if silent else [])

    def end(self) -> int:
        """The exit status, once all ranks know it."""
        board = self.board
        if board.rank == 0:
            print(f"preflight: {summary(self._verdicts)}", flush=True)
            board.announce("end", "0" if all(v.ok for v in self._verdicts) else "2")
        code = board.hear("end")
        board.put("bye", "")
        if board.rank == 0:  # which may hold the store
            board.patience = 5
            board.gather("bye", self._expected)
        return 2 if code is None else int(code)

    def tell_silent(self) -> None:
        """On rank 0: which ranks had not answered when this one was told to end."""
        board = self.board
        if board.rank == 0:
            board.patience, board.ending = 0, False
            silent = [rank for rank, note in board.gather(self._topic).items() if note is None]
            others = ", ".join(map(str, silent)) or "none"
            print(
                f"preflight: told to end in round `{self._topic}`; ranks that had not answered: "
                f"{others}",
                flush=True,
            )


def run(check: Check) -> Finding:
    """What a check finds; one that raises has failed."""
    written = io.StringIO()
    try:
        with quiet(written):
            return check()
    except SystemExit as error:  # of argparse, which says why before
        lines = [line for line in written.getvalue().splitlines() if "error:" in line]
        return Finding(False, lines[-1] if lines else f"it would exit with {error.code}")
    except Exception as error:
        return failed(error)


@contextlib.contextmanager
def quiet(written: io.StringIO | None = None) -> Iterator[None]:
    """Megatron prints a thousand lines; what counts is in the findings."""
    written = io.StringIO() if written is None else written
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(written):
            yield
