"""Every number that has to divide another, with both. Integers only.

What does not divide is refused by arguments/degrees.py too, the first of them; here are all.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Divisor:
    """`number` of `what` are dealt to `by` in equal parts; `of` says what `by` is made of."""

    what: str
    number: int
    by: int
    of: str

    @property
    def ok(self) -> bool:
        """Whether it goes without remainder, and leaves something."""
        return self.by > 0 and self.number > 0 and self.number % self.by == 0

    def told(self) -> str:
        """In words."""
        if self.ok:
            return f"{self.what}: {self.number} / {self.by} ({self.of}) = {self.number // self.by}"
        if self.by > 0 and self.number > 0:
            rest = f"leaves {self.number % self.by} over"
        else:
            rest = "both must be at least 1"
        return f"{self.what}: {self.number} / {self.by} ({self.of}) {rest}"


def divisors(args: Namespace, world: int) -> list[Divisor]:
    """All of a run.

    Args:
        args: flags as parsed, the CP degree in this project's sense.
        world: ranks that were started.
    """
    return [d for d in _divisors(args, world) if d.number is not None]


def _divisors(args: Namespace, world: int) -> Iterator[Divisor]:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    bp, cp, ep = (
        args.block_parallel_size,
        args.context_parallel_size,
        args.expert_model_parallel_size,
    )
    slot = max(bp, cp)
    together = tp * pp * slot
    yield Divisor("ranks", world, together, f"TP {tp} x PP {pp} x slot {slot} of BP {bp}, CP {cp}")
    if bp > 1:
        yield Divisor("ranks of a slot", bp, cp, f"CP {cp}")
    heads = args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else heads
    for what, number in (
        ("query heads", heads),
        ("key heads", groups),
        ("hidden units of an MLP", args.ffn_hidden_size),
    ):
        yield Divisor(what, number, tp, f"TP {tp}")
    if bp == 1 and cp > 1 and args.bdlm_cp_comm_type == "a2a":
        yield Divisor("query heads", heads, tp * cp, f"TP {tp} x CP {cp}, over heads")
    layers = args.num_layers
    if not _by_hand(args):
        yield Divisor("layers", layers, pp, f"PP {pp}")
        chunks = args.num_virtual_stages_per_pipeline_rank
        size = args.num_layers_per_virtual_pipeline_stage
        if pp > 1 and layers is not None and (chunks or size):
            of = f"{chunks} virtual stages" if chunks else f"{size} layers a virtual stage"
            yield Divisor("layers of a stage", layers // pp, chunks or size, of)
    if args.num_experts:
        yield Divisor("experts", args.num_experts, ep, f"EP {ep}")
        yield Divisor("ranks", world, ep * pp, f"EP {ep} x PP {pp}")
    replicas = max(1, world // together) if together > 0 else 1
    rows = replicas * args.micro_batch_size
    of = f"DP {replicas} x micro-batch {args.micro_batch_size}"
    yield Divisor("global batch", args.global_batch_size, rows, of)
    if args.eval_iters and args.eval_global_batch_size is not None:
        yield Divisor("global batch of evaluations", args.eval_global_batch_size, rows, of)
    interleaved = (
        args.num_virtual_stages_per_pipeline_rank or args.num_layers_per_virtual_pipeline_stage
    )
    if interleaved and args.global_batch_size is not None and args.global_batch_size % rows == 0:
        yield Divisor("micro-batches", args.global_batch_size // rows, pp, f"PP {pp}, interleaved")


def _by_hand(args: Namespace) -> bool:
    """Whether flags say how many layers stages hold."""
    return bool(
        args.decoder_first_pipeline_num_layers is not None
        or args.decoder_last_pipeline_num_layers is not None
        or args.pipeline_model_parallel_layout is not None
        or args.account_for_embedding_in_pipeline_split
        or args.account_for_loss_in_pipeline_split
    )


def refusal(found: Sequence[Divisor]) -> str | None:
    """All that does not divide, in one line; None if all does."""
    bad = [d.told() for d in found if not d.ok]
    return "; ".join(bad) if bad else None
