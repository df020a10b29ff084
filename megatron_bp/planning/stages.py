"""Which layers each pipeline stage has, as Megatron deals them."""

from megatron_bp.planning.layout import Layout, Split
from megatron_bp.planning.shape import Layer, Shape


def stages(shape: Shape, layout: Layout) -> tuple[tuple[Layer, ...], ...]:
    """The layers of each stage, chunk after chunk.

    Raises:
        ValueError: they cannot be dealt.
    """
    dealt = deal(len(shape.layers), layout.pp, layout.split)
    return tuple(
        tuple(shape.layers[number] for chunk in stage for number in chunk) for stage in dealt
    )


def deal(layers: int, pp: int, split: Split) -> tuple[tuple[range, ...], ...]:
    """Numbers, from 0, of the layers of each chunk of each stage.

    Args:
        layers: how many there are.
        pp: stages.
        split: see `Split`.

    Raises:
        ValueError: they cannot be dealt.
    """
    sizes = _sizes(layers, pp, split)
    out: list[list[range]] = [[] for _ in range(pp)]
    number = 0
    for chunk in range(split.chunks):
        for stage in range(pp):
            size = sizes[stage] // split.chunks
            # Embedding and loss take the place of a layer where they stand for one.
            size -= split.embedding and (chunk, stage) == (0, 0)
            size -= split.loss and (chunk, stage) == (split.chunks - 1, pp - 1)
            if size < 0:
                raise ValueError(
                    f"{layers} layers on {pp} pipeline stages of {split.chunks} chunks: one would "
                    f"have {size} layers; use fewer stages or chunks"
                )
            out[stage].append(range(number, number + size))
            number += size
    return tuple(tuple(stage) for stage in out)


def _sizes(layers: int, pp: int, split: Split) -> list[int]:
    """Layers of each stage, what stands for one included."""
    between = pp - (split.first is not None) - (split.last is not None)
    left = layers + split.embedding + split.loss - (split.first or 0) - (split.last or 0)
    if between < 0 or left < 0 or (left % between if between else left):
        raise ValueError(
            f"{left} layers, embedding and loss included where they stand for one, cannot be dealt "
            f"evenly to {between} pipeline stages; choose a --pipeline-model-parallel-size that "
            f"divides them, or set --decoder-first-pipeline-num-layers"
        )
    sizes = [left // between if between else 0] * pp
    if split.first is not None:
        sizes[0] = split.first
    if split.last is not None:
        sizes[-1] = split.last
    for size in sizes:
        if size % split.chunks:
            raise ValueError(
                f"a pipeline stage of {size} layers cannot be cut into {split.chunks} equal "
                f"chunks; choose a number of virtual stages that divides it"
            )
    return sizes
