"""Bytes that K/V of other ranks take on one GPU, and their gradients on the way back."""

# Shapes: n rows that arrive in one layer, c of them at once, R ranks.

from megatron_bp.attention.exchange.count import Sending
from megatron_bp.planning.counts import SlotCounts
from megatron_bp.planning.kept import key_numbers
from megatron_bp.planning.layout import Layout
from megatron_bp.planning.shape import Attention
from megatron_bp.planning.task import Task


def gathered_bytes(
    task: Task, layout: Layout, counts: SlotCounts, rank: int, attention: Attention
) -> float:
    """K/V of a layer's arrivals, if all are held."""
    if layout.over_heads:
        return 0.0
    rows = counts.ranks[rank].arriving[attention.window]
    return rows * key_numbers(attention, layout.tp) * task.precision.model


def exchange_bytes(
    task: Task, layout: Layout, counts: SlotCounts, rank: int, attention: Attention
) -> float:
    """What attention's backward holds of other ranks' rows at its peak.

    K/V of one arrival and of the next, which is under way; the gradients of one in the accumulation
    dtype, and in the dtype in which they travel: those that are sent, and as many that come. What
    a recomputation brought is held as a whole, and nothing else is under way then.
    """
    if layout.over_heads:
        return _over_heads_bytes(task, layout, counts, rank, attention)
    mine, window = counts.ranks[rank], attention.window
    every = mine.arriving[window]
    if not every:
        return 0.0
    size, wide = task.precision.model, max(4, task.precision.model)
    sent = mine.sent[window]
    at_once, buffer = _at_once(layout, sent, every)
    again = layout.recompute != "none" and not layout.keep_attention
    if again or layout.keep_gathered:
        kv = every * size
    else:
        kv = (at_once + (buffer if at_once < every else 0)) * size
    travel = wide if sent.wide else size
    back = sent.fetched if sent.form == "needed_rows" else buffer
    gradients = at_once * wide + (buffer + back) * travel
    return (kv + gradients) * key_numbers(attention, layout.tp)


def _at_once(layout: Layout, sent: Sending, every: int) -> tuple[int, int]:
    """(rows of an arrival, rows of the buffer that it comes in).

    An all-gather brings a rank's own rows as well, and of each rank as many as of the largest.
    """
    ranks, most = layout.cp, layout.exchange.most_rows
    if sent.form == "ring":
        shard = -(-every // (ranks - 1))
        return shard, shard
    if sent.form == "needed_rows":
        rows = every if most is None else min(every, most)
        return rows, rows
    longest = sent.fetched // (ranks - 1)
    chunks = 1 if most is None else -(-longest // max(1, most // ranks))
    size = -(-longest // chunks)
    return (every if chunks == 1 else size * (ranks - 1)), size * ranks


def _over_heads_bytes(
    task: Task, layout: Layout, counts: SlotCounts, rank: int, attention: Attention
) -> float:
    """Q, K, V, output and their gradients of all rows, of a rank's share of the heads."""
    rows = sum(shard.num_rows for shard in counts.shards)
    share = (attention.query_heads * attention.head_dim / layout.tp) / layout.slot
    keys = 2 * max(1, attention.key_heads // layout.tp // layout.slot) * attention.head_dim
    size, wide = task.precision.model, max(4, task.precision.model)
    return rows * ((2 * share + keys) * size + (share + keys) * (size + wide))
