"""The oracle's GPT against Megatron's own GPTModel (local spec, CPU, float64)."""

from functools import partial
from typing import Any

import oracle
import pytest
import torch
from oracle import GPTShape
from ranks import run_ranks
from torch import Tensor
from torch.testing import assert_close

pytestmark = pytest.mark.ranks

VOCAB, LENGTH = 32, 24

LLAMA = GPTShape(layers=2, hidden=32, heads=4, groups=2, head_dim=8)
CASES: dict[str, tuple[GPTShape, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "qwen3": (
        GPTShape(
            layers=3, hidden=24, heads=6, groups=2, head_dim=8, eps=1e-6, tied=True,
            rotary_base=500, qk_layernorm=True,
        ),
        {},
    ),
    "qwen2_qkv_bias": (LLAMA, {"add_qkv_bias": True}),
    "one_group": (GPTShape(layers=1, hidden=32, heads=4, groups=1, head_dim=16), {}),
    "gpt_neox": (
        GPTShape(
            layers=2, hidden=32, heads=4, groups=4, head_dim=8, norm="LayerNorm", swiglu=False,
            rotary_percent=0.5, eps=1e-3,
        ),
        {"add_bias_linear": True},
    ),
    "gpt_fused_gelu": (
        GPTShape(
            layers=2, hidden=32, heads=4, groups=4, head_dim=8, norm="LayerNorm", swiglu=False,
            gelu="tanh", rotary_interleaved=True, qk_layernorm=True, tied=True,
        ),
        {"add_bias_linear": True, "bias_activation_fusion": True},
    ),
}  # fmt: skip


def megatron_gpt(
    rank: int, world: int, shape: GPTShape, extra: dict[str, Any], ids: Tensor, mask: Tensor | None
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Weights, logits [S, V] and the weights' gradients of one random linear function of them."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    settings: dict[str, Any] = {
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=40,
        normalization=shape.norm,
        layernorm_epsilon=shape.eps,
        gated_linear_unit=shape.swiglu,
        activation_func=torch.nn.functional.silu if shape.swiglu else torch.nn.functional.gelu,
        qk_layernorm=shape.qk_layernorm,
        rotary_interleaved=shape.rotary_interleaved,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
        **{**settings, **extra},
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=shape.qk_layernorm, normalization=shape.norm),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_percent=shape.rotary_percent,
        rotary_base=int(shape.rotary_base),
    ).double()
    # Its float32 frequencies would hide everything below 1e-6.
    turned = int(shape.head_dim * shape.rotary_percent)
    exponents = torch.arange(0, turned, 2, dtype=torch.float64) / turned
    assert_close(model.rotary_pos_emb.inv_freq.double(), shape.rotary_base**-exponents)
    model.rotary_pos_emb.inv_freq = shape.rotary_base**-exponents
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than initialised, and no bias or gain trivial
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator).double()
    hidden = None if mask is None else ~mask[None, None]  # Megatron's True is a hidden key
    logits = model(ids[None], torch.arange(len(ids))[None], hidden)[0]
    (logits * upstream(logits)).sum().backward()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def upstream(logits: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(logits.shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("masking", ["causal", "block_diffusion"])
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_megatrons(name: str, masking: str) -> None:
    shape, extra = CASES[name]
    ids = torch.randint(VOCAB, [LENGTH], generator=torch.Generator().manual_seed(0))
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if masking == "block_diffusion":  # 5 + 7 clean rows and as many corrupted ones
        mask = oracle.visible([0] * 5 + [1] * 7, 4)
    weights, logits, gradients = run_ranks(1, megatron_gpt, shape, extra, ids, mask)[0]
    assert logits.dtype == torch.float64
    assert ("output_layer.weight" in weights) is not shape.tied
    leaves = {key: weight.requires_grad_() for key, weight in weights.items()}
    got = oracle.gpt(leaves, shape, ids, torch.arange(LENGTH), mask)
    # The fused GELU rounds its constants to 8 digits.
    tolerance = 1e-6 if shape.gelu == "tanh" else 1e-10
    close = partial(assert_close, rtol=tolerance, atol=tolerance)
    close(got, logits)
    (got * upstream(got)).sum().backward()
    for key, weight in leaves.items():
        assert weight.grad is not None, key
        close(weight.grad, gradients[key], msg=partial("{}: {}".format, key))
