"""The gated module through which a first pass's prediction reaches a corrupted row's embedding.

RMSNorm, silu(gate) x up, down; down starts as zeros, so that a model without it starts unchanged.
Every TP rank has all of it. Under sequence parallelism each computes its own rows, and its
parameters are marked so that Megatron adds up their gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class SelfConditioning(torch.nn.Module):
    """Adds to some rows of the embeddings a function of their soft embeddings."""

    def __init__(
        self, config: TransformerConfig, width: int, tp: Any = None, fresh: bool = False
    ) -> None:
        """Set up the parameters.

        Args:
            config: of the model.
            width: hidden units of the module.
            tp: process group of the TP ranks.
            fresh: the checkpoint about to be loaded has none of its parameters; it stays as it is.
        """
        super().__init__()
        self.norm = torch.nn.RMSNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.gate = torch.nn.Linear(config.hidden_size, width, bias=False)
        self.up = torch.nn.Linear(config.hidden_size, width, bias=False)
        self.down = torch.nn.Linear(width, config.hidden_size, bias=False)
        assert config.init_method is not None
        with torch.no_grad():
            config.init_method(self.gate.weight)
            config.init_method(self.up.weight)
            self.down.weight.zero_()
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._tp = tp
        self._sequence_parallel = config.sequence_parallel
        self._fresh = fresh
        self.register_load_state_dict_pre_hook(_keep_fresh)

    def forward(self, embedded: Tensor, rows: Tensor, soft: Tensor) -> Tensor:
        """The embeddings, conditioned in `rows` and untouched in all others.

        Without any row it still gives the parameters a gradient of zero.

        Args:
            embedded: [S, 1, H], or this rank's [S / TP, 1, H] under sequence parallelism.
            rows: int64[K] on the CPU, ascending, counted before sequence parallelism cuts them.
            soft: [K, H], the soft embedding for each.
        """
        self._fresh = False  # whatever was to be loaded is
        if self._sequence_parallel:
            first = self._tp.rank() * len(embedded)
            own = torch.searchsorted(rows, torch.tensor([first, first + len(embedded)])).tolist()
            rows, soft = rows[slice(*own)] - first, soft[slice(*own)]
        y = self.norm(soft.to(self.norm.weight.dtype))
        added: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        rows = rows.to(embedded.device, non_blocking=True)
        return embedded.index_add(0, rows, added.to(embedded.dtype)[:, None])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """What of it stands in the checkpoint that is saved or loaded: all or nothing."""
        if self._fresh:
            return {}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=self._tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return sharded


def _keep_fresh(module: SelfConditioning, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Loads what is there already, where the checkpoint has nothing."""
    if module._fresh:
        state.update(module.state_dict(prefix=prefix))
    module._fresh = False
