"""Which parallel degrees go together, and with the model and the ranks that were started.

Every refusal names the value, the rule and the way out.
"""

from argparse import Namespace
from collections.abc import Collection

from megatron_bp.arguments.absent import Absent
from megatron_bp.arguments.attention import refuse_attention
from megatron_bp.arguments.experts import experts_refusal
from megatron_bp.arguments.refused import no
from megatron_bp.parallel.mode import parallel_mode


def refuse_degrees(args: Namespace, given: Collection[str], absent: Absent = no) -> None:
    """Check the degrees and what comes with them.

    Args:
        args: as for `rules.refuse`.
        given: flags that were given.
        absent: as for `rules.refuse`.

    Raises:
        RefusedError: with the reason.
    """
    try:
        parallel_mode(args.block_parallel_size, args.context_parallel_size)
    except ValueError as error:
        no(str(error))
    _tensor_parallel(args)
    _pipeline(args)
    refuse_attention(args, given, absent)
    if (message := experts_refusal(args)) is not None:
        no(message)
    if args.hybrid_context_parallel or args.hierarchical_context_parallel_sizes:
        no(
            "--hybrid-context-parallel and --hierarchical-context-parallel-sizes shard rows in a "
            "way that block parallelism replaces; use --block-parallel-size"
        )
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if getattr(args, name, False):
            no(f"--{name.replace('_', '-')}: not implemented yet; leave it out")
    if args.eval_micro_batch_size not in (None, 1):
        no(
            f"--eval-micro-batch-size {args.eval_micro_batch_size}: standard errors need the loss "
            f"of each row by itself; set 1 or leave it out"
        )


def _tensor_parallel(args: Namespace) -> None:
    tp = args.tensor_model_parallel_size
    if tp < 1:
        no(f"--tensor-model-parallel-size {tp}: must be at least 1")
    if args.sequence_parallel and tp == 1:
        no(
            "--sequence-parallel needs --tensor-model-parallel-size above 1: it shards rows over "
            "the tensor-parallel ranks; set that, or leave it out"
        )
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    counts = {
        "num_attention_heads": args.num_attention_heads,
        "num_query_groups": groups,
        "ffn_hidden_size": args.ffn_hidden_size,
    }
    for name, count in counts.items():
        if count is not None and count % tp:
            no(
                f"--{name.replace('_', '-')} {count} with --tensor-model-parallel-size {tp}: each "
                f"of its ranks takes an equal share of them; choose a degree that divides {count}"
            )
    for name in ("defer_embedding_wgrad_compute", "tp_comm_overlap", "use_tp_pp_dp_mapping"):
        if getattr(args, name):
            no(f"--{name.replace('_', '-')}: {_NOT_WITH_US[name]}; leave it out")


_NOT_WITH_US = {
    "defer_embedding_wgrad_compute": "the gradient of the output weight is formed with the loss",
    "tp_comm_overlap": "its buffers have one size, and row counts vary from sample to sample",
    "use_tp_pp_dp_mapping": "ranks of a sequence would no longer stand side by side",
}


def _pipeline(args: Namespace) -> None:
    pp, layers = args.pipeline_model_parallel_size, args.num_layers
    if pp < 1:
        no(f"--pipeline-model-parallel-size {pp}: must be at least 1")
    uneven = (
        args.decoder_first_pipeline_num_layers,
        args.decoder_last_pipeline_num_layers,
        args.pipeline_model_parallel_layout,
        args.account_for_embedding_in_pipeline_split or None,
        args.account_for_loss_in_pipeline_split or None,
    )
    by_hand = any(value is not None for value in uneven)
    if layers is not None and layers % pp and not by_hand:
        no(
            f"--num-layers {layers} with --pipeline-model-parallel-size {pp}: stages hold equally "
            f"many layers; choose a degree that divides {layers}, or say how many the first or "
            f"last holds with --decoder-first-pipeline-num-layers"
        )
    chunks = args.num_virtual_stages_per_pipeline_rank
    size = args.num_layers_per_virtual_pipeline_stage
    if chunks is None and size is None:
        return
    if pp == 1:
        no(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
            "cut a pipeline stage in chunks, and --pipeline-model-parallel-size is 1; leave out"
        )
    if layers is not None and not by_hand and (layers // pp) % (size or chunks or 1):
        no(
            f"--num-layers {layers} over {pp} stages makes {layers // pp} layers a stage, which "
            f"do not divide into chunks: --num-layers-per-virtual-pipeline-stage and "
            f"--num-virtual-stages-per-pipeline-rank must divide {layers // pp}"
        )


def refuse_world(args: Namespace, world_size: int) -> None:
    """Check the degrees against the number of ranks that were started.

    Raises:
        RefusedError: they do not multiply to it.
    """
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    slot = max(args.block_parallel_size, args.context_parallel_size)
    together = tp * pp * slot
    if world_size % together:
        no(
            f"{world_size} ranks were started, and {together} work on a sequence "
            f"(--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} x "
            f"{slot} of --block-parallel-size {args.block_parallel_size} and "
            f"--context-parallel-size {args.context_parallel_size}): start a multiple of "
            f"{together} (torchrun --nproc-per-node), or change a degree"
        )
    experts = args.expert_model_parallel_size
    if world_size % (experts * pp):
        no(
            f"--expert-model-parallel-size {experts} x --pipeline-model-parallel-size {pp}: "
            f"{world_size} ranks were started, and each stage's experts are shared by {experts} of "
            f"its ranks; make it a divisor of {world_size // pp}"
        )
    data = world_size // together
    batch = args.global_batch_size
    rows = data * args.micro_batch_size
    for name in ("global_batch_size", "eval_global_batch_size"):
        size = getattr(args, name)
        if size is not None and size % rows:
            no(
                f"--{name.replace('_', '-')} {size}: {world_size} ranks work on {rows} sequences "
                f"at a time (--micro-batch-size {args.micro_batch_size}); make it a multiple of "
                f"{rows}"
            )
    chunks = args.num_virtual_stages_per_pipeline_rank or args.num_layers_per_virtual_pipeline_stage
    if batch is not None and chunks is not None and (batch // rows) % pp:
        no(
            f"--global-batch-size {batch}: interleaved stages take micro-batches in groups of "
            f"{pp}, and each of {data} data-parallel ranks has {batch // rows}; make it a multiple "
            f"of {rows * pp}"
        )
