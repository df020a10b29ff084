"""Rotary frequencies, angles and the scale of queries, against formulas and transformers."""

import math
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks

from megatron_bp.attention.layout import Layout
from megatron_bp.attention.query_scale import QueryScale
from megatron_bp.model.frequencies import Llama3, Scaling, Yarn, inverse_frequencies
from megatron_bp.model.rotary import PositionRotary

POSITIONS = [0, 8191, 8192, 131_072, 524_287, 1_048_575]
DIM, BASE = 128, 1e6
YARN = Yarn(16.0, 16_384)
SCALINGS: dict[str, Scaling | None] = {
    "plain": None,
    "llama3": Llama3(32.0),
    "yarn": YARN,
    "yarn, not rounded": Yarn(4.0, 32_768, 24.0, 2.0, rounded=False),
}


def frequency(pair: int, scaling: Scaling | None) -> float:
    """Of one pair of channels, as the papers have it, one number at a time."""
    plain = BASE ** (-2 * pair / DIM)
    if scaling is None:
        return plain
    if isinstance(scaling, Llama3):
        wave = 2 * math.pi / plain
        if wave > scaling.length / scaling.low:
            return plain / scaling.factor
        if wave < scaling.length / scaling.high:
            return plain
        smooth = (scaling.length / wave - scaling.low) / (scaling.high - scaling.low)
        return (1 - smooth) * plain / scaling.factor + smooth * plain
    ends = [
        DIM * math.log(scaling.length / (2 * math.pi * turns)) / (2 * math.log(BASE))
        for turns in (scaling.fast, scaling.slow)
    ]
    if scaling.rounded:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    ramp = min(1.0, max(0.0, (pair - ends[0]) / (ends[1] - ends[0])))
    return (1 - ramp) * plain + ramp * plain / scaling.factor


def module(scaling: Scaling | None) -> PositionRotary:
    base: Any = SimpleNamespace(rotary_interleaved=False, seq_len_interpolation_factor=None)
    return PositionRotary(base, DIM, BASE, scaling)


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_are_exact_at_a_million_tokens(name: str) -> None:
    """Clean and corrupted rows: the same position has the same angle, wherever its row stands."""
    rotary = module(SCALINGS[name])
    angles = rotary.angles(torch.tensor(POSITIONS + POSITIONS[::-1]))
    assert angles.dtype == torch.float64
    assert torch.equal(angles[: len(POSITIONS)], angles[len(POSITIONS) :].flip(0))
    for row, position in enumerate(POSITIONS):
        for pair in range(DIM // 2):
            want = position * frequency(pair, SCALINGS[name]) % (2 * math.pi)
            for column in (pair, pair + DIM // 2):
                off = abs(angles[row, column].item() - want)
                assert min(off, 2 * math.pi - off) < 1e-9, (position, pair)


def test_what_the_model_gets_is_float32_and_of_yarn_a_pair() -> None:
    layout = Layout(positions=torch.tensor(POSITIONS), plans={})
    plain, (angles, factor) = module(None)(layout), module(YARN)(layout)
    assert plain.dtype == angles.dtype == torch.float32
    assert plain.shape == angles.shape == (len(POSITIONS), 1, 1, DIM)
    assert factor is None


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    """Which computes them in float32."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = SCALINGS[name]
    if scaling is None:
        parameters: dict[str, Any] = {"rope_type": "default"}
    elif isinstance(scaling, Llama3):
        parameters = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.length,
        }
    else:
        parameters = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.fast,
            "beta_slow": scaling.slow,
            "truncate": scaling.rounded,
            "original_max_position_embeddings": scaling.length,
        }
    config = LlamaConfig(
        hidden_size=DIM,
        num_attention_heads=1,
        head_dim=DIM,
        max_position_embeddings=1 << 20,
        rope_parameters={"rope_theta": BASE} | parameters,
    )
    if scaling is None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        theirs = LlamaRotaryEmbedding(config).inv_freq
    else:
        theirs, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    ours = inverse_frequencies(DIM, BASE, scaling)
    torch.testing.assert_close(theirs.double(), ours, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("beta", "length"), [(0.1, 16_384), (0.5, 8192)])
def test_query_scale_is_the_formula(beta: float, length: int) -> None:
    """And of whole lengths: 1 up to the last token of the first, larger at the next."""
    got = QueryScale(beta, length).at(torch.tensor(POSITIONS))
    assert got.dtype == torch.float64
    for value, position in zip(got.tolist(), POSITIONS, strict=True):
        assert value == pytest.approx(1 + beta * math.log(1 + position // length), abs=1e-9)
    edge = QueryScale(beta, length).at(torch.tensor([length - 1, length, 2 * length - 1]))
    assert edge[0] == 1 < edge[1] == edge[2]


def test_query_scale_is_that_of_transformers() -> None:
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    at = torch.tensor(POSITIONS)
    theirs = get_llama_4_attn_scale(at[None], 0.1, 16_384)[0, 0, :, 0]
    torch.testing.assert_close(theirs, QueryScale(0.1, 16_384).at(at).float())


@pytest.mark.parametrize(("beta", "length"), [(0, 5), (-1, 5), (math.nan, 5), (0.1, 0)])
def test_numbers_without_meaning_are_refused(beta: float, length: int) -> None:
    with pytest.raises(ValueError, match="--query-scale-"):
        QueryScale(beta, length)


def factors_on_rank(rank: int, world: int, config: dict[str, Any]) -> list[float]:
    """Llama 3's factor in the config of Megatron's own model, and of ours."""
    from megatron_bp.arguments.build import model_config
    from megatron_bp.tools.convert.families import HuggingFace
    from megatron_bp.tools.convert.model import megatron_arguments

    args = megatron_arguments(HuggingFace(config), 64, 64)
    kinds = [model_config(Namespace(**vars(args) | {"objective": o})) for o in ("ar", "nemotron")]
    return [kind.rope_scaling_factor for kind in kinds]


@pytest.mark.ranks
def test_llama_3s_factor_reaches_the_model() -> None:
    """Megatron passes on that there is one, and leaves 8 in its place."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}
    config |= {"intermediate_size": 48, "num_attention_heads": 2, "rope_parameters": rope}
    assert run_ranks(1, factors_on_rank, config) == [[32.0, 32.0]]
