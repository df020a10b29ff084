"""A topology as text, "tp=2,bp=2,pp=2", to degrees and switches. Knows no Megatron."""

import difflib
from dataclasses import MISSING, dataclass, fields
from typing import Any

RECOMPUTE = ("full", "selective", "none")


class TopologyError(ValueError):
    """A topology that is no layout: the text, the rule and the way out."""


@dataclass(frozen=True)
class Topology:
    """A layout of ranks; what is not named is 1, off, or the config's own (None).

    Attributes:
        tp, pp, dp: tensor, pipeline and data parallel degrees.
        vpp: stages on each pipeline rank; above 1 they are interleaved.
        ep, etp: expert and expert tensor parallel degrees; they fold into the others' ranks.
        bp: ranks that share the target blocks of a sequence.
        cp: ranks that shard its clean rows; None means bp.
        sp: sequence parallel.
        dist_opt: the distributed optimizer.
        accum: micro-batches that are accumulated at least: the global batch is a multiple of
            dp x accum.
        recompute: one of RECOMPUTE.
        bf16: 16-bit weights and activations.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    bp: int = 1
    cp: int | None = None
    sp: bool = False
    dist_opt: bool = False
    accum: int = 1
    recompute: str | None = None
    bf16: bool | None = None

    @property
    def slot(self) -> int:
        """Ranks that work on one sequence, tensor and pipeline parallel peers aside."""
        return max(self.bp, self.bp if self.cp is None else self.cp)

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.dp * self.slot

    @property
    def batch_divisor(self) -> int:
        """What the global batch has to be a multiple of."""
        return self.dp * self.accum * (self.pp if self.vpp > 1 else 1)

    @property
    def name(self) -> str:
        """What was given, in one order; "dp=1" where nothing was."""
        named = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(_told(f.name, getattr(self, f.name)) for f in named) or "dp=1"


def parse_topology(text: str) -> Topology:
    """The Topology of "tp=2,sp,bp=2".

    Raises:
        TopologyError: an unknown name (with the nearest that is known), a value of the wrong kind,
            a name given twice, or degrees that do not go together.
    """
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in _KINDS:
            swapped = [known for known in _KINDS if sorted(known) == sorted(name)]
            near = swapped or difflib.get_close_matches(name, _KINDS, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else f"; one of {', '.join(_KINDS)}"
            raise TopologyError(f"topology {text!r}: unknown name {name!r}{hint}")
        if name in given:
            raise TopologyError(f"topology {text!r}: {name} is given twice; keep one")
        given[name] = _value(text, name, value if equals else None)
    topology = Topology(**given)
    if topology.sp and topology.tp == 1:
        raise TopologyError(
            f"topology {text!r}: sp shares rows among tensor parallel ranks; give tp=2 or more, or "
            f"leave sp out"
        )
    if topology.vpp > 1 and topology.pp == 1:
        raise TopologyError(
            f"topology {text!r}: vpp interleaves stages of pipeline ranks; give pp=2 or more, or "
            f"leave vpp out"
        )
    return topology


def _value(text: str, name: str, value: str | None) -> Any:
    kind = _KINDS[name]
    if kind is str:
        if value in RECOMPUTE:
            return value
        raise TopologyError(f"topology {text!r}: {name} is one of {', '.join(RECOMPUTE)}")
    if kind is bool:
        if value in (None, "0", "1"):
            return value != "0"
        raise TopologyError(f"topology {text!r}: {name} is on ({name}, {name}=1) or off ({name}=0)")
    if value is None or not value.isascii() or not value.isdigit() or int(value) < 1:
        raise TopologyError(
            f"topology {text!r}: {name} takes a whole number from 1 on, as in {name}=2"
        )
    return int(value)


def _told(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"{name}=0"
    return f"{name}={value}"


def _kind(annotation: Any) -> type:
    return next(kind for kind in (bool, int, str) if kind.__name__ in str(annotation))


_KINDS: dict[str, type] = {f.name: _kind(f.type) for f in fields(Topology) if f.default != MISSING}
