"""Chats as documents: whole, packed by best fit, supervised where their mask says.

A chats data set is Megatron's .bin and .idx with one sequence a chat, and P.supervised.npy beside
them. Built by Megatron's data set builder, so that blends and splits are its own. Knows nothing of
noise or ranks.
"""

import hashlib
import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from numpy.typing import NDArray

from megatron_bp.data.answers import ChatPolicy, as_trained
from megatron_bp.data.best_fit import Rows, best_fit, in_order
from megatron_bp.data.catalogue import Catalogue, catalogue
from megatron_bp.data.checks import document_bytes
from megatron_bp.data.document import Document
from megatron_bp.data.indexed import DataError
from megatron_bp.data.order import CHATS, alike, shuffled
from megatron_bp.data.supervised import SupervisedMask, supervised_of

NAMES = ("training", "validation", "test")


@dataclass
class ChatConfig(GPTDatasetConfig):
    """Megatron's config, and what chats need beyond it.

    Attributes:
        policy: what is done to chats before they are packed; its length is `sequence_length`.
        global_batch: rows of a training step, in which rows of similar cost are to meet.
    """

    policy: ChatPolicy | None = None
    global_batch: int = 1


@dataclass(frozen=True, eq=False)
class Chats:
    """The files of a chats data set; shared by its splits.

    Attributes:
        path_prefix: P.
        indexed: tokens, by chat.
        mask: which of them are supervised.
        facts: each chat under the policy.
        bytes: int64[C], UTF-8 bytes of each chat's supervised text; None if not known.
    """

    path_prefix: str
    indexed: IndexedDataset
    mask: SupervisedMask
    facts: Catalogue
    bytes: NDArray[np.int64] | None


class ChatDataset(MegatronDataset):
    """Rows of whole chats of one split of one data set, `{"documents", "epoch"}` each.

    Training rows go on for as many whole epochs as the global batches asked for need, each packed
    and ordered anew, and row i is the same however many are. Validation and test hold each chat
    once, in the order of the file.

    Attributes:
        rows_per_epoch: rows of the first epoch.
    """

    def __init__(
        self,
        dataset: Chats,
        dataset_path: str | None,
        indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: ChatConfig,
    ) -> None:
        """As Megatron's builder calls it; see its base class."""
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        assert config.policy is not None
        self.policy = config.policy
        self.kept = indices[dataset.facts.kept[indices]].astype(np.int64)
        if num_samples and not len(self.kept):
            raise DataError(self._nothing())
        self.rows, self.epoch_start = self._epochs()
        self.costs = self.rows.sums(dataset.facts.cost)

    @property
    def rows_per_epoch(self) -> int:
        """Rows that hold each chat once; 0 if none was asked for."""
        return int(self.epoch_start[1]) if len(self.epoch_start) > 1 else 0

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Chats) -> int:
        """Chats, which splits are cut over."""
        return len(low_level_dataset.indexed.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: ChatConfig) -> Chats:
        """Open the files.

        Raises:
            DataError: there is no mask, or a document is no single chat.
        """
        indexed = GPTDataset.build_low_level_dataset(dataset_path, config)
        mask = supervised_of(dataset_path)
        assert config.policy is not None
        if mask is None:
            raise DataError(f"{dataset_path}: has no .supervised.npy, so it is no chats data set")
        lengths = indexed.sequence_lengths
        if len(indexed.document_indices) != len(lengths) + 1:
            raise DataError(
                f"{dataset_path}: {len(lengths)} sequences in {len(indexed.document_indices) - 1} "
                f"documents; a chat is a document of one sequence: prepare the data again"
            )
        facts = catalogue(lengths, mask, config.policy, dataset_path)
        return Chats(dataset_path, indexed, mask, facts, document_bytes(dataset_path))

    @staticmethod
    def _key_config_attributes() -> list[str]:
        names: list[str] = MegatronDataset._key_config_attributes()
        return [*names, "global_batch"]

    def __len__(self) -> int:
        """Rows; for an evaluation at least what was asked for, read again from the first."""
        again = 0 if self.index_split == Split.train or not len(self.rows) else self.num_samples
        return max(len(self.rows), again or 0)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """The chats of row `idx` and their epoch; no chat for None (Megatron's batch padding)."""
        if idx is None:
            return {"documents": (), "epoch": 0}
        row = int(idx) % len(self.rows)
        epoch = int(np.searchsorted(self.epoch_start, row, "right")) - 1
        return {"documents": tuple(map(self.chat, self.rows.of(row).tolist())), "epoch": epoch}

    def chat(self, number: int) -> Document:
        """Chat `number` of the .idx as it is trained with; the number is its key."""
        files, facts = self.dataset, self.dataset.facts
        tokens = files.indexed.get(number).astype(np.int32)
        supervised = files.mask.of(int(facts.first[number]), len(tokens))
        tokens, supervised = as_trained(tokens, supervised, self.policy)
        bytes_ = math.nan
        if files.bytes is not None:  # of a cut chat in proportion
            kept = int(facts.supervised[number] - facts.filled[number])
            bytes_ = float(files.bytes[number]) * kept / max(int(facts.whole[number]), 1)
        return Document(tokens, supervised, number, bytes_)

    def row_costs(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64: work of rows in visible pairs."""
        return np.asarray(self.costs[rows % len(self.rows)])

    def _epochs(self) -> tuple[Rows, NDArray[np.int64]]:
        """The rows of as many epochs as are wanted, and int64[E + 1], where each begins."""
        if self.num_samples == 0:
            return Rows(np.zeros(0, np.int64), np.zeros(1, np.int64)), np.zeros(1, np.int64)
        cache, first_rank = self._cache(), not dist.is_initialized() or dist.get_rank() == 0
        if cache is not None and cache.is_file():
            try:
                return _stored(cache)
            except Exception as error:  # np.load raises all kinds for a damaged file
                if first_rank:
                    print(
                        f"megatron_bp: {cache}: is damaged ({error}); its rows are made again",
                        flush=True,
                    )
        rows, epoch_start = self._build()
        if cache is not None and first_rank:
            cache.parent.mkdir(parents=True, exist_ok=True)
            fresh = cache.with_suffix(f".{os.getpid()}.tmp")
            with open(fresh, "wb") as stream:
                np.savez(stream, chats=rows.chats, start=rows.start, epoch_start=epoch_start)
            os.replace(fresh, cache)
        return rows, epoch_start

    def _nothing(self) -> str:
        """Why a split has no row, and the ways out."""
        facts, indices = self.dataset.facts, self.indices
        told = (
            f"the {NAMES[self.index_split.value]} split of {self.dataset.path_prefix} (--split "
            f"{self.config.split}) has "
        )
        if not len(indices):
            told += f"none of its {len(facts.tokens)} chats"
        else:
            told += f"{len(indices)} chats and none that can be trained with ("
            told += f"{left_out(facts, indices)})"
        ways = ["prepare more chats", "change --split"]
        if facts.overlong[indices].any():
            ways.append("raise --seq-length")
        if self.index_split != Split.train:
            ways.append("set --eval-iters 0")
        return f"{told}: {', '.join(ways[:-1])}, or {ways[-1]}"

    def _build(self) -> tuple[Rows, NDArray[np.int64]]:
        facts, length = self.dataset.facts, self.policy.length
        if self.index_split != Split.train:
            rows = in_order(self.kept, facts.tokens, length)
            return rows, np.array([0, len(rows)])
        parts, begin, batch = [], [0], self.config.global_batch
        where = (self.config.random_seed, self.index_split.value)
        for epoch in itertools.count():
            order = shuffled(len(self.kept), *where, epoch, CHATS)
            packed = best_fit(self.kept[order], facts.tokens, length)
            turn = alike(packed.sums(facts.cost), batch, begin[-1], *where, epoch)
            parts.append(packed.reordered(turn))
            begin.append(begin[-1] + len(packed))
            if self.num_samples is None or begin[-1] >= -(-self.num_samples // batch) * batch:
                break
        sizes = np.concatenate([np.diff(part.start) for part in parts])
        chats = np.concatenate([part.chats for part in parts])
        return Rows(chats, np.append(0, np.cumsum(sizes))), np.array(begin, dtype=np.int64)

    def _cache(self) -> Path | None:
        """Where the rows are kept: a name that tells all they follow from, sizes and costs too."""
        folder = self.config.path_to_cache
        if folder is None:
            return None
        facts = self.dataset.facts
        told = hashlib.sha256(self.unique_description.encode())
        told.update(facts.tokens.tobytes())
        told.update(facts.cost.tobytes())
        name = told.hexdigest()[:32]
        return Path(folder) / f"{name}-{type(self).__name__}-{self.index_split.name}.npz"


def _stored(cache: Path) -> tuple[Rows, NDArray[np.int64]]:
    """The rows in a file and where each epoch begins; any error if it is not as it was written."""
    with np.load(cache, allow_pickle=False) as stored:
        return Rows(stored["chats"], stored["start"]), stored["epoch_start"]


def left_out(facts: Catalogue, chats: NDArray[np.int32] | NDArray[np.int64]) -> str:
    """In words, how many of the chats are left out or cut, and why."""
    return (
        f"{int(facts.overlong[chats].sum())} dropped as longer than a row, "
        f"{int(facts.unsupervised[chats].sum())} dropped with nothing supervised, "
        f"{int(facts.truncated[chats].sum())} truncated"
    )
