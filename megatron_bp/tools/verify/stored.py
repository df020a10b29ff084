"""Full tensors of a torch_dist folder, read one at a time: memory holds one, not the model."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


class StoredTensors(Mapping[str, Tensor]):
    """Name -> full tensor, read when it is asked for. Needs no process group."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = FileSystemReader(folder).read_metadata().state_dict_metadata
        self._tensors = {
            name: about for name, about in found.items() if isinstance(about, TensorStorageMetadata)
        }

    def __getitem__(self, name: str) -> Tensor:
        about = self._tensors[name]
        tensor = torch.empty(about.size, dtype=about.properties.dtype)
        with warnings.catch_warnings():  # it warns that it reads in one process
            warnings.simplefilter("ignore", UserWarning)
            load({name: tensor}, checkpoint_id=self._folder, no_dist=True)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
