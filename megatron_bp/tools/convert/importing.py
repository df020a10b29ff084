"""A Hugging Face folder to a checkpoint that a run starts from, a weight at a time."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from megatron_bp.tools.convert.checkpoint import LazyStrategy, with_dtypes
from megatron_bp.tools.convert.families import HuggingFace
from megatron_bp.tools.convert.folder import TEXT_FILES, Folder, WeightFolder
from megatron_bp.tools.convert.matching import read, same_names, same_shapes, same_tables
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
from megatron_bp.tools.convert.writing import writing

TRACKER, RELEASE, KEPT = "latest_checkpointed_iteration.txt", "release", "hugging_face"
MODEL_FILE = "model.yaml"
OURS = (RELEASE, MODEL_FILE, KEPT)  # and the tracker, last


def import_folder(source: Path, target: Path, quiet: bool = False) -> HuggingFace:
    """Write `target`, which --pretrained-checkpoint can name; the model that it is.

    Beside the weights: model.yaml, the model in flags, for a run's config to include; and a folder
    with config.json and the tokenizer's files, for the way back.

    Raises:
        ConvertError: a folder that cannot be read, or is not of its config.json's model.
    """
    _refuse(target)
    folder = WeightFolder(source)
    model = HuggingFace(folder.config)
    same_names(folder, model)
    texts = {name: folder.inside(name) for name in ("config.json", *folder.among(TEXT_FILES))}
    args = megatron_arguments(model, int(model.config.vocab_size), true_ids(folder, model))
    with one_process():
        state = _state(folder, model, args)
        same_tables(folder, model)
        place = target / RELEASE
        place.mkdir(parents=True)
        with writing(target, f"{target} {_unfinished(OURS)}"):
            _write(folder, model, args, state, place, quiet)
            _describe(texts, model, target)
            (target / TRACKER).write_text(RELEASE, encoding="utf-8")  # last: now it is whole
    return model


def _refuse(target: Path) -> None:
    """Refuse a folder in which something is that would be overwritten."""
    if (target / TRACKER).exists():
        raise ConvertError(
            f"{target} holds a checkpoint already; give another folder, or delete it"
        )
    held = [name for name in OURS if (target / name).exists()]
    if RELEASE in held:
        raise ConvertError(f"{target} {_unfinished(held)}, or give another folder")
    if held:
        raise ConvertError(
            f"{target} has {' and '.join(held)} already, which import writes; give another folder"
        )


def _unfinished(names: Iterable[str]) -> str:
    return f"holds an unfinished import; delete {', '.join(names)} in it"


def _state(folder: WeightFolder, model: HuggingFace, args: Any) -> dict[str, Any]:
    """Where each weight goes, and in which type; refused if a tensor does not fit there."""
    meta = build(args, "meta")
    same_shapes(folder, model, weight_shapes(meta))
    state = sharded(meta)
    if model.config.tie_word_embeddings:  # there it is the embedding once more
        state.pop("output_layer.weight", None)
    first = {weight.name: weight.sources[0] for weight in model.weights}
    return with_both(with_dtypes(state, lambda name: folder.dtype(first[name])))


def _write(
    folder: WeightFolder,
    model: HuggingFace,
    args: Any,
    state: dict[str, Any],
    place: Path,
    quiet: bool,
) -> None:
    from megatron.core import dist_checkpointing

    by_name = {weight.name: weight for weight in model.weights}
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
            tensors = [read(folder, source) for source in weight.sources]
            held[name] = joined(weight.kind, tensors, model.heads)
            told()
        where = tuple(
            slice(start, start + length)
            for start, length in zip(piece.start, piece.shape, strict=True)
        )
        return held[name][where].contiguous()

    return part


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


def _describe(texts: dict[str, Path], model: HuggingFace, target: Path) -> None:
    head = (
        f"# The model of a {model.family.model_type} folder, for a run's config to `include:`.\n"
        f"# Written by megatron_bp.tools.convert import.\n\n"
    )
    values = {**model.flags, "padded_vocab_size": int(model.config.vocab_size)}
    text = yaml.safe_dump({"model": values}, sort_keys=False)
    (target / MODEL_FILE).write_text(head + text, encoding="utf-8")
    kept = target / KEPT
    kept.mkdir()
    for name, file in texts.items():
        shutil.copyfile(file, kept / name)
