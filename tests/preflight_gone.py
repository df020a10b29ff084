"""pretrain_bdlm.py whose rank 1 dies in a preflight, in the check of what can be saved."""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_bp import cpu

if cpu.needed():
    cpu.install()

import pretrain_bdlm
from megatron_bp.tools.preflight import machine

saving = machine.saving


def dies(args: Any) -> Any:
    """As the check, on other ranks."""
    if os.environ["RANK"] == "1":
        os._exit(7)
    return saving(args)


machine.saving = dies
pretrain_bdlm.main()
