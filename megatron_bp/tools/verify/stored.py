"""Full tensors of a torch_dist folder, read one at a time: memory holds one, not the model."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

EXPERTS = ".experts."  # in a name: the first dimension counts experts


class StoredTensors(Mapping[str, Tensor]):
    """Name -> full tensor, read when it is asked for. Needs no process group.

    Experts, which Megatron stores as one tensor, are a parameter each: one that goes wrong must not
    hide among the others.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = FileSystemReader(folder).read_metadata().state_dict_metadata
        self._stored = {
            name: about for name, about in found.items() if isinstance(about, TensorStorageMetadata)
        }
        self._places: dict[str, tuple[str, int | None]] = {}
        for name, about in self._stored.items():
            if EXPERTS in name and len(about.size) > 1:
                self._places |= {f"{name}[{i}]": (name, i) for i in range(about.size[0])}
            else:
                self._places[name] = (name, None)

    def __getitem__(self, name: str) -> Tensor:
        stored, expert = self._places[name]
        whole = self._whole(stored)
        return whole if expert is None else whole[expert]

    def _whole(self, name: str) -> Tensor:
        about = self._stored[name]
        tensor = torch.empty(about.size, dtype=about.properties.dtype)
        with warnings.catch_warnings():  # it warns that it reads in one process
            warnings.simplefilter("ignore", UserWarning)
            load({name: tensor}, checkpoint_id=self._folder, no_dist=True)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
