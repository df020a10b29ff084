"""What of a mixture of experts can be trained exactly, and why the rest is refused.

Exactly means: the same loss, gradients and router statistics whatever ranks the rows and the
experts are on. Why: docs/design/0011-moe-auxiliary.md.
"""

from argparse import Namespace
from typing import Any

_LAYOUT = "its result depends on how rows are dealt to ranks; leave it out"
_ENGINE = "needs Transformer Engine, which is not implemented yet; leave it out"
_OVERLAP = "overlaps by CUDA streams, which has not been tried with uneven rows; leave it out"
_STREAMS = "needs a schedule of Megatron's that fixes row counts, and they vary; leave it out"

#: Flags that must stay as they are by default, and the reason.
_REFUSED: dict[str, str] = {
    "moe_expert_capacity_factor": f"drops rows by this rank's rows alone, so {_LAYOUT}",
    "moe_pad_expert_input_to_capacity": f"fixes what an expert gets by local rows, so {_LAYOUT}",
    "moe_expert_rank_capacity_factor": f"drops rows by this rank's rows alone, so {_LAYOUT}",
    "moe_input_jitter_eps": f"the ranks of a sequence share one seed, so {_LAYOUT}",
    "moe_router_force_load_balancing": f"routes at random, differently on each rank, so {_LAYOUT}",
    "moe_router_force_biased": "routes by chance, to measure speed; leave it out",
    "moe_grouped_gemm": f"the local spec computes expert after expert; this {_ENGINE}",
    "moe_single_grouped_weight": _ENGINE,
    "moe_single_grouped_bias": _ENGINE,
    "use_grouped_gemm_for_shared_expert": _ENGINE,
    "moe_permute_fusion": _ENGINE,
    "moe_router_fusion": _ENGINE,
    "moe_router_padding_for_quantization": _ENGINE,
    "moe_router_padding_for_fp8": _ENGINE,
    "moe_latent_size": _ENGINE,
    "moe_mlp_glu_interleave_size": _ENGINE,
    "moe_shared_expert_glu_interleave_size": _ENGINE,
    "moe_enable_deepep": "DeepEP needs GPUs and its own library and has not been tried; leave out",
    "moe_shared_expert_overlap": _OVERLAP,
    "overlap_dispatch_backward_with_experts_wgrad": _OVERLAP,
    "moe_paged_stash": _OVERLAP,
    "overlap_moe_expert_parallel_comm": _STREAMS,
    "moe_use_upcycling": "making experts of a dense checkpoint is not implemented; leave it out",
    "moe_enable_routing_replay": "replaying a routing is not implemented; leave it out",
}
_BALANCE = {
    "global_aux_loss": "takes its statistics from the micro-batches computed so far, so the loss "
    "depends on their order and on the number of ranks",
    "sinkhorn": "normalizes over this rank's rows, so the routing depends on the layout",
    "quantile_balancing": "needs equally many rows on every rank, and they differ here",
}
_NEEDS_EXPERTS = (
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_enable_expert_bias",
)


def experts_refusal(args: Namespace) -> str | None:
    """Why these flags cannot be trained with, as a message; None if they can.

    Args:
        args: flags as parsed, before Megatron's validation.
    """
    if not args.num_experts:
        return _without_experts(args)
    for name, reason in _REFUSED.items():
        value = getattr(args, name, None)
        if value not in (None, False):
            return f"{_flag(name, value)}: {reason}"
    return _sizes(args) or _dispatcher(args) or _balance(args) or _router(args)


def _without_experts(args: Namespace) -> str | None:
    if args.expert_model_parallel_size > 1:
        return (
            f"--expert-model-parallel-size {args.expert_model_parallel_size} without "
            f"--num-experts: there is nothing to share; set 1, or give experts"
        )
    for name in _NEEDS_EXPERTS:
        value = getattr(args, name)
        if value not in (None, False, 0.0, [0.0]):
            return f"{_flag(name, value)} without --num-experts has no effect; leave it out"
    return None


def _sizes(args: Namespace) -> str | None:
    experts, parts, k = args.num_experts, args.expert_model_parallel_size, args.moe_router_topk
    if experts < 0:
        return f"--num-experts {experts}: must be at least 1"
    if not 1 <= k <= experts:
        return f"--moe-router-topk {k}: must be at least 1 and at most --num-experts {experts}"
    if parts < 1 or experts % parts:
        return (
            f"--expert-model-parallel-size {parts}: every rank holds as many experts; it must "
            f"divide --num-experts {experts}"
        )
    if args.expert_tensor_parallel_size not in (None, 1):
        return (
            f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size}: ranks that share "
            f"one expert gather unequal rows, which has only been tried where they are equal; set 1"
        )
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        return (
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} with --num-experts: "
            f"every rank of it would route all rows again; add --sequence-parallel"
        )
    if getattr(args, "mlp_chunks_for_training", 1) > 1:
        return "--mlp-chunks-for-training cuts rows apart before the router; leave it out"
    return None


def _dispatcher(args: Namespace) -> str | None:
    if args.moe_token_dispatcher_type == "flex":
        return (
            "--moe-token-dispatcher-type flex: DeepEP, HybridEP and NCCL EP need GPUs and have not "
            "been tried; use alltoall"
        )
    if args.moe_token_dispatcher_type == "allgather" and (
        args.expert_model_parallel_size > 1 or args.pipeline_model_parallel_size > 1
    ):
        return (
            "--moe-token-dispatcher-type allgather: gathers equally many rows of every rank that "
            "shares the experts, and of every pipeline stage, but rows differ from rank to rank "
            "and from sample to sample; use alltoall"
        )
    return None


def _balance(args: Namespace) -> str | None:
    types, coefficients = _list(args.moe_router_load_balancing_type), _list(args.moe_aux_loss_coeff)
    for name in types:
        if name in _BALANCE:
            return (
                f"--moe-router-load-balancing-type {name}: {_BALANCE[name]}; use aux_loss, "
                f"seq_aux_loss or --moe-router-enable-expert-bias"
            )
    if len(types) != len(coefficients):
        return (
            f"--moe-aux-loss-coeff: {len(coefficients)} given for {len(types)} of "
            f"--moe-router-load-balancing-type {' '.join(types)}; give one for each"
        )
    for name, coefficient in zip(types, coefficients, strict=True):
        if not coefficient >= 0:
            return f"--moe-aux-loss-coeff {coefficient}: must be at least 0"
        if name == "none" and coefficient > 0:
            return (
                f"--moe-aux-loss-coeff {coefficient} with --moe-router-load-balancing-type none "
                f"has no effect; set 0, or use aux_loss"
            )
    if args.moe_z_loss_coeff is not None and not args.moe_z_loss_coeff >= 0:
        return f"--moe-z-loss-coeff {args.moe_z_loss_coeff}: must be at least 0"
    return None


def _router(args: Namespace) -> str | None:
    softmax = args.moe_router_score_function == "softmax"
    if args.moe_router_enable_expert_bias and softmax:
        return (
            "--moe-router-enable-expert-bias with --moe-router-score-function softmax: scores that "
            "add up to 1 are not compared with a bias; use sigmoid or sqrtsoftplus"
        )
    if args.moe_router_topk == 1 and softmax and not args.moe_router_pre_softmax:
        return (
            "--moe-router-topk 1 with --moe-router-score-function softmax: the softmax over one "
            "chosen expert is always 1 and teaches nothing; add --moe-router-pre-softmax"
        )
    groups, of_groups = args.moe_router_num_groups, args.moe_router_group_topk
    if (groups is None) != (of_groups is None):
        return "--moe-router-num-groups and --moe-router-group-topk go together: give both or none"
    if groups is not None and (
        groups < 1 or args.num_experts % groups or not 1 <= of_groups <= groups
    ):
        return (
            f"--moe-router-num-groups {groups} --moe-router-group-topk {of_groups}: the groups "
            f"must divide --num-experts {args.num_experts}, and hold those that are chosen"
        )
    topk = args.moe_router_topk
    if groups is not None and (topk % of_groups or topk // of_groups > args.num_experts // groups):
        return (
            f"--moe-router-topk {topk} from --moe-router-group-topk {of_groups} groups: each gives "
            f"equally many, and has {args.num_experts // groups} experts; choose fewer experts, or "
            f"other groups"
        )
    return None


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _flag(name: str, value: Any) -> str:
    shown = "" if value is True else f" {' '.join(str(v) for v in _list(value))}"
    return f"--{name.replace('_', '-')}{shown}"
