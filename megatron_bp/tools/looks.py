"""What the entry does instead of a run, where the command line asks for a look at one."""

import os
import sys

from megatron_bp.tools.dry_run.command import dry_run
from megatron_bp.tools.preflight.command import preflight

LOOKS = {"--dry-run": dry_run, "--preflight": preflight}


def looked_at(argv: list[str]) -> bool:
    """Whether there was a look; it has been taken then.

    Raises:
        SystemExit: two are asked for.
    """
    flags = [flag for flag in LOOKS if flag in argv]
    if len(flags) > 1:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(
                f"pretrain_bdlm.py: error: {' and '.join(flags)}: are two looks at a run, and one "
                f"is taken at a time; leave one out",
                file=sys.stderr,
                flush=True,
            )
        raise SystemExit(2)
    for flag in flags:
        LOOKS[flag](argv)
    return bool(flags)
