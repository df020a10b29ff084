"""A collective on every process group, with a result that is known, and a limit of time.

Before a collective the ranks of its group meet at the board, so that one that does not come is
named and nobody enters a collective that cannot end.
"""

from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from megatron_bp.parallel import state
from megatron_bp.parallel.collectives import Pending, all_gather, all_to_all
from megatron_bp.tools.preflight.board import Board
from megatron_bp.tools.preflight.findings import Finding

# Groups whose ranks also send one another rows: attention, the gradients of K/V, experts.
SENDING = ("slot", "clean shard", "expert parallel")


class GroupError(RuntimeError):
    """A collective that failed, was wrong, or that a rank did not come to."""


def join(args: Namespace, board: Board, store: Store | None, limit: float) -> None:
    """Make all process groups of the run, as the run does.

    Args:
        args: Megatron's validated arguments.
        board: of the ranks.
        store: for the process group of all ranks, if there is none yet.
        limit: seconds that a collective may take.
    """
    from megatron.training.initialize import initialize_megatron

    args.distributed_timeout_minutes = 1.5 * limit / 60  # our own limit comes first
    initialize_megatron(allow_no_cuda=not torch.cuda.is_available(), store=store)
    if args.objective != "ar":
        state.initialize_block_parallel(args.block_parallel_size, args.bdlm_clean_shard_size)


def check_groups(board: Board, device: torch.device, limit: float, experts: bool) -> Finding:
    """All groups of this rank, one after the other; stops at the first that fails.

    Args:
        board: of the ranks.
        device: of the run.
        limit: seconds for each collective.
        experts: with the groups that experts alone use.

    Raises:
        GroupError: naming the group, and what is wrong.
    """
    groups = state.every_group(experts)
    members = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    topics = {name: f"meet/{name}/{ranks[0]}" for name, ranks in members.items()}
    left = list(groups)
    try:
        while left:
            name, ranks = left[0], members[left[0]]
            absent = board.meet(topics[name], ranks)
            if any(absent.values()):  # not a fault of this group
                return Finding(None, "; ".join(f"rank {r} {why}" for r, why in absent.items()))
            text = f"{name} of ranks {', '.join(map(str, ranks))}"
            if absent:
                raise GroupError(
                    f"{text}: {', '.join(map(str, absent))} did not come within "
                    f"{board.patience:g} s: look at what it printed, and at its host"
                )
            _checked(text, ranks, groups[name], device, limit, name in SENDING)
            left.pop(0)
    finally:
        for name in left[1:]:  # so that nobody waits for this rank there
            board.put(topics[name], f"stopped at {left[0]}")
    told = [f"{name} of {len(ranks)}" for name, ranks in members.items()]
    return Finding(True, ", ".join(told) or "one rank, no group")


def _checked(
    text: str,
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
    limit: float,
    sending: bool,
) -> None:
    try:
        wrong = check_group(ranks, group, device, limit, sending)
    except Exception as error:
        first, *_ = [*str(error).strip().splitlines(), ""]
        raise GroupError(
            f"{text}: all came, and a collective failed within {limit:g} s: {first}; look at "
            f"the network between their hosts (NCCL_DEBUG=INFO tells more)"
        ) from error
    if wrong:
        raise GroupError(f"{text}: {wrong}; look at the network and the NCCL of their hosts")


def check_group(
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
    limit: float,
    sending: bool,
) -> str | None:
    """What is wrong with the results of a group; None if they are right.

    Args:
        ranks: of the group, in its order.
        group: it.
        device: of the run.
        limit: seconds for each collective.
        sending: whether its ranks also send one another rows.
    """
    here = ranks[group.rank()]
    mine = torch.tensor([here, 1], device=device)
    work = dist.all_reduce(mine, group=group, async_op=True)
    (got, count) = _done(Pending(mine, [work], mine), limit).tolist()
    if (got, count) != (sum(ranks), len(ranks)):
        return (
            f"an all-reduce of rank numbers gave {got} of {count} ranks, and {len(ranks)} ranks "
            f"add up to {sum(ranks)}"
        )
    if not sending:
        return None
    pending, _ = all_gather(torch.tensor([[here]], device=device), group)
    everyone = _done(pending, limit).flatten().tolist()
    if everyone != list(ranks):
        return f"an all-gather of rank numbers gave {everyone}"
    # Rank a sends 1000 a + b to rank b.
    rows = torch.tensor([[[1000 * here + other]] for other in ranks], device=device)
    pending, _ = all_to_all(rows, group)
    arrived = _done(pending, limit).flatten().tolist()
    want = [1000 * other + here for other in ranks]
    if arrived != want:
        return f"an all-to-all brought {arrived}, and {want} was sent"
    return None


def _done(pending: Pending, limit: float) -> Tensor:
    """The result, waited for at most `limit` seconds."""
    for work in pending.works:
        if work is not None:
            work.wait(timedelta(seconds=limit))
    return pending.result
