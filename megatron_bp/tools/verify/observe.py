"""Hooks that make a rank of pretrain_bdlm.py note what verify compares; training is untouched.

Losses and norms are in the metrics file already. Here come the weights to start from, the first
step's gradients, whether replicas agree, the groups' sizes and this rank's rows.
"""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_bp.tools.verify import gradients
from megatron_bp.tools.verify.order import FACTS, GRADIENTS, Order


def install(folder: Path, order: Order) -> None:
    """Wrap the places that Megatron's loop passes: once at the start, and once a step."""
    from megatron.training import training

    step: Any = importlib.import_module("megatron_bp.training.step")

    watch = _Watch(folder, order)
    training.setup_model_and_optimizer = watch.setup(training.setup_model_and_optimizer)
    training.train_step = watch.step(training.train_step)
    step.local_batch = watch.rows(step.local_batch)


class _Watch:
    def __init__(self, folder: Path, order: Order) -> None:
        self._folder = folder
        self._order = order
        self._steps = 0
        self._rows: tuple[int, int] | None = None
        self._facts: dict[str, Any] = {}

    def setup(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Start from the weights of the order."""

        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            model, optimizer, scheduler = original(*args, **kwargs)
            if self._order.make:
                gradients.fill_zeros(model, optimizer)
                gradients.save_weights(model, Path(self._order.weights))
            else:
                gradients.load_weights(model, optimizer, Path(self._order.weights))
            return model, optimizer, scheduler

        return setup_model_and_optimizer

    def step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note the first step's gradients before its update, and the weights after the last."""

        def train_step(
            forward: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if self._steps == 0:
                self._note_gradients(model, optimizer)
            result = original(forward, data, model, optimizer, *args, **kwargs)
            self._steps += 1
            if self._steps == self._order.steps:
                self._finish(model)
            return result

        return train_step

    def rows(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note the rows of the first micro-batch."""

        def local_batch(*args: Any, **kwargs: Any) -> Any:
            batch = original(*args, **kwargs)
            if self._rows is None:
                self._rows = (batch.num_clean, len(batch.input_ids) - batch.num_clean)
            return batch

        return local_batch

    def _note_gradients(self, model: Any, optimizer: Any) -> None:
        update = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer.step = update
            found = gradients.save_gradients(model, self._folder / GRADIENTS)
            every = gradients.all_gather_objects(found)
            self._facts["gradient_replicas"] = gradients.disagreement(every)
            return update(*args, **kwargs)

        optimizer.step = step

    def _finish(self, model: Any) -> None:
        from megatron.training import get_args

        args = get_args()
        if not args.overlap_param_gather:  # else they arrive with the next forward
            every = gradients.all_gather_objects(gradients.weight_signatures(model))
            self._facts["weight_replicas"] = gradients.disagreement(every)
        rows = gradients.all_gather_objects(self._rows or (0, 0))
        if dist.get_rank() == 0:
            self._facts |= {
                "groups": _group_sizes(),
                "rows": rows,
                "micro_batches": args.global_batch_size // args.data_parallel_size,
                "global_batch": args.global_batch_size,
                "vocabulary": args.bdlm_vocabulary,
                "padded_vocabulary": args.padded_vocab_size,
                "bf16": bool(args.bf16),
            }
            (self._folder / FACTS).write_text(json.dumps(self._facts), encoding="utf-8")


def _group_sizes() -> dict[str, int]:
    """Ranks in each of the groups that a layout makes."""
    from megatron.core import parallel_state as mpu

    from megatron_bp.parallel import state

    groups = {
        "tp": mpu.get_tensor_model_parallel_group(),
        "pp": mpu.get_pipeline_model_parallel_group(),
        "dp": mpu.get_data_parallel_group(),
        "slot": mpu.get_context_parallel_group(),
        "bp": state.get_block_parallel_group(),
        "clean": state.get_clean_shard_group(),
        "dp x slot": mpu.get_data_parallel_group(with_context_parallel=True),
        "ep": mpu.get_expert_model_parallel_group(),
        "etp": mpu.get_expert_tensor_parallel_group(),
        "expert dp": mpu.get_expert_data_parallel_group(),
    }
    return {name: int(group.size()) for name, group in groups.items()}
