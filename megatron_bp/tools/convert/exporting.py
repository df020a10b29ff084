"""A checkpoint to a Hugging Face folder that transformers loads, a weight at a time.

Config, tokenizer and chat template are those of a folder that the model came from.
"""

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
from megatron_bp.tools.convert.folder import INDEX, SINGLE, Folder
from megatron_bp.tools.convert.importing import TEXT_FILES
from megatron_bp.tools.convert.model import Piece, build, one_process, pieces
from megatron_bp.tools.convert.refused import ConvertError
from megatron_bp.tools.convert.saved import saved
from megatron_bp.tools.convert.te import stored
from megatron_bp.tools.convert.tokens import tokens
from megatron_bp.tools.convert.weights import Weight, separated

SHARD_BYTES = 5_000_000_000
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
    if target.exists() and any(target.iterdir()):
        raise ConvertError(f"{target} is not empty; give another folder, or empty it")
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
    target.mkdir(parents=True, exist_ok=True)
    dtype = _write_weights(model, reader, parts, rows, target, shard_bytes, quiet)
    mask = getattr(found.was, "mask_token_id", None)
    note = _write_texts(texts, target, mask)
    words = contract(found.was)
    (target / "README.md").write_text(card(model, words, mask), encoding="utf-8")
    config = _config(values, model, rows, dtype, words, mask)
    text = json.dumps(config, indent=2) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")  # last: now it is whole
    return note


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
            save_file(tensors, target / name, metadata={"format": "pt"})
            where |= dict.fromkeys(tensors, name)
            total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return reader.dtype(parts[TABLES[0]][0].key)


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


def _write_texts(folder: Folder, target: Path, mask: int | None) -> str | None:
    """Copy what describes text; name the mask token to the tokenizer, or tell why not."""
    for name in TEXT_FILES:
        if (folder.path / name).exists():
            shutil.copyfile(folder.inside(name), target / name)
    if mask is None:
        return None
    settings, ids = target / "tokenizer_config.json", tokens(folder)
    if ids is None or not settings.exists():
        return (
            f"{folder.path} has no tokenizer.json with a tokenizer_config.json, so that the mask "
            f"token, id {mask}, stands in {target / 'config.json'} alone"
        )
    if mask not in ids:
        raise ConvertError(
            f"the tokenizer of {folder.path} has no id {mask}, the mask token's; give the run's "
            f"tokenizer with --tokenizer"
        )
    values = json.loads(settings.read_text(encoding="utf-8")) | {"mask_token": ids[mask]}
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    settings.write_text(text, encoding="utf-8")
    return None


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
