"""Two passes of one micro-batch: a first without gradient, whose prediction the second is given.

A first pass runs where any document's coin is on, which all ranks of a slot know from the sample.
Ranks that share experts take part in each other's passes and may read other samples, so among them
it always runs. It computes the same rows over the same layout; its exchange of K/V counts.
"""

from collections.abc import Callable

import torch
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from megatron_bp.batch.self_conditioning import LocalCondition, local_condition
from megatron_bp.batch.shard import LocalBatch
from megatron_bp.diffusion.objective import Objective
from megatron_bp.diffusion.self_conditioning import conditioned_documents, source_places
from megatron_bp.model.soft_embedding import SoftEmbedding
from megatron_bp.training.reader import MicroBatch


def condition_of(
    micro: MicroBatch, objective: Objective, batch: LocalBatch, shard: int
) -> LocalCondition:
    """Which of this rank's rows are conditioned.

    Args:
        micro: the micro-batch.
        objective: tells how likely a coin is on, and which row predicts a token.
        batch: this rank's rows.
        shard: this rank's place in its clean shard group.
    """
    documents = conditioned_documents(micro.sample, objective)
    source = source_places(micro.plan, documents, objective.alignment)
    return local_condition(source, batch.shards[shard])


def conditioned_input(
    model: torch.nn.Module,
    forward: Callable[..., Tensor],
    ids: Tensor,
    positions: Tensor,
    condition: LocalCondition,
    objective: Objective,
) -> Tensor:
    """The decoder's input [S, 1, H], or [S / TP, 1, H] under sequence parallelism.

    Args:
        model: one stage with everything in it.
        forward: the model on this rank's rows, but for its `output_processor`.
        ids: int64[1, S], tokens of the rows.
        positions: int64[1, S], their positions.
        condition: which rows are conditioned.
        objective: tells which ids can be predicted.
    """
    groups, config = get_attr_wrapped_model(model, "pg_collection"), get_model_config(model)
    embedding = get_attr_wrapped_model(model, "embedding")
    table = embedding.word_embeddings.weight
    soft = table.new_zeros((0, table.shape[1]))
    if condition.needed or config.expert_model_parallel_size > 1:
        processor = SoftEmbedding(
            condition.sources.to(ids.device, non_blocking=True),
            table,
            objective.vocabulary,
            objective.mask_token_id if objective.exclude_mask_logit else None,
            groups.tp,
            config.sequence_parallel,
        )
        with torch.no_grad():
            soft = forward(output_processor=processor)
    embedded = embedding(input_ids=ids, position_ids=positions)
    added: Tensor = get_attr_wrapped_model(model, "self_conditioning")(
        embedded, condition.rows, soft
    )
    return added
