"""The shape of a model, as far as memory, work and traffic follow from it.

Also of models that cannot be trained here yet: a layer may have a window of its own, experts, or a
mixer that is no softmax attention.
"""

from dataclasses import dataclass

# Shapes: H hidden size, V padded vocabulary, Q query heads, K key heads, D head dimension.


@dataclass(frozen=True)
class Attention:
    """Softmax attention of a layer.

    Attributes:
        query_heads: Q.
        key_heads: K.
        head_dim: D.
        window: sliding window in tokens; None for none.
        output_gate: a gate of Q x D numbers, made beside the queries.
        norms: queries and keys of each head are normalized.
        bias: projections of queries, keys and values have a bias.
    """

    query_heads: int
    key_heads: int
    head_dim: int
    window: int | None = None
    output_gate: bool = False
    norms: bool = False
    bias: bool = False

    @property
    def kv_numbers(self) -> int:
        """Numbers of K|V of one row."""
        return 2 * self.key_heads * self.head_dim

    @property
    def qkv_numbers(self) -> int:
        """Numbers that the first projection makes of one row."""
        gate = self.query_heads if self.output_gate else 0
        return (self.query_heads + gate) * self.head_dim + self.kv_numbers


@dataclass(frozen=True)
class Mlp:
    """What follows attention in a layer.

    Attributes:
        width: hidden units that every row passes, shared experts included; 0 for none.
        experts: of which a row passes `top_k`; 0 for a dense layer.
        top_k: see there.
        expert_width: hidden units of one expert.
        gated: three matrices (SwiGLU), not two.
    """

    width: int
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    gated: bool = True

    @property
    def matrices(self) -> int:
        """Matrices of hidden size x width."""
        return 3 if self.gated else 2

    @property
    def active_width(self) -> int:
        """Hidden units that a row passes."""
        return self.width + self.top_k * self.expert_width


@dataclass(frozen=True)
class Layer:
    """One layer. Layers that are equal cost the same.

    Attributes:
        attention: None where something else mixes rows.
        mlp: see there.
        mixer: parameters of that something else, each used once a row.
    """

    attention: Attention | None
    mlp: Mlp
    mixer: int = 0


@dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        name: of the model.
        hidden: H.
        vocabulary: V.
        tied: the output uses the embedding's table.
        layers: first to last.
        norm_vectors: of a norm over the hidden size: 1 (RMSNorm) or 2 (LayerNorm).
        bias: output projection and MLP have biases too.
    """

    name: str
    hidden: int
    vocabulary: int
    tied: bool
    layers: tuple[Layer, ...]
    norm_vectors: int = 1
    bias: bool = False

    def attention_parameters(self, layer: Layer) -> int:
        """Parameters of a layer's attention or mixer, used once a row; biases and norms apart."""
        if layer.attention is None:
            return layer.mixer
        inner = layer.attention.query_heads * layer.attention.head_dim
        return layer.mixer + self.hidden * (layer.attention.qkv_numbers + inner)

    def dense_parameters(self, layer: Layer) -> int:
        """Parameters of a layer's dense MLP and router."""
        router = self.hidden * layer.mlp.experts
        return layer.mlp.matrices * self.hidden * layer.mlp.width + router

    def expert_parameters(self, layer: Layer) -> int:
        """Parameters of all of a layer's experts."""
        mlp = layer.mlp
        return mlp.experts * mlp.matrices * self.hidden * mlp.expert_width

    def small_parameters(self, layer: Layer) -> int:
        """Norms and biases of a layer; every tensor-parallel rank counts as having them all."""
        count = 2 * self.norm_vectors * self.hidden
        if layer.attention is not None:
            count += 2 * self.norm_vectors * layer.attention.head_dim * layer.attention.norms
            count += layer.attention.qkv_numbers * (layer.attention.bias or self.bias)
        if self.bias:
            first = layer.mlp.width * (layer.mlp.matrices - 1)
            count += self.hidden * (layer.attention is not None) + first + self.hidden
        return count

    def active_parameters(self, layer: Layer) -> int:
        """Parameters of a layer that a row is multiplied by."""
        mlp = layer.mlp
        sparse = mlp.matrices * self.hidden * mlp.top_k * mlp.expert_width
        return self.attention_parameters(layer) + self.dense_parameters(layer) + sparse

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding, and of the output if it has its own table."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All parameters."""
        layers = sum(
            self.attention_parameters(layer)
            + self.dense_parameters(layer)
            + self.expert_parameters(layer)
            + self.small_parameters(layer)
            for layer in self.layers
        )
        return layers + self.embedding_parameters + self.norm_vectors * self.hidden
