"""What is put into Megatron's layer specs: core attention, and the local spec's norms."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks

KINDS = pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])


def norms_on_rank(rank: int, world: int, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Ours and Megatron's own, on the same rows."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_bp.model.norm import local_norm

    config = TransformerConfig(
        num_layers=1, hidden_size=24, num_attention_heads=1, normalization=kind
    )
    found: dict[str, Any] = {}
    for name, make in (("ours", local_norm), ("megatron", WrappedTorchNorm)):
        norm = make(config=config, hidden_size=24, eps=1e-6).to(dtype)
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(9, 1, 24, generator=generator).to(dtype).requires_grad_()
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.copy_(torch.randn(24, generator=generator))
        out = norm(rows)
        out.square().sum().backward()
        grads = {n: p.grad for n, p in norm.named_parameters()}
        found[name] = {"out": out.detach(), "rows": rows.grad, **grads}
    config.sequence_parallel = True
    marks = [p.sequence_parallel for p in local_norm(config, 24).parameters()]
    return found | {"marks": marks}


@pytest.mark.ranks
@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_megatrons_to_the_bit_and_marked(kind: str, dtype: torch.dtype) -> None:
    (found,) = run_ranks(1, norms_on_rank, kind, dtype)
    assert found["ours"].keys() == found["megatron"].keys()
    for name, tensor in found["ours"].items():
        assert torch.equal(tensor, found["megatron"][name]), name
    assert found["marks"] == [True] * (1 if kind == "RMSNorm" else 2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
        ({"normalization": "L2Norm"}, "--normalization L2Norm"),
    ],
)
def test_a_norm_that_torch_does_not_have_is_refused(changed: dict[str, Any], words: str) -> None:
    assert words in run_ranks(1, refusal_on_rank, changed)[0]


def refusal_on_rank(rank: int, world: int, changed: dict[str, Any]) -> str:
    from megatron_bp.model.norm import local_norm

    plain = {"layernorm_zero_centered_gamma": False, "normalization": "RMSNorm"}
    try:
        local_norm(SimpleNamespace(**(plain | changed)), 8)  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.ranks
def test_a_transformer_engine_spec_gets_our_core_attention_and_keeps_its_norms() -> None:
    """Megatron's own needs Transformer Engine: one that looks like it."""
    assert run_ranks(1, te_spec_on_rank) == [(True, "fused", "fused q", "TENorm")]


def te_spec_on_rank(rank: int, world: int) -> tuple[bool, Any, Any, Any]:
    from megatron_bp.attention.core_attention import BlockDiffusionAttention
    from megatron_bp.model import config as module

    attention = SimpleNamespace(core_attention="TE's", q_layernorm="fused q", k_layernorm=None)
    layer = SimpleNamespace(
        submodules=SimpleNamespace(
            self_attention=SimpleNamespace(submodules=attention),
            input_layernorm="fused",
            pre_mlp_layernorm="fused",
            mlp="dense",
        )
    )
    spec = SimpleNamespace(layer_specs=[layer], layer_norm="TENorm")
    config: Any = SimpleNamespace(
        transformer=SimpleNamespace(transformer_impl="transformer_engine")
    )
    with mock.patch.object(module, "default_layer_spec", return_value=spec):
        got: Any = module.block_diffusion_layer_spec(config)
    ours = got.layer_specs[0].submodules.self_attention.submodules
    return (
        ours.core_attention is BlockDiffusionAttention,
        layer.submodules.input_layernorm,
        ours.q_layernorm,
        got.layer_norm,
    )
