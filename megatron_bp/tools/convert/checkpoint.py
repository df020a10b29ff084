"""Megatron checkpoints (torch_dist) a tensor at a time: written as they are made, read in parts.

torch.distributed.checkpoint writes what a planner hands it item by item, so a planner that makes
each item when asked for it needs memory for one. A checkpoint's common part is a pickle: it is
read from checkpoints of one's own, never from a Hugging Face folder.
"""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_bp.tools.convert.model import Piece, piece_of
from megatron_bp.tools.convert.refused import ConvertError

Source = Callable[[str, Piece], Tensor]


class LazyStrategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy, but the tensors are made one by one while they are written."""

    def __init__(self, source: Source) -> None:
        """Set up.

        Args:
            source: the part of a weight, by the weight's name.
        """
        super().__init__()
        self._source = source

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> None:
        """Write {"model": name -> ShardedTensor(s)} and the common part."""
        writer = FileSystemWriter(str(checkpoint_dir), per_thread_copy_ahead=0)
        save(
            {},
            storage_writer=writer,
            planner=_Writes(sharded_state_dict, self._source),
            no_dist=True,
        )


class _Writes(SavePlanner):
    """Knows what is to be written, and makes it when it is asked for."""

    def __init__(self, state: dict[str, Any], source: Source) -> None:
        self._items: list[WriteItem] = []
        self._make: dict[tuple[str, tuple[int, ...] | None], Callable[[], Any]] = {}
        for name, value in state["model"].items():
            for tensor in nested_values({"of": value}):
                if isinstance(tensor, ShardedTensor):
                    self._tensor(name, tensor, source)
        for value in nested_values(state):
            if isinstance(value, ShardedObject):
                self._object(value)

    def _tensor(self, name: str, tensor: ShardedTensor, source: Source) -> None:
        piece = piece_of(tensor)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.size)),
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.global_shape),
        )
        index = MetadataIndex(piece.key, piece.offset)
        self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self._make[piece.key, piece.offset] = lambda: source(name, piece).reshape(piece.size)

    def _object(self, value: ShardedObject) -> None:
        def packed() -> io.BytesIO:
            buffer = io.BytesIO()
            torch.save([value.data], buffer)  # Megatron has a list of what its ranks hold
            buffer.seek(0)
            return buffer

        key = value.unique_key
        self._items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
        self._make[key, None] = packed

    def set_up_planner(self, *unused: Any, **also_unused: Any) -> None: ...

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        offset = write_item.index.offset
        made: Tensor | io.BytesIO = self._make[
            write_item.index.fqn, None if offset is None else tuple(offset)
        ]()
        return made


class Reader:
    """The tensors of a checkpoint, any part of each."""

    def __init__(self, folder: Path) -> None:
        """Of an iter_ folder, whatever degrees it was saved with."""
        self._folder = folder
        self._reader = FileSystemReader(folder)
        self._metadata = self._reader.read_metadata()

    def _tensor(self, key: str) -> TensorStorageMetadata:
        found = self._metadata.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise ConvertError(f"{self._folder} has no tensor {key}, which the model needs")
        return found

    def has(self, key: str) -> bool:
        """Whether it holds a tensor of that key."""
        return isinstance(self._metadata.state_dict_metadata.get(key), TensorStorageMetadata)

    def size(self, key: str) -> tuple[int, ...]:
        """Of a whole tensor."""
        return tuple(self._tensor(key).size)

    def dtype(self, key: str) -> torch.dtype:
        """Of a tensor."""
        return self._tensor(key).properties.dtype

    def part(self, piece: Piece) -> Tensor:
        """The part of a weight, in the weight's own dimensions."""
        of = self._tensor(piece.key)
        whole = tuple(of.size)
        if len(whole) != len(piece.size) or any(
            start + length > size
            for start, length, size in zip(piece.offset, piece.size, whole, strict=True)
        ):
            raise ConvertError(
                f"{self._folder}: {piece.key} is {list(whole)}, which does not hold the part at "
                f"{list(piece.offset)} of {list(piece.size)}: the checkpoint is of another model"
            )
        out = torch.empty(piece.size, dtype=of.properties.dtype)
        box = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.size))
        items = create_read_items_for_chunk_list(piece.key, of, [box])
        if sum(item.lengths.numel() for item in items) != out.numel():
            raise ConvertError(f"{self._folder}: parts of {piece.key} are missing")
        planner = _Reads(out)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._reader.read_data(LoadPlan(items), planner).wait()
        return out.reshape(piece.shape)


class _Reads(LoadPlanner):
    """Hands out places in one tensor."""

    def __init__(self, out: Tensor) -> None:
        self._out = out

    def set_up_planner(self, *unused: Any, **also_unused: Any) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        place = self._out
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            place = place.narrow(dim, start, length)
        return place

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...


def with_dtypes(state: dict[str, Any], dtype_of: Callable[[str], torch.dtype]) -> dict[str, Any]:
    """The sharded state dict with each weight in the type it is to be written in.

    Raises:
        ConvertError: two types in what a checkpoint holds as one tensor.
    """
    seen: dict[str, tuple[torch.dtype, str]] = {}
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, ShardedObject):
            found[name] = value
            continue
        dtype = dtype_of(name)
        first, of = seen.setdefault(value.key, (dtype, name))
        if first != dtype:
            raise ConvertError(
                f"{name} is {dtype} and {of} {first}: a checkpoint holds both in one tensor, "
                f"{value.key}; save the folder in one type"
            )
        changes = {"data": value.data.to(dtype)}
        if isinstance(value, ShardedTensor):
            changes["dtype"] = dtype
        found[name] = dataclasses.replace(value, **changes)
    return found
