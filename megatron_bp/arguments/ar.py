"""What has no meaning in autoregressive mode (--objective ar), and is refused there."""

import argparse
from argparse import Namespace
from collections.abc import Collection

from megatron_bp.arguments.objective_flags import add_objective_flags
from megatron_bp.arguments.refused import no

# Beside all flags of an objective's parts.
OF_CORRUPTED_ROWS = (
    "--attention-kernel",
    "--clean-kv-exchange",
    "--cp-comm-type",
    "--eval-draws",
    "--max-imbalance",
    "--answer-fill",
)
OF_OUR_ATTENTION = ("--query-scale-beta", "--query-scale-length")


def refuse_ar(args: Namespace, given: Collection[str]) -> None:
    """Check what Megatron's own model on packed documents cannot do.

    Args:
        args: as for `rules.refuse`.
        given: flags that were given.

    Raises:
        RefusedError: with the reason.
    """
    for name in ("block_parallel_size", "context_parallel_size"):
        if getattr(args, name) != 1:
            no(
                f"--{name.replace('_', '-')} {getattr(args, name)} with --objective ar: the model "
                f"is Megatron's own, which cannot shard packed documents by this project's plan; "
                f"set 1 and use data, tensor or pipeline parallelism"
            )
    parser = argparse.ArgumentParser()
    add_objective_flags(parser)
    of_objective = {option for action in parser._actions for option in action.option_strings}
    meaningless = (of_objective | set(OF_CORRUPTED_ROWS)) - {"--objective"}
    found = sorted(meaningless & set(given))
    if found:
        no(
            f"{', '.join(found)} with --objective ar: there are no corrupted rows, so there is "
            f"nothing to set; leave out (in a config that includes another: `name: null`)"
        )
    scaled = sorted(set(OF_OUR_ATTENTION) & set(given))
    if scaled:
        no(
            f"{', '.join(scaled)} with --objective ar: the model is Megatron's own, which does not "
            f"scale queries by position; leave out"
        )
    if args.transformer_impl != "local":
        return
    if args.window_size is not None:
        no(
            f"--window-size {args.window_size} with --objective ar: the attention of Megatron's "
            f"local layers puts a window in the place of the documents' mask; leave it out, or use "
            f"--transformer-impl transformer_engine"
        )
    if args.sequence_parallel:
        no(
            "--sequence-parallel with --objective ar: the norms of Megatron's local layers do not "
            "know it; leave it out, or use --transformer-impl transformer_engine"
        )
