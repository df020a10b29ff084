"""Who called: whether attention is among the callers of what is running."""

import sys
from types import FrameType

ATTENTION = "megatron_bp.attention"


def called_by_attention() -> bool:
    """Whether a function of the attention package waits for this call, autograd between or not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == ATTENTION or module.startswith(f"{ATTENTION}."):
            return True
        frame = frame.f_back
    return False
