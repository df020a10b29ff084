"""A small model on this process alone, and one packed row through its forward and backward."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def one_process(threads: int) -> Iterator[None]:
    """Megatron's parallel state of a single rank, on the CPU, with so many threads."""
    cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def build(layers: int, heads: int, head_dim: int) -> Any:
    """A SwiGLU model with rotary positions, float32, `VOCABULARY` ids."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from megatron_bp.model.config import BDLMModelBuilder, BDLMModelConfig

    hidden = heads * head_dim
    transformer = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
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
    config = BDLMModelConfig(
        transformer=transformer,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=1,
        should_pad_vocab=True,
        position_embedding_type="rope",
    )
    (model,) = BDLMModelBuilder(config).build_distributed_models(
        ProcessGroupCollection.use_mpu_process_groups(),
        DistributedDataParallelConfig(),
        wrap_with_ddp=False,
        data_parallel_random_init=False,
        mixed_precision_wrapper=None,
    )
    return model


def step(model: Any, sample: Sample, plan: SequencePlan) -> float:
    """One forward and backward of the row, gradients thrown away; the mean loss."""
    from megatron_bp.training.reader import MicroBatch
    from megatron_bp.training.step import run_model

    objective = Objective(MASK, VOCABULARY, seed=1)
    corruption = corrupt(sample, plan, objective)
    counts = [term.count for term in corruption.terms]
    scales = term_scales(counts, [1.0] * len(counts), [False] * len(counts))
    micro = MicroBatch(sample, plan, corruption, scales, None)
    output = run_model(micro, objective, ATTENTION, model).output
    output.backward()
    model.zero_grad(set_to_none=True)
    return output.item() / max(1, counts[0])
