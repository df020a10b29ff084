"""A checkpoint to a Hugging Face folder that transformers loads, a weight at a time.

Config, tokenizer and chat template are those of a folder that the model came from.
"""

import contextlib
import dataclasses
import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from megatron_bp.tools.convert.card import card, contract
from megatron_bp.tools.convert.checkpoint import Reader
from megatron_bp.tools.convert.families import HuggingFace, of_transformers
from megatron_bp.tools.convert.folder import INDEX, SINGLE, TEXT_FILES, Folder
from megatron_bp.tools.convert.model import Piece, build, one_process, pieces
from megatron_bp.tools.convert.refused import ConvertError
from megatron_bp.tools.convert.saved import saved
from megatron_bp.tools.convert.te import stored
from megatron_bp.tools.convert.tokens import tokens
from megatron_bp.tools.convert.weights import Weight, separated
from megatron_bp.tools.convert.writing import writing

SHARD_BYTES = 5_000_000_000
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


def export_folder(
    like: Path,
    checkpoint: Path,
    target: Path,
    step: int | None = None,
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    quiet: bool = False,
) -> str | None:
    """Write `target`; what the user has to know of it, if anything.

    Args:
        like: the folder the model came from, or its copy beside an imported checkpoint.
        checkpoint: of a run, or imported.
        target: a new folder.
        step: of the checkpoint; None for the newest.
        tokenizer: a folder with the run's tokenizer; None if it is that of `like`.
        shard_bytes: weights of a file.
        quiet: no progress bar.

    Raises:
        ConvertError: the checkpoint is of another model, or cannot be told in such a folder.
    """
    _refuse(target)
    folder = Folder(like)
    values = of_transformers(folder.config)
    model = HuggingFace(values)
    found = saved(model, checkpoint, step)
    if getattr(found.was, "self_conditioning", 0):
        raise ConvertError(
            f"{found.folder} has a module for self-conditioning, which a {model.family.model_type} "
            f"folder has no place for"
        )
    texts = folder if tokenizer is None else Folder(tokenizer, config=False)
    reader = Reader(found.folder)
    with one_process():
        parts = {
            name: [dataclasses.replace(part, key=stored(part.key, reader.has)) for part in of]
            for name, of in pieces(build(found.args, "meta")).items()
        }
    rows = table_rows(found.was, model, reader.size(parts[TABLES[0]][0].key)[0])
    mask = getattr(found.was, "mask_token_id", None)
    files = text_files(folder, texts)
    settings, note = _with_mask(texts, mask)
    words = contract(found.was)
    target.mkdir(parents=True, exist_ok=True)
    with writing(target, f"{target} holds an unfinished export; delete what is in it"):
        dtype = _write_weights(model, reader, parts, rows, target, shard_bytes, quiet)
        for name, file in files.items():
            shutil.copyfile(file, target / name)
        if settings is not None:
            _write_json(settings, target / SETTINGS)
        (target / "README.md").write_text(card(model, words, mask), encoding="utf-8")
        # Last: now it is whole.
        _write_json(_config(values, model, rows, dtype, words, mask), target / "config.json")
    return note


def _refuse(target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        return
    if not (target / "config.json").exists() and any(target.glob("model*.safetensors")):
        raise ConvertError(
            f"{target} holds an unfinished export; delete what is in it, or give another folder"
        )
    raise ConvertError(f"{target} is not empty; give another folder, or empty it")


def table_rows(was: Namespace, model: HuggingFace, there: int) -> int:
    """Of the exported tables: those of config.json, more where ids were added; no padding."""
    ids = int(getattr(was, "bdlm_vocabulary", 0))
    return max(ids, min(there, int(model.config.vocab_size)))


def _write_weights(
    model: HuggingFace,
    reader: Reader,
    parts: dict[str, list[Piece]],
    rows: int,
    target: Path,
    shard_bytes: int,
    quiet: bool,
) -> torch.dtype:
    """Write the files of weights; the type of most."""
    shards = list(_shards(model.weights, reader, parts, shard_bytes))
    where: dict[str, str] = {}
    total = 0
    with tqdm(total=len(model.weights), unit="weight", disable=quiet) as bar:
        for number, shard in enumerate(shards, 1):
            tensors: dict[str, Tensor] = {}
            for weight in shard:
                whole = assembled(reader, parts[weight.name])
                if weight.name in TABLES:
                    whole = whole[:rows]
                for name, tensor in zip(
                    weight.sources, separated(weight.kind, whole, model.heads), strict=True
                ):
                    tensors[name] = tensor.contiguous().clone()
                bar.update()
            name = SINGLE if len(shards) == 1 else _shard_name(number, len(shards))
            _save(tensors, target / name)
            where |= dict.fromkeys(tensors, name)
            total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(index, target / INDEX)
    return reader.dtype(parts[TABLES[0]][0].key)


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    with contextlib.suppress(OSError):  # some disks have no modes
        file.chmod(mode)  # safetensors makes files that their owner alone may read


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def assembled(reader: Reader, parts: list[Piece]) -> Tensor:
    """A weight from its parts, which lie one after another along its first dimension."""
    ordered = sorted(parts, key=lambda piece: piece.start)
    tensors = [reader.part(piece) for piece in ordered]
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _shards(
    weights: list[Weight], reader: Reader, parts: dict[str, list[Piece]], limit: int
) -> Iterator[list[Weight]]:
    shard: list[Weight] = []
    held = 0
    for weight in weights:
        size = sum(
            torch.Size(piece.shape).numel() * reader.dtype(piece.key).itemsize
            for piece in parts[weight.name]
        )
        if shard and held + size > limit:
            yield shard
            shard, held = [], 0
        shard.append(weight)
        held += size
    yield shard


def text_files(like: Folder, tokenizer: Folder) -> dict[str, Path]:
    """Name -> file of what describes text; how to generate is told by the model's own folder."""
    names = [name for name in tokenizer.among(TEXT_FILES) if name != GENERATION]
    files = {name: tokenizer.inside(name) for name in names}
    return files | {name: like.inside(name) for name in like.among((GENERATION,))}


def _with_mask(folder: Folder, mask: int | None) -> tuple[dict[str, Any] | None, str | None]:
    """The tokenizer's settings that name the mask token to it, or a note why there are none."""
    if mask is None:
        return None, None
    ids = tokens(folder)
    if ids is None or not folder.among((SETTINGS,)):
        return None, (
            f"{folder.path} has no tokenizer.json with a tokenizer_config.json, so that the mask "
            f"token, id {mask}, stands in the exported config.json alone"
        )
    if mask not in ids:
        raise ConvertError(
            f"the tokenizer of {folder.path} has no id {mask}, the mask token's; give the run's "
            f"tokenizer with --tokenizer"
        )
    return folder.json(SETTINGS) | {"mask_token": ids[mask]}, None


def _write_json(values: dict[str, Any], file: Path) -> None:
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")


def _config(
    values: dict[str, Any],
    model: HuggingFace,
    rows: int,
    dtype: torch.dtype,
    words: dict[str, Any],
    mask: int | None,
) -> dict[str, Any]:
    left_out = ("auto_map", "torch_dtype", "dtype", "_name_or_path")
    kept = {name: value for name, value in values.items() if name not in left_out}
    added: dict[str, Any] = {"block_diffusion": words} if words else {}
    if mask is not None:
        added["mask_token_id"] = mask
    own = {
        "architectures": [model.family.architecture],
        "vocab_size": rows,
        "dtype": str(dtype).removeprefix("torch."),
    }
    return kept | own | added
