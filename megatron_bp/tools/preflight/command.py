"""`torchrun ... pretrain_bdlm.py CONFIG --preflight`: the order of the checks, on every rank.

In rounds: each rank does the checks of a round and puts up what it found; rank 0 judges, prints,
and says whether the next round can be done. All ranks end with the same status: 0, or 2 if a check
failed or was not looked at.
"""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from megatron_bp import cpu
from megatron_bp.tools.preflight.board import Board, ToldToEndError
from megatron_bp.tools.preflight.findings import Finding
from megatron_bp.tools.preflight.rounds import EVERYONE, Check, Rounds, quiet
from megatron_bp.tools.preflight.shared import SavedFile, saved_file
from megatron_bp.tools.preflight.start import limit_of, place, store_of


def preflight(argv: list[str]) -> None:
    """Check the job of a command line on all of its ranks; exits with 2 where something failed."""
    try:
        rank, world, limit = *place(os.environ, dist.is_initialized()), limit_of(argv)
    except ValueError as error:
        print(f"pretrain_bdlm.py: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error
    store = store_of(rank, world)
    rounds = Rounds(Board(PrefixStore("preflight", store), rank, world, 2 * limit))
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
    argv: list[str], rounds: Rounds, store: Store, limit: float, file: SavedFile
) -> None:
    with quiet():
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
