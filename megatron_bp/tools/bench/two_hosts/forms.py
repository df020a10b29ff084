"""The forms that are laid side by side, as data: a mode and how K/V cross ranks in it."""

from collections.abc import Sequence
from dataclasses import dataclass

CSBP, CP = "csbp:all_gather", "cp:all_gather"
P2P, CLEAN = "cp:p2p", "cp:clean_all_gather"
NEEDED = "csbp:needed_rows"


@dataclass(frozen=True)
class Form:
    """One way to share a row among all ranks.

    Attributes:
        name: mode, and after a colon how K/V cross ranks.
        degrees: BP and CP as parts of the ranks: 0 is one rank, 1 is all, 2 is half of them.
        exchange: the flag that says how K/V cross ranks, and its value; None where none do.
    """

    name: str
    degrees: tuple[int, int]
    exchange: tuple[str, str] | None

    def flags(self, ranks: int) -> list[str]:
        """Flags of pretrain_bdlm.py."""
        bp, cp = (1 if part == 0 else ranks // part for part in self.degrees)
        flags = ["--block-parallel-size", str(bp), "--context-parallel-size", str(cp)]
        return flags + list(self.exchange or ())


FORMS: tuple[Form, ...] = (
    *(
        Form(f"csbp:{how}", (1, 1), ("--clean-kv-exchange", how))
        for how in ("all_gather", "needed_rows", "ring")
    ),
    *(
        Form(f"cp:{how}", (0, 1), ("--cp-comm-type", how))
        for how in ("all_gather", "p2p", "a2a", "clean_all_gather")
    ),
    Form("hybrid", (1, 2), ("--clean-kv-exchange", "all_gather")),
    Form("bp", (1, 0), None),
)


def chosen(names: Sequence[str] | None) -> list[Form]:
    """The forms of these names, all if None; the two that figures are against are among them.

    Raises:
        ValueError: there is none of a name.
    """
    known = {form.name: form for form in FORMS}
    wanted = list(known) if names is None else list(dict.fromkeys([CSBP, CP, *names]))
    for name in wanted:
        if name not in known:
            raise ValueError(f"--forms {name}: there is none; there are {', '.join(known)}")
    return [known[name] for name in wanted]
