"""What the entry does instead of a run, where the command line asks for a look at one."""

from megatron_bp.tools.dry_run.command import dry_run
from megatron_bp.tools.preflight.command import preflight

LOOKS = {"--dry-run": dry_run, "--preflight": preflight}


def looked_at(argv: list[str]) -> bool:
    """Whether there was a look; it has been taken then."""
    for flag, look in LOOKS.items():
        if flag in argv:
            look(argv)
            return True
    return False
