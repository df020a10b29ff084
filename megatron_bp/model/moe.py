"""Mixture of experts: balance losses, z loss and router statistics over each row of a step once.

Megatron multiplies a router's losses by its local rows and divides by the count of the loss, which
here has nothing to do with rows. This router adds up sums over rows instead: a step's gradient of
`row sum x MoEAuxLossAutoScaler's scale` divided by N_ref is the mean over the step's rows, with the
scale `diffusion.loss.row_scale`. Why: docs/design/0011-moe-auxiliary.md.

The padding mask that travels through Megatron to every router says which rows of this rank are not
counted: rows that fill up, and rows that another rank counts. All rows are routed and computed.
"""

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import MetricEntry, get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

#: --moe-router-load-balancing-type -> Megatron's name of its loss.
BALANCE_LOSSES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
Z_LOSS = "z_loss"
ROWS = "rows"


class BlockDiffusionRouter(TopKRouter):
    """Megatron's top-k router with losses and statistics of this project.

    Losses without their coefficients, and rows, go to Megatron's tracker as sums over this rank's
    counted rows (see `take_sums`).
    """

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(probabilities, map) as Megatron computes them; every row is routed."""
        if padding_mask is not None and len(padding_mask) != len(logits):
            # Megatron cuts it for sequence parallelism in the first pipeline stage alone.
            padding_mask = padding_mask.chunk(self.tp_group.size())[self.tp_group.rank()]
        if self._counts():
            every = torch.ones_like(logits[..., 0], dtype=torch.bool)
            self._record(ROWS, (every if padding_mask is None else ~padding_mask).sum())
        routed: tuple[Tensor, Tensor] = super().routing(logits, padding_mask)
        return routed

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The logits, with the z loss attached: sum of squared log-sum-exp of counted rows."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not self._counts():
            return logits
        wide = torch.promote_types(logits.dtype, torch.float32)
        squares = torch.logsumexp(logits.to(wide), dim=-1).square()
        if padding_mask is not None:
            squares = squares.masked_fill(padding_mask, 0)
        return self._attach(logits, Z_LOSS, squares.sum(), coefficient)

    def _apply_aux_loss(
        self, probs: Tensor, scores: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        return self._balance("aux_loss", probs, scores, routing_map)

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        assert bsz == 1, "a micro-batch is one packed row"
        return self._balance("seq_aux_loss", probs, scores, routing_map)

    def _apply_global_aux_loss(
        self, probs: Tensor, scores: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        assert self.get_aux_loss_coeff("global_aux_loss") == 0, "refused by arguments/experts.py"
        return probs

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Megatron masks the experts' dimension, which fails; the rows are meant."""
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        super()._apply_expert_bias(routing_map)

    def _balance(self, kind: str, probs: Tensor, scores: Tensor, routing_map: Tensor) -> Tensor:
        """`probs`, with rows x Switch loss of the micro-batch attached: this rank's share of it.

        Args:
            kind: of --moe-router-load-balancing-type.
            probs: [S, experts], what the experts' outputs are weighted with.
            scores: float[S, experts], probabilities of all experts; 0 in rows not counted.
            routing_map: bool[S, experts], the experts of each row; False in rows not counted.
        """
        coefficient = self.get_aux_loss_coeff(kind)
        if coefficient == 0:
            return probs
        tokens = routing_map.sum(dim=0)
        dist.all_reduce(tokens, group=self.tp_cp_group)
        rows = tokens.sum() // self.topk  # of the whole slot
        share = rows * switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=tokens,
            total_num_tokens=rows.clamp(min=1),
            topk=self.topk,
            num_experts=self.num_experts,
            moe_aux_loss_coeff=1.0,
        )
        return self._attach(probs, BALANCE_LOSSES[kind], share, coefficient)

    def _attach(self, to: Tensor, name: str, total: Tensor, coefficient: float) -> Tensor:
        self._record(name, total)
        attached: Tensor = MoEAuxLossAutoScaler.apply(to, coefficient * total)
        return attached

    def _counts(self) -> bool:
        """Once a micro-batch: not in an evaluation, nor in a forward that is done again later."""
        return bool(self.training and torch.is_grad_enabled())

    def _record(self, name: str, total: Tensor) -> None:
        if self.layer_number is None:
            return
        entries = get_moe_metrics_tracker().metrics
        if name not in entries:
            layers = self.config.num_layers
            zeros = torch.zeros(layers, dtype=torch.float64, device=self.weight.device)
            entries[name] = MetricEntry(zeros)
        entries[name].values[self.layer_number - 1] += total.detach()


def take_sums(names: tuple[str, ...], layers: int, device: Any) -> Tensor:
    """float64[names, layers]: sums over this rank's rows since the last call, which it forgets."""
    entries = get_moe_metrics_tracker().metrics
    sums = torch.zeros(len(names), layers, dtype=torch.float64, device=device)
    for row, name in zip(sums, names, strict=True):
        if name in entries:
            row += entries.pop(name).values
    return sums


def with_block_diffusion_router(mlp: Any) -> Any:
    """The MLP of a layer spec, with our router if it is an MoE layer.

    Raises:
        TypeError: it holds an MoE layer in a way that this does not know.
    """
    if not (isinstance(mlp, partial) and mlp.func is MoELayer):
        return mlp
    if mlp.args or mlp.keywords.keys() != {"submodules"}:
        raise TypeError(f"an MoE layer spec with more than submodules: {mlp}")
    submodules = mlp.keywords["submodules"]
    if submodules.router is BlockDiffusionRouter:  # layers may share one spec
        return mlp
    return partial(
        MoELayer,
        submodules=dataclasses.replace(
            submodules,
            router=BlockDiffusionRouter,
            experts=partial(_build_experts, submodules.experts),
        ),
    )


def _build_experts(
    build: Any, num_local_experts: int, config: Any, *, pg_collection: Any, name: str | None = None
) -> Any:
    """This rank's experts, alike for every degree of expert parallelism in two ways.

    Initialized on the CPU, Megatron draws them from one generator that stands alike on all ranks,
    so experts of different ranks would start as copies: here every rank draws all and keeps its
    own. And Megatron gives experts an optimizer of their own only where ranks share them, which
    makes checkpoints of one rank unreadable for more: here they always have it.
    """
    ranks = pg_collection.ep.size() if config.use_cpu_initialization else 1
    own = pg_collection.ep.rank() if config.use_cpu_initialization else 0
    kept = None
    for rank in range(ranks):
        experts = build(num_local_experts, config, pg_collection=pg_collection, name=name)
        kept = experts if rank == own else kept
    assert kept is not None
    for parameter in kept.parameters():
        parameter.allreduce = False
    return kept
