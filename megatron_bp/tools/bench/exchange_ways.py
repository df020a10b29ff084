"""The alternatives of `bench exchange`: a form is an entry in FORMS."""

# Shapes: S rows of this rank, K rows that arrive at once, H key heads, D head dimension.

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.attention.exchange import te
from megatron_bp.attention.exchange.base import Exchange, Traffic
from megatron_bp.attention.exchange.choose import ExchangeOptions, prepare_exchange
from megatron_bp.data.document import Document
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, make_plan
from megatron_bp.tools.bench import plain
from megatron_bp.tools.bench.ranks import take_turns
from megatron_bp.tools.bench.waits import Waits

FORMS: dict[str, tuple[bool, Any]] = {
    "csbp:all_gather": (True, "all_gather"),
    "csbp:needed_rows": (True, "needed_rows"),
    "csbp:ring": (True, "ring"),
    "csbp:te": (True, "te"),
    "cp:all_gather": (False, "all_gather"),
    "cp:p2p": (False, "ring"),
}
"""By name: whether clean rows alone are sent, and the form as the library takes it."""

PLAIN = {
    "csbp:all_gather": "plain all_gather, clean rows",
    "csbp:te": "plain all_gather, clean rows",
    "csbp:ring": "plain isend and irecv, clean rows",
    "cp:all_gather": "plain all_gather, all rows",
    "cp:p2p": "plain isend and irecv, all rows",
}
"""What moves as many rows with torch alone."""


def chosen(names: Sequence[str] | None) -> list[str]:
    """The forms that are asked for.

    Raises:
        ValueError: there is none of a name, or Transformer Engine is not installed.
    """
    for name in names or ():
        if name not in FORMS:
            raise ValueError(f"--forms {name}: there is none; there are {', '.join(FORMS)}")
    if names and "csbp:te" in names:
        te.collectives()
    return list(names or (name for name in FORMS if name != "csbp:te"))


def on_rank(rank: int, options: argparse.Namespace, waits: Waits) -> list[dict[str, Any]]:
    """What both passes took at each length."""
    sizes = []
    for length in options.length:
        passes: dict[str, dict[str, Callable[[], int]]] = {"K/V": {}, "gradients": {}}
        for name in chosen(options.forms):
            kv, gradients, baseline = _calls(name, rank, length, options)
            passes["K/V"][name], passes["gradients"][name] = kv, gradients
            if name in PLAIN:
                passes["K/V"].setdefault(PLAIN[name], baseline)
        take_turns({n: c for calls in passes.values() for n, c in calls.items()}, 1, waits)
        found = {name: take_turns(calls, options.repeats, waits) for name, calls in passes.items()}
        sizes.append({"length": length, "passes": found})
    return sizes


def _calls(
    name: str, rank: int, length: int, options: argparse.Namespace
) -> tuple[Callable[[], int], Callable[[], int], Callable[[], int]]:
    """A pass of K/V, one of gradients, and the plain version of the first."""
    clean_alone, form = FORMS[name]
    ranks = options.ranks
    plan = make_plan(
        _sample(length, options.documents),
        SequenceOptions(options.block, ranks if clean_alone else 1, ranks),
    )
    shards = tuple(plan.rows_of(peer) for peer in range(ranks))
    device = torch.device("cpu")
    prepared = prepare_exchange(plan, shards, rank, None, ExchangeOptions(form), device)
    assert dist.group.WORLD is not None
    traffic = Traffic()
    exchange = prepared.make(dist.group.WORLD, traffic)
    shape = (shards[rank].num_rows, options.key_heads, options.head_dim)
    k_SHD, v_SHD = torch.randn(shape), torch.randn(shape)
    arrived = [torch.randn(kv.shape) for kv in _arrivals(exchange, k_SHD, v_SHD)]
    own = torch.zeros((shape[0], 2, *shape[1:]))
    rows = max(shard.num_sent for shard in shards)
    padded = torch.randn((2, rows, *shape[1:]))
    simple = (plain.ring if form == "ring" else plain.all_gather)(*padded)
    return (
        partial(_counted, traffic, partial(_arrivals, exchange, k_SHD, v_SHD)),
        partial(_counted, traffic, partial(_return, exchange, arrived, own)),
        partial(_uncounted, simple, (ranks - 1) * padded.nbytes),
    )


def _sample(length: int, documents: int) -> Sample:
    size = length // documents
    tokens, supervised = np.zeros(size, dtype=np.int32), np.ones(size, dtype=np.bool_)
    return pack([Document(tokens, supervised, key) for key in range(documents)], length)


def _arrivals(exchange: Exchange, k_SHD: Tensor, v_SHD: Tensor) -> list[Tensor]:
    """K|V of all arrivals, each started before the one before is handed out."""
    count, out = len(exchange.held), []
    fetch = exchange.fetch(k_SHD, v_SHD)
    if count:
        fetch.start(0)
    for i in range(count):
        out.append(fetch.wait(i))
        if i + 1 < count:
            fetch.start(i + 1)
    return out


def _return(exchange: Exchange, arrived: Sequence[Tensor], own_S2HD: Tensor) -> None:
    returns = exchange.returns(own_S2HD, own_S2HD.dtype)
    for i, dkv_K2HD in enumerate(arrived):
        returns.send(i, dkv_K2HD)
    returns.settle()


def _counted(traffic: Traffic, call: Callable[[], object]) -> int:
    before = traffic.bytes_sent
    call()
    return traffic.bytes_sent - before


def _uncounted(call: Callable[[], object], sent: int) -> int:
    call()
    return sent
