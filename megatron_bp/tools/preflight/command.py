"""`torchrun ... pretrain_bdlm.py CONFIG --preflight`: the order of the checks, on every rank.

In rounds: each rank does the checks of a round and puts up what it found; rank 0 judges, prints,
and says whether the next round can be done. All ranks end with the same status: 0, or 2 if a check
failed or was not looked at.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from megatron_bp import cpu
from megatron_bp.tools.preflight.board import Board, ToldToEndError
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
from megatron_bp.tools.preflight.shared import SavedFile, saved_file

START = timedelta(minutes=5)  # in which all ranks reach the store
EVERYONE = "everyone"  # beside checks: it fails if a rank does not answer
Check = Callable[[], Finding]


def preflight(argv: list[str]) -> None:
    """Check the job of a command line on all of its ranks; exits with 2 where something failed."""
    try:
        rank, world, limit = *place(os.environ, dist.is_initialized()), _limit(argv)
    except ValueError as error:
        print(f"pretrain_bdlm.py: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error
    store = _store(rank, world)
    rounds = _Rounds(Board(PrefixStore("preflight", store), rank, world, 2 * limit))
    before = signal.signal(signal.SIGTERM, rounds.told_to_end)
    try:
        if rank == 0:
            print(
                f"Preflight of {_named(argv)} on {world} rank{'s' if world > 1 else ''}", flush=True
            )
        with saved_file(rounds.board) as file:
            _all_rounds(argv, rounds, PrefixStore("ranks", store), limit, file)
        code = rounds.end()
    except ToldToEndError:
        code = 2
        rounds.tell_silent()
    finally:
        signal.signal(signal.SIGTERM, before)
    if code:
        raise SystemExit(code)
    if dist.is_initialized():
        dist.destroy_process_group()


def _all_rounds(
    argv: list[str], rounds: "_Rounds", store: Store, limit: float, file: SavedFile
) -> None:
    with _quiet():
        if cpu.needed():
            cpu.install()
        from megatron_bp.tools.preflight import groups, machine, memory, sample
        from megatron_bp.training.host import prepare_megatron
    board, look = rounds.board, machine.Look()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    args: Namespace | None = None

    def of_arguments() -> Finding:
        nonlocal args
        args, finding = machine.arguments_of(argv, look)
        file.put(args)
        return finding

    go = rounds.do(
        "start",
        {
            "versions": machine.versions,
            "degrees": lambda: machine.degrees(argv, board.world),
            "arguments": of_arguments,
        },
    )

    def with_arguments(check: Callable[..., Finding], *more: Any) -> Check:
        return lambda: Finding(None, "needs arguments") if args is None else check(args, *more)

    def joined() -> Finding:
        assert args is not None
        prepare_megatron()
        groups.join(args, board, None if dist.is_initialized() else store, limit)
        return groups.check_groups(board, device, limit, bool(args.num_experts))

    def first_sample() -> Finding:
        from megatron_bp.parallel import state

        assert args is not None
        return sample.check_sample(args, state.replica(), board)

    together = not go & {"arguments", EVERYONE}
    go |= rounds.do(
        "machine",
        {
            "data": with_arguments(machine.data),
            "checkpoint": with_arguments(machine.starts_from, look),
            "saving": with_arguments(machine.saving, file),
            "memory": with_arguments(lambda args: Finding(True, memory.check_memory(args))),
            "kernel": with_arguments(machine.kernel, look),
        },
    )
    file.remove()
    together = together and EVERYONE not in go
    needs = "needs arguments and answers of all ranks"
    go |= rounds.do("groups", {"groups": joined if together else _not_looked_at(needs)})
    ready = together and not go & {"groups", "data", EVERYONE}
    needs = "needs data and groups of all ranks"
    rounds.do("sample", {"sample": first_sample if ready else _not_looked_at(needs)})


def _named(argv: list[str]) -> str:
    """The config file of a command line."""
    return argv[0] if argv and not argv[0].startswith("-") else "a run without a config file"


def _not_looked_at(why: str) -> Check:
    return lambda: Finding(None, why)


class _Rounds:
    """Rounds of checks; on rank 0 their verdicts, too."""

    def __init__(self, board: Board) -> None:
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
        with _quiet(written):
            return check()
    except SystemExit as error:  # of argparse, which says why before
        lines = [line for line in written.getvalue().splitlines() if "error:" in line]
        return Finding(False, lines[-1] if lines else f"it would exit with {error.code}")
    except Exception as error:
        return failed(error)


@contextlib.contextmanager
def _quiet(written: io.StringIO | None = None) -> Iterator[None]:
    """Megatron prints a thousand lines; what counts is in the findings."""
    written = io.StringIO() if written is None else written
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        with contextlib.redirect_stderr(written):
            yield


def _limit(argv: list[str]) -> float:
    """Seconds that a collective may take: needed before anything else is known."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preflight-timeout", type=float, default=60.0)
    limit = float(parser.parse_known_args(argv)[0].preflight_timeout)
    if not limit > 0:
        raise ValueError(f"--preflight-timeout {limit}: must be above 0 seconds")
    return limit


def place(variables: Mapping[str, str], joined: bool) -> tuple[int, int]:
    """(rank, ranks), from what starts the ranks.

    Args:
        variables: of the environment.
        joined: there is a process group, so that nothing has to be found any more.

    Raises:
        ValueError: one that several ranks need is not set, or is no number that it can be.
    """
    out = "start the ranks with torchrun, which sets it"
    numbers = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 0}
    for name in numbers:
        try:
            numbers[name] = int(variables.get(name, numbers[name]))
        except ValueError as error:
            raise ValueError(f"{name}={variables[name]}: must be a whole number; {out}") from error
    rank, world = numbers["RANK"], numbers["WORLD_SIZE"]
    needed = ("RANK",) if joined else ("RANK", "MASTER_ADDR", "MASTER_PORT")
    absent = [name for name in needed if name not in variables]
    if world > 1 and absent:
        raise ValueError(
            f"WORLD_SIZE is {world} but {absent[0]} is not set, and several ranks need both: start "
            f"them with torchrun, or unset WORLD_SIZE to run one"
        )
    if not 0 <= rank < world:
        raise ValueError(f"RANK={rank}: must be from 0 to {world - 1} (WORLD_SIZE={world}); {out}")
    return rank, world


def _store(rank: int, world: int) -> Store:
    """The store of the job, that all its ranks reach."""
    if dist.is_initialized():
        default: Store = _get_default_store()
        return default
    if world == 1:
        return HashStore()
    try:
        store: Store
        store, _, _ = next(rendezvous("env://", rank, world, timeout=START))
    except Exception as error:
        at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        print(
            f"preflight: rank {rank} ({platform.node()}): not all of {world} ranks reached the "
            f"store at {at} in {START.seconds} s: {error}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(2) from error
    return store
