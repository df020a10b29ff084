"""Which rate of the link makes a form spend a wanted fraction of its step on waiting for K/V.

A step of C seconds of other work, with A bytes of attention and D bytes of gradients over the link
at a rate of r, of which H seconds are hidden behind computation, takes

    C + D / r + (A / r - H)        and waits  X = A / r - H  for K/V.

X = f (C + D / r + X) is solved for r.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """Of one step.

    Attributes:
        compute: seconds of all but waiting for the link.
        attention, other: bytes over the link in the direction that has more.
    """

    compute: float
    attention: float
    other: float


def propose(load: Load, fraction: float, hidden: float = 0.0) -> float:
    """Bytes a second at which the exposed communication of attention is that fraction of a step.

    Raises:
        ValueError: no rate does that.
    """
    wanted = load.attention - fraction * (load.attention + load.other)
    needed = fraction * load.compute + (1 - fraction) * hidden
    if wanted <= 0 or needed <= 0:
        raise ValueError(
            f"no rate makes attention {fraction:.2f} of a step: {load.attention:,.0f} bytes of K/V "
            f"and {load.other:,.0f} others cross the link in a step of {load.compute:.2f} s; take "
            f"more micro-batches (--global-batch-size) or a smaller model"
        )
    return wanted / needed


def hidden(load: Load, rate: float, exposed: float) -> float:
    """Seconds of attention's transfer at `rate` that `exposed` seconds of waiting do not show."""
    return max(0.0, load.attention / rate - exposed)
