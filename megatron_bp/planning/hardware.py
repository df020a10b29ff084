"""GPUs by their data sheets, in hardware.yaml beside this file."""

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

FILE = Path(__file__).with_suffix(".yaml")
GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; all numbers in bytes, FLOPs and seconds.

    Attributes:
        name: short.
        memory: that a process can allocate.
        bf16: dense peak.
        float32: peak without tensor cores.
        hbm: bandwidth of its memory.
        inside: bandwidth to GPUs of its node, in each direction.
        network: to those of other nodes.
        node: GPUs of a node.
    """

    name: str
    memory: float
    bf16: float
    float32: float
    hbm: float
    inside: float
    network: float
    node: int

    def peak(self, number: int) -> float:
        """FLOPs a second on numbers of so many bytes."""
        return self.bf16 if number == 2 else self.float32

    def link(self, span: int, per_node: int) -> float:
        """Bandwidth that the slowest member of a group has.

        Args:
            span: consecutive ranks among which the group lies.
            per_node: ranks of a node; groups start at multiples of their span.
        """
        return self.inside if per_node % span == 0 else self.network


@cache
def gpus() -> dict[str, Gpu]:
    """All that are known, by name."""
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {
        name: Gpu(
            name=name,
            memory=sheet["memory"] * GIB,
            bf16=sheet["bf16"] * 1e12,
            float32=sheet["float32"] * 1e12,
            hbm=sheet["hbm"] * 1e9,
            inside=sheet["inside"] * 1e9,
            network=sheet["network"] * 1e9,
            node=sheet["node"],
        )
        for name, sheet in content.items()
    }


def gpu_named(name: str) -> Gpu:
    """The GPU of that name.

    Raises:
        ValueError: there is none.
    """
    known = gpus()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"--gpu {name}: not in hardware.yaml, which has {', '.join(known)}{hint}")
    return known[name]
