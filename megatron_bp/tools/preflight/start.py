"""Which rank this is, how long it waits, and the store that all ranks of the job reach."""

import argparse
import os
import platform
import sys
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

START = timedelta(minutes=5)  # in which all ranks reach the store


def limit_of(argv: list[str]) -> float:
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
    if variables.get("WORLD_SIZE", "1") == "1":
        del numbers["MASTER_PORT"]  # there is nobody to meet
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


def store_of(rank: int, world: int) -> Store:
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
