"""What is to be trained, apart from how GPUs share it."""

from dataclasses import dataclass
from typing import Literal

from megatron_bp.planning.shape import Shape
from megatron_bp.sequence.plan import SequenceOptions


@dataclass(frozen=True)
class Precision:
    """Bytes a number takes.

    Attributes:
        model: weights and activations.
        gradient: of weights, as they are added up over micro-batches.
        optimizer: of the optimizer, per parameter: its own copy of the weight, and moments.
    """

    model: int = 2
    gradient: int = 4
    optimizer: int = 12

    def __post_init__(self) -> None:
        """Refuse what is no dtype."""
        if self.model not in (2, 4, 8):
            raise ValueError(f"precision: model: {self.model} bytes: must be 2, 4 or 8")


@dataclass(frozen=True)
class Task:
    """A model and a step.

    Attributes:
        shape: the model.
        sequence: how rows are planned; its degrees are the layout's to set.
        length: tokens of a packed row.
        global_batch: packed rows of a step.
        precision: see there.
        distributed_optimizer: the optimizer's numbers are shared by the replicas and the slot.
        scored: part of the corrupted rows that carry a loss, on average: one half where levels are
            uniform and only corrupted tokens are scored.
        passes: "one", as we train: clean and corrupted rows go through together. "two": clean rows
            first, then corrupted ones against their kept K/V, as the paper's DiffusionGemma scheme
            does; only traffic of K/V differs here: clean rows are exchanged in both.
        sharded_gradients: gradients are shared as the optimizer's numbers are, which Megatron's
            distributed optimizer does not do: its buffers are whole.
        fused: layers are Transformer Engine's and their activations fused, which keep less for the
            backward than Megatron's local ones (--transformer-impl local).
    """

    shape: Shape
    sequence: SequenceOptions
    length: int
    global_batch: int = 1
    precision: Precision = Precision()
    distributed_optimizer: bool = True
    scored: float = 0.5
    passes: Literal["one", "two"] = "one"
    sharded_gradients: bool = False
    fused: bool = True

    def __post_init__(self) -> None:
        """Refuse what is no part."""
        if not 0 <= self.scored <= 1:
            raise ValueError(f"scored: {self.scored}: is a part of the rows; give 0 to 1")
