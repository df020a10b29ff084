"""Safe reading of a Hugging Face folder: safetensors alone, files of the folder alone, lazily.

The folder may be anybody's. Nothing in it is executed: no pickle, no code of the model's own.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_bp.tools.convert.refused import ConvertError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
NOT_WEIGHTS = ("rotary_emb.inv_freq",)  # buffers that old folders hold
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


class Folder:
    """The config of a folder, and its other text files.

    Attributes:
        path: of the folder.
        config: the content of config.json.
    """

    def __init__(self, path: Path, config: bool = True) -> None:
        """Read config.json.

        Args:
            path: of the folder.
            config: whether it has one; that of a tokenizer alone need not.

        Raises:
            ConvertError: what is missing, or not safe to read.
        """
        if not path.is_dir():
            raise ConvertError(f"{path}: is no folder; give the folder that holds config.json")
        self.path = path
        self.config: dict[str, Any] = self.json("config.json") if config else {}

    def json(self, name: str) -> dict[str, Any]:
        """The content of a JSON file of the folder."""
        file = self.inside(name)
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConvertError(f"{file}: cannot be read as JSON: {error}") from error
        if not isinstance(content, dict):
            raise ConvertError(f"{file}: holds a {type(content).__name__}, not an object")
        return content

    def inside(self, name: str) -> Path:
        """The file of that name, in the folder itself or where its cache has it.

        Raises:
            ConvertError: a name that leads elsewhere, or no such file.
        """
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or "\0" in name:
            raise ConvertError(
                f"{self.path}: names the file {name!r}: only plain names of files in the folder "
                f"are read"
            )
        file = self.path / name
        if not file.is_file():
            raise ConvertError(f"{self.path} has no {name}")
        if file.resolve().parent not in places(self.path.resolve()):
            raise ConvertError(
                f"{file} is a link to {file.resolve()}, outside of the folder; if that is meant, "
                f"copy the folder with its links resolved (cp -rL)"
            )
        return file

    def among(self, names: tuple[str, ...]) -> list[str]:
        """Those of the names that the folder has, if only as a link to nothing."""
        return [name for name in names if os.path.lexists(self.path / name)]


def places(folder: Path) -> set[Path]:
    """Where files of a folder may lie: in it; of a snapshot in the hub's cache, beside it too.

    The cache is models--OWNER--NAME/snapshots/COMMIT, whose files are links to ../../blobs.
    """
    model = folder.parent.parent
    cached = folder.parent.name == "snapshots" and model.name.startswith("models--")
    return {folder, model / "blobs"} if cached else {folder}


class WeightFolder(Folder):
    """A folder with its tensors, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Read config.json and the tensors' headers.

        Raises:
            ConvertError: what is missing, or not safe to read.
        """
        super().__init__(path)
        self._headers: dict[str, tuple[tuple[int, ...], str]] = {}
        self._where = self._find()

    def _find(self) -> dict[str, str]:
        """Tensor name -> file name, checked against the files' own headers."""
        if (self.path / ADAPTER).exists():
            raise ConvertError(f"{self.path} holds an adapter; merge it into its model first")
        if (self.path / INDEX).exists() and (self.path / SINGLE).exists():
            raise ConvertError(f"{self.path} has {SINGLE} and {INDEX}: delete the one not meant")
        if (self.path / INDEX).exists():
            named = self.json(INDEX).get("weight_map")
            if not isinstance(named, dict):
                raise ConvertError(f"{self.path / INDEX}: has no weight_map")
            where = dict(named)
            files = sorted({self._safetensors(name) for name in where.values()})
        elif (self.path / SINGLE).exists():
            files, where = [SINGLE], {}
        else:
            pickled = sorted(f.name for f in self.path.iterdir() if f.suffix in PICKLED)
            hint = f"; {', '.join(pickled)} may run code when it is loaded: " if pickled else ": "
            raise ConvertError(
                f"{self.path} has neither {SINGLE} nor {INDEX}{hint}save the model as safetensors "
                f"(save_pretrained does)"
            )
        held: dict[str, str] = {}
        for file in files:
            with self._open(file) as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name in held:
                        raise ConvertError(f"{self.path}: {name} is in {held[name]} and in {file}")
                    held[name] = file
                    header = opened.get_slice(name)
                    self._headers[name] = tuple(header.get_shape()), header.get_dtype()
        if where and where != held:
            other = sorted(set(where.items()) ^ set(held.items()))[0]
            raise ConvertError(
                f"{self.path / INDEX}: does not say what the files hold, for instance of {other[0]}"
            )
        return held

    def _safetensors(self, name: Any) -> str:
        self.inside(name)
        if not name.endswith(".safetensors"):
            raise ConvertError(f"{self.path / name}: only .safetensors files are read")
        return str(name)

    def _open(self, name: str) -> Any:
        file = self.inside(name)
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConvertError(f"{file}: is no whole safetensors file: {error}") from error

    @property
    def names(self) -> set[str]:
        """Of all weights."""
        return {name for name in self._where if not name.endswith(NOT_WEIGHTS)}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, without reading it."""
        return self._headers[name][0]

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor, without reading it.

        Raises:
            ConvertError: no floating-point type.
        """
        text = self._headers[name][1]
        known = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
        dtype = (known | {"F64": torch.float64}).get(text)
        if dtype is None:
            raise ConvertError(f"{name} is {text}: use weights in F16, BF16, F32 or F64")
        return dtype

    def tensor(self, name: str) -> Tensor:
        """Read it; the file is closed again, so that what was read of it does not stay mapped."""
        with self._open(self._where[name]) as opened:
            try:
                found: Tensor = opened.get_tensor(name)
            except (SafetensorError, OSError) as error:
                file = self.path / self._where[name]
                raise ConvertError(f"{file}: {name} cannot be read: {error}") from error
        return found
