"""A new run from the weights of a checkpoint: the vocabulary's new ids, and a check of conversion.

Wraps two places that Megatron's `pretrain` passes on every rank: where it loads a checkpoint, and
where it begins to train.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_bp.model.vocabulary import Added, added_rows, grow, vocabulary_tables


@dataclass(frozen=True)
class NewIds:
    """How the vocabulary grows from a checkpoint's.

    Attributes:
        old, new: true ids of the checkpoint, and from here on.
        added: what the rows of new ids become: "mean" of the checkpoint's true rows, or "random",
            what Megatron starts them with.
    """

    old: int
    new: int
    added: Added

    def told(self) -> str:
        """What was done, in words."""
        count = self.new - self.old
        if count == 0:
            return f"all {self.new} ids are the checkpoint's own; none is added"
        ids = f"id {self.old}" if count == 1 else f"ids {self.old} to {self.new - 1}"
        how = {
            "mean": f"the mean of the checkpoint's {self.old} rows",
            "random": "what Megatron starts rows with",
        }[self.added]
        return (
            f"the vocabulary grows from {self.old} to {self.new} ids: {ids} of embedding and "
            f"output layer become {how}"
        )


def install(ids: NewIds, check: Callable[[list[Any]], None] | None) -> None:
    """Grow the vocabulary of what Megatron loads next, then check it before it trains.

    Args:
        ids: how it grows.
        check: called with this rank's bare model chunks before the first step; None for no check.
    """
    from megatron.training import training

    load, train = training.load_checkpoint, training.train
    pending = check is not None

    def load_checkpoint(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        chunks = unwrap_model(model)
        fresh = [_fresh(chunk, ids) for chunk in chunks]
        result = load(model, optimizer, *args, **kwargs)
        if ids.new > ids.old:
            for chunk, rows in zip(chunks, fresh, strict=True):
                for name, table in vocabulary_tables(chunk).items():
                    grow(table, ids.old, ids.new, chunk.pg_collection.tp, rows.get(name))
            if optimizer is not None:
                optimizer.reload_model_params()  # its own copies, where it has some
        if dist.get_rank() == 0:
            print(f"megatron_bp: a new run: {ids.told()}", flush=True)
        return result

    def train_checked(forward_step: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal pending
        if pending and check is not None:
            pending = False
            check(unwrap_model(model))
        return train(forward_step, model, *args, **kwargs)

    training.load_checkpoint = load_checkpoint
    training.train = train_checked


def _fresh(chunk: Any, ids: NewIds) -> dict[str, Tensor]:
    """The added rows of each table as Megatron started them; nothing for the mean."""
    if ids.added == "mean":
        return {}
    return {
        name: table[added_rows(table, ids.old, ids.new, chunk.pg_collection.tp)].detach().clone()
        for name, table in vocabulary_tables(chunk).items()
    }
