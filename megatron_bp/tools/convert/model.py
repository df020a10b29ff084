"""Megatron's own model of a Hugging Face config: its arguments, its shapes, where each weight lies.

Names, stacking of layers and of experts in a checkpoint are Megatron's, asked of a model on the
meta device; nothing of its format is written down here.
"""

import contextlib
import io
import os
import sys
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from megatron_bp import cpu
from megatron_bp.arguments.config_file import to_flags
from megatron_bp.arguments.flags import add_block_diffusion_flags, full_parser
from megatron_bp.arguments.parse import parsed
from megatron_bp.tools.convert.families import HuggingFace
from megatron_bp.tools.convert.refused import ConvertError

LENGTH = 64  # of rows; nothing here depends on it


@dataclass(frozen=True)
class Piece:
    """A part of a weight as a checkpoint has it.

    Attributes:
        key: of the checkpoint's tensor.
        offset, size: the part of that tensor, in its dimensions.
        start: where the part begins in the weight itself.
        shape: of the part in the weight itself.
    """

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Megatron's parallel state of one process, without a network."""
    if cpu.needed():
        cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with tempfile.TemporaryDirectory() as folder:
        started = not dist.is_initialized()
        if started:
            store = FileStore(str(Path(folder) / "store"), 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            if started:
                dist.destroy_process_group()


def megatron_arguments(model: HuggingFace, rows: int, vocabulary: int) -> Namespace:
    """Megatron's validated arguments of the model, for one process.

    Args:
        model: to be built.
        rows: of the embedding's table.
        vocabulary: true ids.
    """
    if cpu.needed():
        cpu.install()
    from megatron.training import arguments as megatron

    parser = full_parser()
    values = {
        **model.flags,
        "padded_vocab_size": rows,
        "vocab_size": vocabulary,
        "tokenizer_type": "NullTokenizer",
        "seq_length": LENGTH,
        "ckpt_format": "torch_dist",
    }
    values["max_position_embeddings"] = max(LENGTH, values["max_position_embeddings"])
    flags, _, _ = parsed(to_flags(values, parser, "config.json"))
    before, world = sys.argv, os.environ.get("WORLD_SIZE")
    sys.argv = [before[0], *flags]
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.environ["WORLD_SIZE"] = "1"
            args = megatron.parse_args(extra_args_provider=add_block_diffusion_flags)
            megatron.validate_args(args, {})
    except AssertionError as error:
        raise ConvertError(f"Megatron refuses the model of config.json: {error}") from error
    finally:
        sys.argv = before
        if world is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = world
    args.padded_vocab_size = rows
    args.bdlm_vocabulary = vocabulary
    args.bdlm_clean_shard_size = 1
    found: Namespace = args
    return found


def build(args: Namespace, device: str) -> Any:
    """The bare model that this project trains, in evaluation mode, its weights unset. Collective.

    Args:
        args: of `megatron_arguments`.
        device: "meta" for shapes alone.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import unwrap_model

    from megatron_bp.arguments.build import model_config

    config = model_config(args)
    config.transformer.perform_initialization = False
    config.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with torch.device(device), contextlib.redirect_stdout(io.StringIO()):
        chunks: list[Any] = unwrap_model(
            config.get_builder_cls()(config).build_distributed_models(
                groups,
                None,
                wrap_with_ddp=False,
                data_parallel_random_init=False,
                mixed_precision_wrapper=None,
            )
        )
    return chunks[0].eval()


def content() -> dict[str, Any]:
    """How a checkpoint that `megatron_bp` can load says that it is laid out."""
    return {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def sharded(model: Any) -> dict[str, Any]:
    """Megatron's sharded state dict of the model, by name."""
    groups = model.pg_collection
    state: dict[str, Any] = model.sharded_state_dict(
        metadata=content() | {"dp_cp_group": groups.dp_cp}
    )
    return state


def sharded_weights(model: Any) -> dict[str, Any]:
    """The same without what is no tensor: places for a layer's extra state, empty here."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    state = sharded(model)
    return {name: value for name, value in state.items() if not isinstance(value, ShardedObject)}


def pieces(model: Any) -> dict[str, list[Piece]]:
    """Weight's name -> where its parts lie in a checkpoint."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories

    state = {name: {"of": value} for name, value in sharded_weights(model).items()}
    apply_factories(state)
    return {
        name: [piece_of(tensor) for tensor in nested_values(value)] for name, value in state.items()
    }


def piece_of(tensor: Any) -> Piece:
    """Of one of Megatron's ShardedTensors, in a model of one process."""
    stacked = tensor.prepend_axis_num
    return Piece(
        key=tensor.key,
        offset=tuple(tensor.global_offset),
        size=(1,) * stacked + tuple(tensor.local_shape),
        start=tuple(tensor.global_offset[stacked:]),
        shape=tuple(tensor.local_shape),
    )


def weight_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Weight's name -> its shape."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
