"""Where self-conditioning works, and a run that starts from a checkpoint without its module.

Every refusal names the value, the rule and the way out.
"""

from argparse import Namespace

from megatron_bp.arguments.contract import ContractError, newest_checkpoint, saved_arguments
from megatron_bp.parallel.mode import parallel_mode


def conditioning_refusal(args: Namespace) -> str | None:
    """Why self-conditioning cannot be had with these flags; None if it can, or is not asked for."""
    share, width = args.self_conditioning, args.self_conditioning_width
    if not 0 <= share <= 1:
        return f"--self-conditioning {share}: is a probability, from 0 to 1"
    if width is not None and width < 1:
        return f"--self-conditioning-width {width}: must be at least 1; unset, it is --hidden-size"
    if share == 0:
        if width is None:
            return None
        return (
            f"--self-conditioning-width {width} with --self-conditioning 0: there is no module it "
            f"could be of; set a probability above 0, or leave it out"
        )
    stages = args.pipeline_model_parallel_size
    if stages > 1:
        return (
            f"--self-conditioning {share} with --pipeline-model-parallel-size {stages}: the first "
            f"stage would have to wait for what the last one predicts; use tensor or block "
            f"parallelism, or --self-conditioning 0"
        )
    mode = parallel_mode(args.block_parallel_size, args.context_parallel_size)
    if mode == "CP" and args.alignment == "next":
        return (
            f"--self-conditioning {share} with --alignment next in mode CP (--block-parallel-size "
            f"1, --context-parallel-size {args.context_parallel_size}): the row that predicts a "
            f"token may be on another rank; use --block-parallel-size {args.context_parallel_size}"
        )
    return None


def check_conditioning(args: Namespace) -> None:
    """Settle the module's width, and compare with the checkpoint that the run starts from.

    Sets `self_conditioning_width` (None without self-conditioning) and `bdlm_fresh_conditioning`:
    whether the checkpoint has no such module, so that it starts as zero.

    Raises:
        ContractError: the run goes on from a checkpoint without the module.
        ValueError: the checkpoint's module has another width.
    """
    args.bdlm_fresh_conditioning = False
    if args.self_conditioning == 0:
        args.self_conditioning_width = None
        return
    args.self_conditioning_width = args.self_conditioning_width or args.hidden_size
    step = getattr(args, "ckpt_step", None)
    folder = newest_checkpoint(args.load, step)
    new_run = args.finetune or folder is None
    folder = folder or newest_checkpoint(args.pretrained_checkpoint, step)
    if folder is None:
        return
    saved = saved_arguments(folder)
    if getattr(saved, "self_conditioning", 0.0) == 0:
        if not new_run:
            raise ContractError(
                f"{folder} was trained without self-conditioning, and --self-conditioning is "
                f"{args.self_conditioning}: leave it out to go on, or start a new run from its "
                f"weights with --finetune"
            )
        args.bdlm_fresh_conditioning = True
        if args.rank == 0:
            print(
                f"megatron_bp: {folder} has no self-conditioning: a new module of "
                f"{args.self_conditioning_width} hidden units is added to the model, and changes "
                f"nothing at first",
                flush=True,
            )
    elif saved.self_conditioning_width != args.self_conditioning_width and new_run:
        raise ValueError(
            f"--self-conditioning-width {args.self_conditioning_width}: the module in {folder} has "
            f"{saved.self_conditioning_width} hidden units; give that width"
        )
