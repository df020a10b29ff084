"""pretrain_bdlm.py with slow saves and steps, so that a test can hit the moment it wants.

SLOW_SAVES is seconds that each item of a checkpoint takes longer to write, and SLOW_ENDS those
before and after metadata.json, SLOW_STEPS those of a step. The process that writes an asynchronous
save imports this file too.
"""

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_bp import cpu

if __name__ == "__main__" and cpu.needed():
    cpu.install()

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async

SAVES, ENDS, STEPS = (float(os.environ.get(f"SLOW_{n}", "0")) for n in ("SAVES", "ENDS", "STEPS"))


def slower(function: Any, before: float, after: float = 0) -> Any:
    @functools.wraps(function)
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(before)
        result = function(*args, **kwargs)
        time.sleep(after)
        return result

    return slow


filesystem_async._write_item = slower(filesystem_async._write_item, SAVES)
serialization.save_config = slower(serialization.save_config, ENDS, ENDS)

if __name__ == "__main__":
    from megatron.training import training

    training.train_step = slower(training.train_step, STEPS)
    import pretrain_bdlm

    pretrain_bdlm.main()
