"""The model of each pipeline stage as Megatron itself makes it, on the meta device: shapes alone.

One process stands for one rank of the job: its process groups are torch's fake ones, which have any
size and send nothing.
"""

import contextlib
import io
import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Parameter:
    """A parameter of one rank.

    Attributes:
        name: in the model.
        shape: on this rank.
        copies: ranks that hold another part of it, this one included; 0 where another stage holds
            the same (the table of tied embeddings on the last stage).
    """

    name: str
    shape: tuple[int, ...]
    copies: int

    @property
    def numel(self) -> int:
        """Numbers on this rank."""
        return math.prod(self.shape)

    @property
    def whole(self) -> int:
        """Numbers on all ranks together, each counted once."""
        return self.numel * self.copies


def models(args: Namespace) -> list[list[Parameter]]:
    """The parameters of one rank of each pipeline stage, virtual chunks one after another.

    Tensor-parallel and expert-parallel ranks of a stage hold as many. All ranks of the job are not
    needed for that: replicas are left out as far as experts allow.

    Args:
        args: Megatron's validated arguments.
    """
    tp, pp, ep = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.expert_model_parallel_size,
    )
    etp = args.expert_tensor_parallel_size or tp
    world = math.lcm(tp * pp * args.context_parallel_size, ep * etp * pp)
    found = []
    for stage in range(pp):
        with _one_of(args, stage * (world // pp), world):
            found.append([p for chunk in _build(args) for p in _parameters(args, chunk, stage)])
    return found


@contextlib.contextmanager
def _one_of(args: Namespace, rank: int, world: int) -> Iterator[None]:
    """Megatron's parallel state of one rank, without the others."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(args.seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _build(args: Namespace) -> list[Any]:
    """The chunks of this rank."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_bp.arguments import model_config

    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = model_config(args)
    # Of Transformer Engine's norms; the local ones, which stand in for them, have the same shapes.
    config.transformer.layernorm_zero_centered_gamma = False
    config.finalize()
    with torch.device("meta"), contextlib.redirect_stdout(io.StringIO()):  # it prints a count
        chunks: list[Any] = config.get_builder_cls()(config).build_distributed_models(
            groups,
            None,
            wrap_with_ddp=False,
            data_parallel_random_init=False,
            mixed_precision_wrapper=None,
        )
    return chunks


def _parameters(args: Namespace, chunk: Any, stage: int) -> Iterator[Parameter]:
    tp, ep = args.tensor_model_parallel_size, args.expert_model_parallel_size
    etp = args.expert_tensor_parallel_size or tp
    for name, parameter in chunk.named_parameters():
        split = getattr(parameter, "tensor_model_parallel", False)
        if getattr(parameter, "allreduce", True):
            copies = tp if split else 1
        else:  # of an expert
            copies = ep * (etp if split else 1)
        shared = getattr(parameter, "shared_embedding", False)
        if shared and stage > 0 and args.pipeline_model_parallel_size > 1:
            copies = 0
        yield Parameter(name, tuple(parameter.shape), copies)
