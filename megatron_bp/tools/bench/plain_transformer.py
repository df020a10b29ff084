"""An autoregressive transformer as a reader would write it, with torch alone.

The model of `bench step`, so that its baseline, Megatron's, is seen to be no slow one. Nothing of
this project is imported here.
"""

# Shapes: L tokens, E hidden size, Q query and H key heads, D head dimension.

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [1, heads, L, D]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Layer(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm."""

    def __init__(self, hidden: int, heads: tuple[int, int, int]) -> None:
        super().__init__()
        query, key, dim = heads
        self.sizes = (query * dim, key * dim, key * dim)
        self.dim = dim
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.out = nn.Linear(query * dim, hidden, bias=False)
        self.up = nn.Linear(hidden, 6 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[1, L, E]."""
        parts = self.qkv(self.norm1(x)).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.dim)).transpose(1, 2) for part in parts)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        result: Tensor = x + self.down(F.silu(gate) * up)
        return result


class Transformer(nn.Module):
    """Embedding, layers, norm, output."""

    def __init__(
        self, layers: int, hidden: int, heads: tuple[int, int, int], vocabulary: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.output = nn.Linear(hidden, vocabulary, bias=False)
        self.frequencies = 10000.0 ** (-torch.arange(0, heads[2], 2) / heads[2])

    def forward(self, tokens: Tensor) -> Tensor:
        """Sum of the cross-entropy of tokens[1:], int64[L + 1]."""
        angles = torch.outer(torch.arange(len(tokens) - 1), self.frequencies).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(tokens[None, :-1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.output(self.norm(x))[0], tokens[1:], reduction="sum")


def step(model: Transformer, tokens: Tensor) -> float:
    """One forward and backward of a row, gradients thrown away; the mean loss."""
    total = model(tokens)
    total.backward()
    model.zero_grad(set_to_none=True)
    return float(total.item()) / (len(tokens) - 1)
