"""The model: Megatron's GPTModel with three things swapped after it is built from its spec.

Core attention (attention/core_attention.py), rotary (explicit positions) and the output step (the
loss head, handed to forward as `output_processor`). A module for self-conditioning is added where
it is asked for. No fork, no subclass of GPTModel's forward.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig, default_layer_spec

from megatron_bp.attention.core_attention import BlockDiffusionAttention
from megatron_bp.model.frequencies import Llama3, Scaling, Yarn
from megatron_bp.model.moe import with_block_diffusion_router
from megatron_bp.model.norm import local_norm
from megatron_bp.model.rotary import PositionRotary
from megatron_bp.model.self_conditioning import SelfConditioning
from megatron_bp.parallel import state


@dataclass(kw_only=True)
class BDLMModelConfig(GPTModelConfig):
    """GPTModelConfig whose builder makes a block diffusion model.

    Attributes:
        block_parallel_size: BP degree.
        clean_shard_size: CP degree in the sense of this project: ranks that shard the clean rows.
            (`context_parallel_size` of the transformer config is Megatron's, the whole slot.)
        self_conditioning_width: hidden units of the self-conditioning module; 0 for no module.
        self_conditioning_fresh: the checkpoint that the run starts from has no such module.
    """

    builder: ClassVar[str] = "megatron_bp.model.config.BDLMModelBuilder"
    block_parallel_size: int = 1
    clean_shard_size: int = 1
    self_conditioning_width: int = 0
    self_conditioning_fresh: bool = False


def block_diffusion_layer_spec(
    config: GPTModelConfig, vp_stage: int | None = None
) -> ModuleSpec | TransformerBlockSubmodules:
    """Megatron's own layer spec for this config, with our core attention and MoE router.

    The local spec also gets norms that know sequence parallelism, the final one included.
    """
    spec = default_layer_spec(config, vp_stage)
    transformer = config.transformer
    local = transformer.transformer_impl == "local"
    for layer in getattr(spec, "layer_specs", [spec]):
        layer.submodules.mlp = with_block_diffusion_router(layer.submodules.mlp)
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = BlockDiffusionAttention
        if local:
            for owner, name in (
                (layer.submodules, "input_layernorm"),
                (layer.submodules, "pre_mlp_layernorm"),
                (attention, "q_layernorm"),
                (attention, "k_layernorm"),
            ):
                if getattr(owner, name) is not IdentityOp:
                    setattr(owner, name, local_norm)
    if not local:
        return spec
    if isinstance(spec, TransformerBlockSubmodules):
        spec.layer_norm = local_norm
        return spec
    layers = get_num_layers_to_build(transformer, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=local_norm)


def rotary_scaling(config: GPTModelConfig) -> Scaling | None:
    """How the config scales its rotary frequencies."""
    if config.position_embedding_type == "yarn":
        # Megatron's parser sets these beside the config's fields.
        transformer: Any = config.transformer
        return Yarn(
            factor=transformer.yarn_rotary_scaling_factor,
            length=transformer.yarn_original_max_position_embeddings,
            fast=transformer.yarn_beta_fast,
            slow=transformer.yarn_beta_slow,
            rounded=transformer.yarn_correction_range_round_to_int,
        )
    return Llama3(config.rope_scaling_factor) if config.rope_scaling else None


class BDLMModelBuilder(GPTModelBuilder):
    """Builds the model, and the block-parallel groups it needs."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> GPTModel:
        """One pipeline stage of the model."""
        config = self._model_config
        if config.transformer_layer_spec is None:
            config.transformer_layer_spec = block_diffusion_layer_spec
        model = super().build_model(pg_collection, pre_process, post_process, vp_stage)
        if config.position_embedding_type in ("rope", "yarn"):
            dim = int(config.transformer.kv_channels * config.rotary_percent)
            model.rotary_pos_emb = PositionRotary(
                model.rotary_pos_emb, dim, config.rotary_base, rotary_scaling(config)
            )
        if config.self_conditioning_width:
            model.self_conditioning = SelfConditioning(
                config.transformer,
                config.self_conditioning_width,
                pg_collection.tp,
                config.self_conditioning_fresh,
            )
        return model

    def build_distributed_models(
        self, pg_collection: ProcessGroupCollection, *args: Any, **kwargs: Any
    ) -> list[GPTModel]:
        """All stages of this rank, wrapped for training.

        Megatron calls this on every rank, once its parallel state stands and before any module
        exists: the place where block parallelism joins that state.
        """
        config = self._model_config
        # Stages pass on as many rows as the micro-batch has on this rank. Megatron's parser has no
        # flag for it.
        config.transformer.variable_seq_lengths = pg_collection.pp.size() > 1
        if not state.block_parallel_is_initialized():
            state.initialize_block_parallel(config.block_parallel_size, config.clean_shard_size)
        state.attach(pg_collection)
        models: list[GPTModel] = super().build_distributed_models(pg_collection, *args, **kwargs)
        return models
