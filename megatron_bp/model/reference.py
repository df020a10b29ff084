"""Megatron's own model of a checkpoint, to compare with: built from stock parts, loaded by itself.

It shares nothing with the model that trains: not the weights, not the attention, not the rotary.
Every rank of a slot runs whole sequences, so its context-parallel group is the rank alone.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig


def reference_model(config: GPTModelConfig, folder: Path) -> list[GPTModel]:
    """This rank's stages of the checkpoint's model, in evaluation mode. Collective.

    Args:
        config: of Megatron's own model, with a context_parallel_size of 1.
        folder: the checkpoint, an iter_ folder.

    Raises:
        ValueError: the checkpoint lacks a weight that the model has.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.cp = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups.tp_cp = groups.tp
    config.transformer.perform_initialization = False  # all is loaded, and nothing is drawn
    chunks = unwrap_model(
        GPTModelBuilder(config).build_distributed_models(
            groups, wrap_with_ddp=False, data_parallel_random_init=False
        )
    )
    if config.position_embedding_type == "yarn":
        for chunk in chunks:  # GPTModel gives rope its group, and lets YaRN take the global one
            chunk.rotary_pos_emb.cp_group = groups.cp
    metadata = dist_checkpointing.load_content_metadata(str(folder)) or {}
    metadata["dp_cp_group"] = groups.dp_cp
    names = ["model"] if len(chunks) == 1 else [f"model{k}" for k in range(len(chunks))]
    state = {
        name: chunk.sharded_state_dict(metadata=metadata)
        for name, chunk in zip(names, chunks, strict=True)
    }
    loaded = dist_checkpointing.load(state, str(folder))
    for name, chunk in zip(names, chunks, strict=True):
        keys = chunk.load_state_dict(loaded[name], strict=False)
        missing = [key for key in keys.missing_keys if not key.endswith("_extra_state")]
        if missing:
            raise ValueError(f"{folder} has no {', '.join(missing)}, which the model needs")
        chunk.eval()
    return list(chunks)


def forget(chunks: list[GPTModel]) -> None:
    """Free the reference's memory; the caller drops its own list."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.data.new_empty(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
