"""What the auxiliary losses of a mixture of experts were in a step, for the metrics and Megatron.

The routers leave sums over rows in Megatron's tracker (model/moe.py). Every row is counted on one
rank and every layer is on one pipeline stage, so the sums over all ranks are the step's.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_logging import MetricEntry, get_moe_metrics_tracker
from torch import Tensor

from megatron_bp.model.moe import ROWS, take_sums


@dataclass(frozen=True)
class Auxiliary:
    """The auxiliary losses of a model.

    Attributes:
        losses: name in the metrics -> Megatron's name.
        moe_layers: of each layer, whether it has experts.
    """

    losses: dict[str, str]
    moe_layers: tuple[bool, ...]

    def finish(self) -> dict[str, float]:
        """Each loss of the training step that ends now, without its coefficient. Collective.

        The mean over the step's rows and over the MoE layers; Megatron's own log gets the same
        numbers, those of each layer too.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        sums = take_sums((*self.losses.values(), ROWS), len(self.moe_layers), device)
        dist.all_reduce(sums)
        means = sums[:-1] / sums[-1].clamp(min=1)
        self._hand_to_megatron(means)
        layers = max(1, sum(self.moe_layers))
        return dict(zip(self.losses, (means.sum(1) / layers).tolist(), strict=True))

    def _hand_to_megatron(self, means: Tensor) -> None:
        """As if recorded: its report adds over pipeline stages and divides by micro-batches."""
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        tracker: Any = get_moe_metrics_tracker()
        for name, of_layers in zip(self.losses.values(), means, strict=True):
            values = of_layers * get_num_microbatches() / stages
            tracker.metrics[name] = MetricEntry(values.float(), needs_dp_avg=False)
