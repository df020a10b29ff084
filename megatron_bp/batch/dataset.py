"""The torch Dataset that turns Documents into packed Samples.

A Sample travels through Megatron's DataLoader as a dict of arrays (its default collate stacks those
of a micro-batch); `samples_of` turns them back. Knows nothing of blocks, noise or ranks.
"""

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.batch.balance import Balanced, CostedBlend
from megatron_bp.data.document import Document
from megatron_bp.data.pretrain import DocumentDataset, blend_key
from megatron_bp.data.sft import ChatConfig, ChatDataset
from megatron_bp.sequence.packing import Sample, join, pack

TRAIN, VALIDATION, TEST = 0, 1, 2
OF_DOCUMENTS = ("document_keys", "document_bytes", "document_epochs")


class DocumentSource(Protocol):
    """What a data source offers: a length, and `{"documents": tuple[Document, ...]}` by index.

    Where its keys do not tell passes over the data apart, an item has its pass as "epoch" too.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, idx: int | None) -> dict[str, Any]: ...


class SampleDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Packed rows of `length` tokens made of a source's documents."""

    def __init__(
        self,
        source: DocumentSource,
        length: int,
        split: int,
        size: int | None = None,
        draws: int = 1,
        rows: int = 1,
    ) -> None:
        """Wrap a source.

        Args:
            source: where documents come from.
            length: tokens a row.
            split: TRAIN, VALIDATION or TEST.
            size: samples to offer, default all. More than the source holds means reading it again
                from the start: Megatron goes on through the validation samples from one evaluation
                to the next, and so every evaluation reads the same ones.
            draws: noise draws of an evaluation: pass d over the source (modulo `draws`) is epoch d.
                A training pass is always an epoch of its own.
            rows: of a micro-batch. Where there are several, arrays of documents are as long as a
                row, so that they can be stacked.
        """
        self.source = source
        self.length = length
        self.split = split
        self.size = len(source) * draws if size is None else size
        self.draws = draws
        self.rows = rows

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """Sample `idx` as a dict of arrays; None is Megatron's batch padding (an empty row)."""
        epoch = 0
        if idx is not None:
            # A blend without weights holds each sample once: reading it again needs new noise.
            again = idx // len(self.source)
            epoch = again if self.split == TRAIN else again % self.draws
            idx = idx % len(self.source)
        item = self.source[idx]
        epoch += int(item.get("epoch", 0))
        documents: tuple[Document, ...] = item["documents"]
        if "dataset_id" in item:  # of a blend: keys are stable in their own data set only
            number = int(item["dataset_id"])
            documents = tuple(replace(d, key=blend_key(number, d.key)) for d in documents)
        sample = pack(documents, self.length, self.split, epoch)
        return {
            "tokens": sample.tokens,
            "document": sample.document,
            "position": sample.position,
            "supervised": sample.supervised,
            "documents": len(sample.document_keys),
            **{name: self._stackable(getattr(sample, name)) for name in OF_DOCUMENTS},
            "split": sample.split,
        }

    def _stackable(self, of_documents: NDArray[Any]) -> NDArray[Any]:
        if self.rows == 1:
            return of_documents
        return np.pad(of_documents, (0, self.length - len(of_documents)))


class FirstSamples:
    """The first `size` samples of a source; every evaluation reads exactly these."""

    def __init__(self, source: DocumentSource, size: int) -> None:
        self.source, self.size = source, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        if idx is not None and idx >= self.size:
            raise IndexError(idx)
        return self.source[idx]


def build_datasets(
    config: GPTDatasetConfig,
    sizes: list[int | None],
    evaluation: int | None,
    draws: int = 1,
    rows: int = 1,
) -> tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]:
    """Training, validation and test samples, built by Megatron: blends and caches are its own.

    Args:
        config: Megatron's data set config, for chats a `ChatConfig`; its sequence_length is the
            row length.
        sizes: samples that the run will read of each split; None for all of one epoch.
        evaluation: samples of one draw of one evaluation; None for all.
        draws: noise draws of each in one evaluation.
        rows: of a micro-batch.

    Raises:
        ValueError: a split holds no sample.
    """
    wanted: list[int | None] = [
        sizes[TRAIN],
        *(evaluation if sizes[s] else sizes[s] for s in (VALIDATION, TEST)),
    ]
    kind = ChatDataset if isinstance(config, ChatConfig) else DocumentDataset
    sources = BlendedMegatronDatasetBuilder(kind, wanted, lambda: True, config).build()
    out: list[SampleDataset | None] = []
    for split, (source, size) in enumerate(zip(sources, sizes, strict=True)):
        if size == 0 or (split == TEST and source is None):
            out.append(None)  # nothing wanted, or no test split: Megatron then leaves it out
            continue
        if source is None or len(source) == 0:
            name = ("training", "validation", "test")[split]
            raise ValueError(
                f"the {name} split holds no row of {config.sequence_length} tokens (--split "
                f"{config.split}); prepare more data, change --split, lower --seq-length, or set "
                f"--eval-iters 0"
            )
        if split != TRAIN and evaluation is not None and len(source) < evaluation:
            raise ValueError(
                f"the validation or test split holds {len(source)} rows of "
                f"{config.sequence_length} tokens, and an evaluation reads {evaluation}: prepare "
                f"more data, change --split, or lower --eval-iters or --eval-global-batch-size"
            )
        if split != TRAIN and evaluation is not None:
            _check_read_once(source, evaluation, config.sequence_length)
        if split != TRAIN and evaluation is not None:
            source = FirstSamples(source, evaluation)
        if split == TRAIN and isinstance(config, ChatConfig):
            costed = CostedBlend(source) if hasattr(source, "datasets") else source
            source = Balanced(costed, config.global_batch)
        passes = 1 if split == TRAIN else draws
        out.append(SampleDataset(source, config.sequence_length, split, size, passes, rows))
    return out[TRAIN], out[VALIDATION], out[TEST]


def _check_read_once(source: Any, evaluation: int, length: int) -> None:
    """Refuse an evaluation that would read a text twice: its standard error would be too small.

    Args:
        source: a DocumentDataset or ChatDataset, or Megatron's blend of several.
        evaluation: rows that it reads.
        length: tokens a row.
    """
    parts = getattr(source, "datasets", [source])
    if hasattr(source, "dataset_index") and source.dataset_index is None:
        source[0]  # a blend may read its index late
    number = getattr(source, "dataset_index", np.zeros(evaluation, dtype=np.int64))
    wanted = np.bincount(number[:evaluation], minlength=len(parts))
    for part, rows in zip(parts, wanted.tolist(), strict=True):
        chats = isinstance(part, ChatDataset)
        whole = part.rows_per_epoch if chats else part._get_num_tokens_per_epoch() // length
        if rows > whole:
            name = part.dataset.path_prefix
            raise ValueError(
                f"an evaluation reads {rows} rows of {length} tokens from {name}, whose split "
                f"holds {whole}: it would read text again, and its standard error would be too "
                f"small; lower --eval-iters or --eval-global-batch-size (use --eval-draws for less "
                f"noise), prepare more data or change --split"
            )


def samples_of(batch: dict[str, Tensor]) -> list[Sample]:
    """The Samples in a collated micro-batch, row by row."""
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    samples = []
    for row, documents in enumerate(arrays["documents"].tolist()):
        samples.append(
            Sample(
                **{
                    name: arrays[name][row]
                    for name in ("tokens", "document", "position", "supervised")
                },
                **{name: arrays[name][row, :documents] for name in OF_DOCUMENTS},
                split=int(arrays["split"][row]),
            )
        )
    return samples


def sample_of(batch: dict[str, Tensor]) -> Sample:
    """The Sample of a whole micro-batch: its rows one after the other, padding at the end."""
    return join(samples_of(batch))
