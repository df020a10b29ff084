"""The torch Dataset that turns Documents into packed Samples.

A Sample travels through Megatron's DataLoader as a dict of arrays (its default collate stacks them
into a batch of one); `sample_of` turns it back. Knows nothing of blocks, noise or ranks.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_bp.data.document import Document
from megatron_bp.sequence.packing import Sample, pack

TRAIN, VALIDATION, TEST = 0, 1, 2


class DocumentSource(Protocol):
    """What a data source offers: a length, and `{"documents": tuple[Document, ...]}` by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, idx: int | None) -> dict[str, Any]: ...


class SampleDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Packed rows of `length` tokens made of a source's documents."""

    def __init__(
        self, source: DocumentSource, length: int, split: int, period: int | None = None
    ) -> None:
        """Wrap a source.

        Args:
            source: where documents come from.
            length: tokens a row.
            split: TRAIN, VALIDATION or TEST.
            period: read sample i as sample i modulo `period`. Megatron goes on through the
                validation samples from one evaluation to the next; with the number of samples of
                one evaluation, every evaluation reads the same ones.

        Raises:
            ValueError: the source holds fewer samples than one period.
        """
        if len(source) == 0 or (period is not None and len(source) < period):
            raise ValueError(
                f"the {('training', 'validation', 'test')[split]} data holds {len(source)} samples "
                f"of {length} tokens, {period or 1} are needed; prepare more data, change --split, "
                f"or lower --eval-iters or --seq-length"
            )
        self.source = source
        self.length = length
        self.split = split
        self.period = period

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """Sample `idx` as a dict of arrays; None is Megatron's batch padding (an empty row)."""
        if idx is not None and self.period is not None:
            idx = idx % self.period
        documents: tuple[Document, ...] = self.source[idx]["documents"]
        sample = pack(documents, self.length, split=self.split)
        return {
            "tokens": sample.tokens,
            "document": sample.document,
            "position": sample.position,
            "supervised": sample.supervised,
            "document_keys": sample.document_keys,
            "split": sample.split,
            "epoch": sample.epoch,
        }


def sample_of(batch: dict[str, Tensor]) -> Sample:
    """The Sample in a collated batch of one (every tensor has a leading dimension of 1).

    Raises:
        NotImplementedError: a micro-batch of more than one row.
    """
    rows = batch["tokens"].shape[0]
    if rows != 1:
        raise NotImplementedError(
            f"micro-batch of {rows} rows: block diffusion packs one row a micro-batch; set "
            f"--micro-batch-size 1 and raise --seq-length or --global-batch-size instead"
        )
    arrays = {name: tensor[0].numpy() for name, tensor in batch.items()}
    return Sample(
        tokens=arrays["tokens"],
        document=arrays["document"],
        position=arrays["position"],
        supervised=arrays["supervised"],
        document_keys=arrays["document_keys"].astype(np.int64, copy=False),
        split=int(arrays["split"]),
        epoch=int(arrays["epoch"]),
    )
