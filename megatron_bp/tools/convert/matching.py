"""Whether a folder's tensors are those of its config.json's model: names, shapes, types, numbers.

All of it is asked before anything is written, but for the numbers, which are looked at as they are
read.
"""

import torch
from torch import Tensor

from megatron_bp.tools.convert.families import HuggingFace
from megatron_bp.tools.convert.folder import WeightFolder
from megatron_bp.tools.convert.refused import ConvertError
from megatron_bp.tools.convert.weights import separated


def same_names(folder: WeightFolder, model: HuggingFace) -> None:
    """Refuse a folder that lacks a weight of its config.json's model, or has another."""
    wanted = {source for weight in model.weights for source in weight.sources}
    if model.config.tie_word_embeddings:  # some folders hold the same table twice
        wanted |= {model.family.head} & folder.names
    missing, beyond = sorted(wanted - folder.names), sorted(folder.names - wanted)
    if missing or beyond:
        what = f"lacks {missing[0]}" if missing else f"has {beyond[0]}, which is not converted"
        count = len(missing) + len(beyond)
        raise ConvertError(
            f"{folder.path}: {what} ({count} of its names are not those of a "
            f"{model.family.model_type} with {model.config.num_hidden_layers} layers)"
        )


def same_shapes(
    folder: WeightFolder, model: HuggingFace, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Refuse a tensor that has not the shape which Megatron's model gives it, or is of no type.

    Args:
        folder: whose headers are compared.
        model: of its config.json.
        shapes: Megatron's name of a weight -> shape.
    """
    if other := sorted(set(shapes) ^ {weight.name for weight in model.weights}):
        raise ConvertError(f"Megatron's model differs in {', '.join(other[:4])} from the family's")
    for weight in model.weights:
        whole = torch.empty(shapes[weight.name], device="meta")
        for source, part in zip(
            weight.sources, separated(weight.kind, whole, model.heads), strict=True
        ):
            if folder.shape(source) != tuple(part.shape):
                raise ConvertError(
                    f"{folder.path}: {source} is {list(folder.shape(source))}; config.json makes "
                    f"it {list(part.shape)}"
                )
        types = {folder.dtype(source) for source in weight.sources}
        if len(types) > 1:
            raise ConvertError(
                f"{folder.path}: {', '.join(weight.sources)} are of the types "
                f"{', '.join(sorted(map(str, types)))}; save the folder in one type"
            )


def same_tables(folder: WeightFolder, model: HuggingFace) -> None:
    """Refuse a head of its own beside a config.json that says that it is the embedding."""
    head, table = model.family.head, model.family.trunk + "embed_tokens.weight"
    if not model.config.tie_word_embeddings or head not in folder.names:
        return
    first, second = read(folder, head), read(folder, table)
    if first.shape != second.shape or not torch.equal(first, second.to(first.dtype)):
        raise ConvertError(
            f"{folder.path}: {head} is not {table}, but config.json has tie_word_embeddings true, "
            f"with which it is not used; write false there if the head is the model's own, or save "
            f"the folder without it"
        )


def read(folder: WeightFolder, name: str) -> Tensor:
    """A tensor, if all of its numbers are numbers."""
    tensor = folder.tensor(name)
    if not torch.isfinite(tensor).all():
        raise ConvertError(
            f"{folder.path}: {name} holds NaN or infinite numbers; no run can start from it"
        )
    return tensor
