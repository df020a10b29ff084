"""A Hugging Face folder to a checkpoint that a run starts from, a weight at a time."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from megatron_bp.tools.convert.checkpoint import LazyStrategy, with_dtypes
from megatron_bp.tools.convert.families import HuggingFace
from megatron_bp.tools.convert.folder import Folder, WeightFolder
from megatron_bp.tools.convert.model import (
    Piece,
    build,
    content,
    megatron_arguments,
    one_process,
    sharded,
    weight_shapes,
)
from megatron_bp.tools.convert.refused import ConvertError
from megatron_bp.tools.convert.te import with_both
from megatron_bp.tools.convert.tokens import tokens
from megatron_bp.tools.convert.weights import Weight, joined

TRACKER, RELEASE, KEPT = "latest_checkpointed_iteration.txt", "release", "hugging_face"
MODEL_FILE = "model.yaml"
# What of a folder describes its text: copied as it is, nothing of it executed.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def import_folder(source: Path, target: Path, quiet: bool = False) -> HuggingFace:
    """Write `target`, which --pretrained-checkpoint can name; the model that it is.

    Beside the weights: model.yaml, the model in flags, for a run's config to include; and a folder
    with config.json and the tokenizer's files, for the way back.

    Raises:
        ConvertError: a folder that cannot be read, or is not of its config.json's model.
    """
    if (target / TRACKER).exists() or (target / RELEASE).exists():
        raise ConvertError(
            f"{target} holds a checkpoint already; give another folder, or delete it"
        )
    folder = WeightFolder(source)
    model = HuggingFace(folder.config)
    same_names(folder, model)
    args = megatron_arguments(model, int(model.config.vocab_size), true_ids(folder, model))
    place = target / RELEASE
    place.mkdir(parents=True)
    with one_process():
        _write(folder, model, args, place, quiet)
    del args
    _describe(folder, model, target)
    (target / TRACKER).write_text(RELEASE, encoding="utf-8")  # last: now it is whole
    return model


def _write(folder: WeightFolder, model: HuggingFace, args: Any, place: Path, quiet: bool) -> None:
    from megatron.core import dist_checkpointing

    meta = build(args, "meta")
    by_name = {weight.name: weight for weight in model.weights}
    _same_shapes(folder, model, weight_shapes(meta), by_name)
    state = sharded(meta)
    if model.config.tie_word_embeddings:  # there it is the embedding once more
        state.pop("output_layer.weight", None)
    state = with_both(with_dtypes(state, lambda name: folder.dtype(by_name[name].sources[0])))
    args.iteration, args.objective = 0, "ar"  # a run from it is a conversion, and is checked
    saved: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "model": state,
    }
    with tqdm(total=len(by_name), unit="weight", disable=quiet) as bar:
        source = _parts(folder, by_name, model, lambda: bar.update())
        dist_checkpointing.save(saved, str(place), LazyStrategy(source), content_metadata=content())


def _parts(
    folder: WeightFolder, by_name: dict[str, Weight], model: HuggingFace, told: Callable[[], Any]
) -> Callable[[str, Piece], Tensor]:
    """The source of the writer: parts of one weight are asked for one after the other."""
    held: dict[str, Tensor] = {}

    def part(name: str, piece: Piece) -> Tensor:
        if name not in held:
            held.clear()
            weight = by_name[name]
            tensors = [folder.tensor(source) for source in weight.sources]
            held[name] = joined(weight.kind, tensors, model.heads)
            told()
        where = tuple(
            slice(start, start + length)
            for start, length in zip(piece.start, piece.shape, strict=True)
        )
        return held[name][where].contiguous()

    return part


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


def _same_shapes(
    folder: WeightFolder,
    model: HuggingFace,
    shapes: dict[str, tuple[int, ...]],
    by_name: dict[str, Weight],
) -> None:
    """Compare headers with Megatron's model, before anything is read."""
    if set(shapes) != set(by_name):
        other = sorted(set(shapes) ^ set(by_name))
        raise ConvertError(f"Megatron's model differs in {', '.join(other[:4])} from the family's")
    for name, weight in by_name.items():
        parts = [
            torch.empty(folder.shape(source), device="meta", dtype=folder.dtype(source))
            for source in weight.sources
        ]
        types = {part.dtype for part in parts}
        try:
            shape = tuple(joined(weight.kind, parts, model.heads).shape)
        except RuntimeError as error:
            raise ConvertError(f"{', '.join(weight.sources)}: do not fit: {error}") from error
        if shape != shapes[name] or len(types) > 1:
            raise ConvertError(
                f"{', '.join(weight.sources)}: {[list(p.shape) for p in parts]} in "
                f"{', '.join(map(str, types))}; config.json makes it {list(shapes[name])}, in one "
                f"type"
            )


def true_ids(folder: Folder, model: HuggingFace) -> int:
    """Ids that text can have: the tokenizer's, if the folder has one; tables are often padded."""
    rows = int(model.config.vocab_size)
    ids = tokens(folder)
    if ids is None:
        return rows
    count = max(ids, default=-1) + 1
    if not 0 < count <= rows:
        raise ConvertError(
            f"{folder.path}: its tokenizer has {count} ids and its table {rows} rows; the "
            f"tokenizer is of another model"
        )
    return count


def _describe(folder: Folder, model: HuggingFace, target: Path) -> None:
    head = (
        f"# The model of a {model.family.model_type} folder, for a run's config to `include:`.\n"
        f"# Written by megatron_bp.tools.convert import.\n\n"
    )
    values = {**model.flags, "padded_vocab_size": int(model.config.vocab_size)}
    text = yaml.safe_dump({"model": values}, sort_keys=False)
    (target / MODEL_FILE).write_text(head + text, encoding="utf-8")
    kept = target / KEPT
    kept.mkdir()
    for name in ("config.json", *TEXT_FILES):
        if (folder.path / name).exists():
            shutil.copyfile(folder.inside(name), kept / name)
