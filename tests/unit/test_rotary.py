"""Rotary angles at explicit positions: exact at any length, whatever the variant."""

import math

import pytest
import torch
from ranks import run_ranks

BASE = 100_000  # some waves are longer than Llama 3's 8192 tokens, some shorter than 2048
POSITIONS = [0, 1, 2, 5, 63, 4096, 100_000, 1_000_003]


def angles(
    rank: int, world: int, percent: float, interleaved: bool, factor: float | None, scaling: bool
) -> torch.Tensor:
    """[S, dim] of our rotary module for head dimension 16."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_bp.attention.layout import Layout
    from megatron_bp.model.frequencies import Llama3
    from megatron_bp.model.rotary import PositionRotary

    parallel_state.initialize_model_parallel()
    base = RotaryEmbedding(
        16,
        percent,
        rotary_interleaved=interleaved,
        seq_len_interpolation_factor=factor,
        rotary_base=BASE,
        rope_scaling=scaling,
        use_cpu_initialization=True,
    )
    module = PositionRotary(base, int(16 * percent), BASE, Llama3() if scaling else None)
    layout = Layout(positions=torch.tensor(POSITIONS), plans={})
    assert module.get_rotary_seq_len(None, None, None, None, layout) is layout
    return module(layout)[:, 0, 0]


def frequency(pair: int, dim: int, scaling: bool) -> float:
    """Of one pair; Llama 3's scaling (factor 8, 1 and 4 of 8192 tokens) by its definition."""
    plain = float(BASE) ** (-2 * pair / dim)
    if not scaling:
        return plain
    length = 2 * math.pi / plain
    if length > 8192:
        return plain / 8
    if length < 8192 / 4:
        return plain
    smooth = (8192 / length - 1) / 3
    return (1 - smooth) * plain / 8 + smooth * plain


@pytest.mark.ranks
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("factor", "scaling"), [(None, False), (4.0, False), (None, True)])
def test_angles_are_those_of_the_definition(
    percent: float, interleaved: bool, factor: float | None, scaling: bool
) -> None:
    got = run_ranks(1, angles, percent, interleaved, factor, scaling)[0].double()
    dim = int(16 * percent)
    assert got.shape == (len(POSITIONS), dim)
    for row, position in enumerate(POSITIONS):
        for column in range(dim):
            pair = column // 2 if interleaved else column % (dim // 2)
            at = position / factor if factor else position
            want = at * frequency(pair, dim, scaling)
            error = abs(got[row, column].item() - want % (2 * math.pi))
            assert min(error, 2 * math.pi - error) < 2e-6, (position, column)
