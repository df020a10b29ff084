"""A small model, on this process alone or shared by ranks, and one row through it and back."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_bp import cpu
from megatron_bp.attention.kernels.tiled import Tiled
from megatron_bp.attention.layout import AttentionOptions
from megatron_bp.diffusion.corruption import corrupt
from megatron_bp.diffusion.loss import term_scales
from megatron_bp.diffusion.objective import Objective
from megatron_bp.sequence.packing import Sample
from megatron_bp.sequence.plan import SequencePlan

VOCABULARY = 256
MASK = VOCABULARY - 1
ATTENTION = AttentionOptions(Tiled())


@dataclass(frozen=True)
class Done:
    """Of a step: the mean loss of its scored rows, and the bytes that attention sent."""

    loss: float
    bytes_sent: int


@contextmanager
def one_process(threads: int) -> Iterator[None]:
    """Megatron's parallel state of a single rank, on the CPU, with so many threads."""
    with tempfile.TemporaryDirectory() as folder, one_of_ranks(0, 1, folder, threads):
        yield


@contextmanager
def one_of_ranks(rank: int, ranks: int, folder: str, threads: int) -> Iterator[None]:
    """Megatron's parallel state of one of the ranks of a slot, which meet in `folder`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.set_num_threads(threads)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def build(
    layers: int,
    heads: int,
    head_dim: int,
    key_heads: int | None = None,
    hidden: int | None = None,
    mode: tuple[int, int] | None = (1, 1),
) -> Any:
    """A SwiGLU model with rotary positions, float32, `VOCABULARY` ids, random weights.

    Args:
        layers: how many.
        heads: query heads.
        head_dim: of all heads.
        key_heads: None for as many as query heads.
        hidden: hidden size; None for heads x head_dim.
        mode: degrees (BP, CP); None for Megatron's own autoregressive model, with torch's causal
            attention at its core.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    hidden = hidden or heads * head_dim
    transformer = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=key_heads or heads,
        context_parallel_size=1 if mode is None else max(mode),
        kv_channels=head_dim,
        ffn_hidden_size=3 * hidden,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        transformer_impl="local",
        calculate_per_token_loss=True,
    )
    settings: dict[str, Any] = {
        "transformer": transformer,
        "vocab_size": VOCABULARY,
        "make_vocab_size_divisible_by": 1,
        "should_pad_vocab": True,
        "position_embedding_type": "rope",
    }
    builder: Any
    if mode is None:
        from megatron_bp.tools.bench import autoregressive

        builder = autoregressive.builder(settings)
    else:
        from megatron_bp.model.config import BDLMModelBuilder, BDLMModelConfig
        from megatron_bp.parallel import state

        state.initialize_block_parallel(*mode)
        builder = BDLMModelBuilder(
            BDLMModelConfig(**settings, block_parallel_size=mode[0], clean_shard_size=mode[1])
        )
    (model,) = builder.build_distributed_models(
        ProcessGroupCollection.use_mpu_process_groups(),
        DistributedDataParallelConfig(),
        wrap_with_ddp=False,
        data_parallel_random_init=False,
        mixed_precision_wrapper=None,
    )
    return model


def step(
    model: Any, sample: Sample, plan: SequencePlan, attention: AttentionOptions = ATTENTION
) -> Done:
    """One forward and backward of the row, gradients thrown away."""
    from megatron_bp.training.reader import MicroBatch
    from megatron_bp.training.step import run_model

    objective = Objective(MASK, VOCABULARY, seed=1)
    corruption = corrupt(sample, plan, objective)
    counts = [term.count for term in corruption.terms]
    scales = term_scales(counts, [1.0] * len(counts), [False] * len(counts))
    micro = MicroBatch(sample, plan, corruption, scales, None)
    forward = run_model(micro, objective, attention, model)
    forward.output.backward()
    model.zero_grad(set_to_none=True)
    loss = forward.output.item() / max(1, counts[0])
    return Done(loss, forward.layout.traffic.bytes_sent)
