"""What a layout's ranks are told and what they leave, as files of the layout's folder."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
GRADIENTS = "gradients"
FACTS = "facts.json"


@dataclass(frozen=True)
class Order:
    """What the ranks of a layout do beside training.

    Attributes:
        weights: folder of the weights that every layout starts from.
        make: write them there (the first reference does), instead of reading them.
        steps: training steps.
    """

    weights: str
    make: bool
    steps: int

    def write(self, folder: Path) -> None:
        """Put it into the layout's folder."""
        (folder / "order.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Order":
        """The order of a layout's folder."""
        return cls(**json.loads((folder / "order.json").read_text(encoding="utf-8")))
