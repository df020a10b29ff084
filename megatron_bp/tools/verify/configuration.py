"""The user's config as the config of one layout. Values are flags' names to what a file would say.

A topology states all degrees: what the config says of them is left out, so that the same text means
the same layout whatever config it is used with. Precision and recomputation stay the config's own
unless the topology names them.
"""

from typing import Any

from megatron_bp.tools.verify.topology import Topology, TopologyError

Values = dict[str, Any]

# Degrees, and what only has a meaning beside them.
DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "block_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
)
WITHOUT_TP = ("tp_comm_overlap", "tp_comm_overlap_cfg", "tp_comm_overlap_rs_dgrad")
WITHOUT_PP = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "overlap_p2p_communication_warmup_flush",
)
WITHOUT_DIST_OPT = (
    "overlap_param_gather",
    "overlap_param_gather_with_optimizer_step",
    "num_distributed_optimizer_instances",
    "use_precision_aware_optimizer",
)
RECOMPUTATION = (
    "recompute_activations",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
# Of a whole run, and of no use or harm in a few steps. The warm-up too: it starts at a learning
# rate of 0, and then no update would show in a loss.
OF_A_RUN = (
    "save", "load", "save_interval", "save_retain_interval", "metrics_file", "finetune",
    "pretrained_checkpoint", "ckpt_step", "async_save", "use_persistent_ckpt_worker",
    "exit_interval", "exit_duration_in_mins", "tensorboard_dir", "wandb_project",
    "wandb_exp_name", "wandb_save_dir",
    "rampup_batch_size", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction",
    "train_samples", "lr_decay_samples", "eval_interval", "eval_draws", "full_validation",
    "eval_global_batch_size", "skip_train", "print_config", "profile", "exit_on_missing_checkpoint",
)  # fmt: skip


def of_a_few_steps(values: Values, steps: int) -> Values:
    """The config for `steps` training steps and nothing else, at the same learning rates."""
    kept = {name: value for name, value in values.items() if name not in OF_A_RUN}
    if "train_samples" in values:
        whole = int(values["train_samples"]) // int(values.get("global_batch_size") or 1)
    else:
        whole = int(values.get("train_iters") or steps)
    decay = int(values.get("lr_decay_iters") or whole)
    return kept | {
        "train_iters": steps,
        "lr_decay_iters": max(decay, steps, 1),
        "eval_iters": 0,
        "eval_interval": 10**9,
        "log_interval": 1,
    }


def of_layout(values: Values, topology: Topology) -> Values:
    """The config under a topology.

    Raises:
        TopologyError: the global batch cannot be cut for it.
    """
    batch = int(values.get("global_batch_size") or 0)
    divisor = topology.batch_divisor * int(values.get("micro_batch_size") or 1)
    if batch < 1 or batch % divisor:
        raise TopologyError(
            f"topology {topology.name}: all layouts read the same {batch} samples a step "
            f"(--global-batch-size), and this one needs a multiple of {divisor} "
            f"(dp x accum, x pp if interleaved); change either"
        )
    left_out = {*DEGREES}
    left_out |= {*WITHOUT_TP} if topology.tp == 1 else set()
    left_out |= {*WITHOUT_PP} if topology.pp == 1 else set()
    left_out |= set() if topology.dist_opt else {*WITHOUT_DIST_OPT}
    left_out |= set() if topology.recompute is None else {*RECOMPUTATION}
    left_out |= {"bf16"} if topology.bf16 is False else set()
    if topology.bp > 1 or topology.slot == 1:
        left_out.add("cp_comm_type")  # how mode CP exchanges
    kept = {name: value for name, value in values.items() if name not in left_out}
    return kept | _said(topology)


def _said(topology: Topology) -> Values:
    """What the topology says, where that is not the flag's default."""
    said: Values = {
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "expert_model_parallel_size": topology.ep,
        "block_parallel_size": topology.bp,
    }
    if topology.cp is not None:
        said["context_parallel_size"] = topology.cp
    if topology.etp is not None:
        said["expert_tensor_parallel_size"] = topology.etp
    if topology.vpp > 1:
        said["num_virtual_stages_per_pipeline_rank"] = topology.vpp
    if topology.recompute in ("full", "selective"):
        said["recompute_granularity"] = topology.recompute
    if topology.recompute == "full":
        said |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    switches = {
        "sequence_parallel": topology.sp,
        "use_distributed_optimizer": topology.dist_opt,
        "bf16": topology.bf16,
    }
    return said | {name: True for name, on in switches.items() if on}
