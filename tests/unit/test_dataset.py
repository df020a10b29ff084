"""From files through Megatron's data set builder to Samples, and back to the files' bytes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch.utils.data import default_collate

from megatron_bp.batch.dataset import SampleDataset, build_datasets, sample_of
from megatron_bp.data import pretrain
from megatron_bp.data.document import Document
from megatron_bp.data.pretrain import PIECE_BITS, SAMPLE_BITS, blend_key
from megatron_bp.sequence.packing import Sample
from megatron_bp.tools.prepare import Options, prepare

LENGTH = 32
TRAIN, VALIDATION, TEST = 0, 1, 2
START = "<"  # each file's first character, and none of its others
Build = Callable[..., list[SampleDataset | None]]


def texts(sizes: Sequence[int], seed: int = 0) -> list[str]:
    """A random text of each size in bytes, beginning with START."""
    rng = np.random.default_rng(seed)
    return [START + "".join(map(chr, rng.integers(97, 123, size - 1))) for size in sizes]


def ragged_texts(total: int = 20 * LENGTH) -> list[str]:
    """Texts of 3 to 79 bytes, `total` bytes in all."""
    rng, sizes = np.random.default_rng(1), []
    while (left := total - sum(sizes)) > 0:
        size = int(rng.integers(3, 80))
        sizes.append(size if left - size >= 3 else left)
    return texts(sizes)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Prepares one data set a list of texts and builds training, validation and test samples."""

    def build(
        *data: list[str],
        sizes: Sequence[int | None] = (None, 0, 0),
        evaluation: int | None = 0,
        weights: list[float] | None = None,
        draws: int = 1,
        split: str = "1,0,0",
        length: int = LENGTH,
        **options: Any,
    ) -> list[SampleDataset | None]:
        prefixes = []
        for number, files in enumerate(data):
            folder = tmp_path / f"tree{number}"
            folder.mkdir(exist_ok=True)
            for name, text in enumerate(files):
                (folder / f"{name}.txt").write_text(text, encoding="utf-8")
            prefixes.append(str(tmp_path / f"data{number}"))
            prepare(Options([folder], Path(prefixes[-1]), overwrite=True))
        tokenizer = SimpleNamespace(unique_identifiers={}, vocab_size=258, eod=256, pad=0)
        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=length,
            blend=(prefixes, weights),
            split=split,
            tokenizer=tokenizer,
            path_to_cache=str(tmp_path / "cache"),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            add_extra_token_to_sequence=False,
            **options,
        )
        return list(build_datasets(config, list(sizes), evaluation, draws))

    return build


def samples(dataset: SampleDataset | None) -> list[Sample]:
    assert dataset is not None
    return [sample_of(default_collate([dataset[i]])) for i in range(len(dataset))]


def epoch_of(sample: Sample) -> int:
    (epoch,) = set(sample.document_epochs.tolist())
    return int(epoch)


def pieces(sample: Sample) -> list[tuple[int, str]]:
    """(key, text) of each document of a sample."""
    out = []
    for ordinal, key in enumerate(sample.document_keys.tolist()):
        tokens = sample.tokens[sample.document == ordinal]
        out.append((key, bytes(tokens.astype(np.uint8)).decode()))
    return out


def all_pieces(dataset: SampleDataset | None) -> list[tuple[int, str]]:
    """The pieces of all samples in the order of the unshuffled data, which is that of the keys."""
    return sorted(piece for sample in samples(dataset) for piece in pieces(sample))


# --- documents -----------------------------------------------------------------------------------


def test_pieces_in_unshuffled_order_are_the_files_byte_for_byte(build: Build) -> None:
    files = ragged_texts()
    train, _, _ = build(files)
    joined = "".join(text for _, text in all_pieces(train))
    assert sorted(START + text for text in joined.split(START)[1:]) == sorted(files)


def test_documents_are_never_merged_and_a_cut_one_goes_on_in_the_next_sample(build: Build) -> None:
    train, _, _ = build(ragged_texts())
    cut = 0
    for key, text in all_pieces(train):
        assert START not in text[1:], "two documents in one piece"
        if not text.startswith(START):
            assert key % 2**PIECE_BITS == 0, "a document is cut inside a sample"
            cut += 1
    assert cut > 5


def test_a_document_that_ends_with_its_sample_leaves_no_empty_piece(build: Build) -> None:
    files = texts([LENGTH, LENGTH // 2, LENGTH // 2, LENGTH // 2, LENGTH // 2] * 4 + [2 * LENGTH])
    train, _, _ = build(files)
    assert all(text for _, text in all_pieces(train))
    assert sum(text.startswith(START) for _, text in all_pieces(train)) == len(files)
    for sample in samples(train):
        assert len(sample.document_keys) == sample.document.max() + 1


def test_a_row_is_full_supervised_and_counts_positions_in_each_piece(build: Build) -> None:
    train, _, _ = build(ragged_texts())
    assert len(samples(train)) == 20
    for sample in samples(train):
        assert len(sample.tokens) == LENGTH
        assert sample.supervised.all()
        lengths = [len(text) for _, text in pieces(sample)]
        assert sample.document.tolist() == np.repeat(range(len(lengths)), lengths).tolist()
        assert sample.position.tolist() == [i for n in lengths for i in range(n)]
        assert (sample.split, epoch_of(sample)) == (TRAIN, 0)


def test_samples_are_shuffled(build: Build) -> None:
    train, _, _ = build(ragged_texts())
    first = [sample.document_keys[0] for sample in samples(train)]
    assert first != sorted(first)


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [60, 46])  # three epochs, and a third that Megatron keeps apart
def test_keys_are_unique_over_samples_and_epochs(build: Build, size: int) -> None:
    train, _, _ = build(ragged_texts(), sizes=(size, 0, 0))
    found = all_pieces(train)
    assert len(samples(train)) == size
    assert len({key for key, _ in found}) == len(found)
    starts = [text[:4] for _, text in found if text.startswith(START) and len(text) > 4]
    assert len(starts) > size / 20 * 0.8 * len(set(starts)), "no document was read again"


def test_keys_are_unique_over_a_blend(build: Build) -> None:
    one, two = ragged_texts(), ragged_texts(12 * LENGTH)
    train, _, _ = build(one, two, sizes=(16, 0, 0), weights=[0.5, 0.5])
    found = all_pieces(train)
    assert len({key for key, _ in found}) == len(found)


def test_a_blend_without_weights_that_is_read_again_has_new_noise(build: Build) -> None:
    train, _, _ = build(ragged_texts(), ragged_texts(4 * LENGTH), sizes=(48, 0, 0))
    chosen = [(epoch_of(s), s.document_keys.tolist(), s.tokens.tolist()) for s in samples(train)]
    assert len({str(sample) for sample in chosen}) == 48


def test_a_blend_without_weights_that_is_evaluated_again_has_the_same_noise(build: Build) -> None:
    data = ragged_texts(), ragged_texts(8 * LENGTH)
    _, validation, _ = build(*data, sizes=(4, 20, 0), evaluation=10, split="1,1,0")
    chosen = [
        (epoch_of(s), s.document_keys.tolist(), s.tokens.tolist()) for s in samples(validation)
    ]
    assert chosen[:10] == chosen[10:]
    assert len({str(sample) for sample in chosen}) == 10


def test_keys_of_a_blend_are_positive_int64_that_never_meet() -> None:
    ends = (0, 2 ** (SAMPLE_BITS + PIECE_BITS) - 1)
    keys = [blend_key(number, key) for number in (0, 1, 2047) for key in ends]
    assert keys == sorted(set(keys))
    assert 0 <= min(keys) <= max(keys) < 2**63
    with pytest.raises(ValueError, match="data set 2048 of the blend"):
        blend_key(2048, 0)


# --- evaluation ----------------------------------------------------------------------------------


def test_every_evaluation_reads_the_same_samples(build: Build) -> None:
    _, validation, _ = build(ragged_texts(), sizes=(4, 15, 0), evaluation=5, split="1,1,0")
    chosen = [(s.tokens.tolist(), s.document_keys.tolist()) for s in samples(validation)]
    assert len(chosen) == 15
    assert chosen[:5] == chosen[5:10] == chosen[10:]
    assert len({str(sample) for sample in chosen}) == 5


def test_draws_of_an_evaluation_are_epochs_of_the_same_samples(build: Build) -> None:
    """Two evaluations of 3 draws of 5 samples: draw after draw, each with noise of its own."""
    _, validation, _ = build(ragged_texts(), sizes=(4, 30, 0), evaluation=5, draws=3, split="1,1,0")
    found = samples(validation)
    assert [epoch_of(s) for s in found] == ([0] * 5 + [1] * 5 + [2] * 5) * 2
    chosen = [(s.tokens.tolist(), s.document_keys.tolist()) for s in found]
    assert all(chosen[i] == chosen[i % 5] for i in range(30))
    assert len({str(sample) for sample in chosen}) == 5


def test_draws_leave_training_and_a_whole_split_alone(build: Build) -> None:
    sizes = (45, None, 0)
    train, validation, _ = build(
        ragged_texts(), sizes=sizes, evaluation=None, draws=3, split="1,1,0"
    )
    assert {epoch_of(s) for s in samples(train)} == {
        0
    }  # Megatron's own passes have keys of their own
    found = samples(validation)
    n = len(found) // 3
    assert [epoch_of(s) for s in found] == [0] * n + [1] * n + [2] * n
    assert [s.tokens.tolist() for s in found[:n]] == [s.tokens.tolist() for s in found[n : 2 * n]]


def test_a_piece_has_the_bytes_of_its_share_of_the_document(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of each document from the index; here twice its tokens and a bit."""
    files = ragged_texts()

    def bytes_of(prefix: str) -> np.ndarray:
        index = IndexedDataset(prefix)  # its arrays are gone with it
        return (2 * index.sequence_lengths + 1).astype(np.int64)

    monkeypatch.setattr(pretrain, "document_bytes", bytes_of)
    train, _, _ = build(files)
    total = 0.0
    for sample in samples(train):
        assert sample.document_bytes.dtype == np.float64
        assert len(sample.document_bytes) == len(sample.document_keys)
        for ordinal, told in enumerate(sample.document_bytes.tolist()):
            tokens = int((sample.document == ordinal).sum())
            assert 2 * tokens < told <= 2 * tokens + 1
        total += float(sample.document_bytes.sum())
    assert total == pytest.approx(2 * 20 * LENGTH + len(files))


def test_bytes_that_the_data_does_not_tell_are_nan(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain, "document_bytes", lambda prefix: None)
    train, _, _ = build(ragged_texts())
    assert all(np.isnan(sample.document_bytes).all() for sample in samples(train))


def test_what_an_evaluation_reads_does_not_depend_on_the_length_of_the_run(build: Build) -> None:
    chosen = []
    for size in (5, 60):
        _, validation, _ = build(ragged_texts(), sizes=(4, size, 0), evaluation=5, split="1,1,0")
        chosen.append([sample.tokens.tolist() for sample in samples(validation)[:5]])
    assert chosen[0] == chosen[1]


def test_an_evaluation_longer_than_the_split_is_an_error(build: Build) -> None:
    with pytest.raises(ValueError, match=r"reads 30 rows .* split holds 8.*--eval-iters"):
        build(ragged_texts(), sizes=(4, 60, 0), evaluation=30, split="1,1,0")


@pytest.mark.parametrize("weights", [[1.0, 3.0], [3.0, 1.0]])
def test_an_evaluation_longer_than_one_part_of_a_blend_is_an_error(
    build: Build, weights: list[float]
) -> None:
    """Of 24 rows 6 and 18, each of a split of some 9."""
    with pytest.raises(ValueError, match=r"reads 1[78] rows of 32 tokens from .* split holds"):
        build(
            ragged_texts(),
            ragged_texts(),
            sizes=(4, 48, 0),
            evaluation=24,
            split="1,1,0",
            weights=weights,
        )


def test_an_evaluation_longer_than_a_blend_without_weights_is_an_error(build: Build) -> None:
    """Megatron reads the data sets of such a blend once, whatever is asked for."""
    data = ragged_texts(), ragged_texts(8 * LENGTH)
    with pytest.raises(
        ValueError, match=r"holds 1\d rows of 32 tokens, and an evaluation reads 30"
    ):
        build(*data, sizes=(4, 60, 0), evaluation=30, split="1,1,0")


def test_splits_are_told_apart_and_share_no_text(build: Build) -> None:
    datasets = build(ragged_texts(), sizes=(None, None, None), evaluation=None, split="2,1,1")
    seen: list[set[str]] = []
    for split, dataset in enumerate(datasets):
        assert {sample.split for sample in samples(dataset)} == {split}
        seen.append({text for _, text in all_pieces(dataset) if text.startswith(START)})
    assert not (seen[TRAIN] & seen[VALIDATION] | seen[TRAIN] & seen[TEST])
    assert not seen[VALIDATION] & seen[TEST]


def test_the_end_of_a_last_partial_sample_is_padding(build: Build) -> None:
    """Only a validation split may keep it (drop_last_partial_validation_sequence)."""
    files = texts([40, 37])
    sizes = (0, None, 0)
    _, validation, _ = build(
        files,
        sizes=sizes,
        evaluation=None,
        split="0,1,0",
        drop_last_partial_validation_sequence=False,
    )
    assert "".join(text for _, text in all_pieces(validation)).count(START) == 2
    last = max(samples(validation), key=lambda sample: int(sample.document_keys.max()))
    assert last.document[13:].tolist() == [-1] * (LENGTH - 13)  # 77 bytes are 2 rows and 13
    assert (last.document[:13] >= 0).all()
    assert last.supervised.tolist() == [True] * 13 + [False] * (LENGTH - 13)
    assert not last.tokens[13:].any()
    assert not last.position[13:].any()


# --- what is left out, and errors ----------------------------------------------------------------


def test_splits_that_no_one_wants_are_none(build: Build) -> None:
    train, validation, test = build(ragged_texts(), sizes=(8, 0, 0), split="1,1,1")
    assert isinstance(train, SampleDataset)
    assert validation is None
    assert test is None


def test_a_missing_test_split_is_none(build: Build) -> None:
    assert build(ragged_texts(), sizes=(8, 0, 4), evaluation=4)[TEST] is None


def test_a_validation_split_without_rows_is_an_error(build: Build) -> None:
    with pytest.raises(ValueError, match=r"the validation split holds no row of 32 tokens"):
        build(ragged_texts(), sizes=(8, 8, 0), evaluation=4)


def test_a_training_split_shorter_than_a_row_is_an_error(build: Build) -> None:
    with pytest.raises(ValueError, match=r"the training split holds no row of 1000 tokens"):
        build(ragged_texts(), length=1000)


# --- through the loader --------------------------------------------------------------------------


class OneDocument:
    """A source of one sample of one document."""

    document = Document(np.arange(5, dtype=np.int32), np.arange(5) != 2, 2**62 + 1, 7.25)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        return {"documents": () if idx is None else (self.document,)}


def test_a_sample_survives_the_loader() -> None:
    sample = sample_of(default_collate([SampleDataset(OneDocument(), 7, VALIDATION)[0]]))
    assert sample.tokens.tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert sample.document.tolist() == [0, 0, 0, 0, 0, -1, -1]
    assert sample.position.tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert sample.supervised.tolist() == [True, True, False, True, True, False, False]
    assert sample.document_keys.tolist() == [2**62 + 1]
    assert sample.document_bytes.tolist() == [7.25]
    assert (sample.split, epoch_of(sample)) == (VALIDATION, 0)
    types = [x.dtype for x in (sample.tokens, sample.document, sample.position)]
    assert types == [np.int32] * 3
    assert (sample.supervised.dtype, sample.document_keys.dtype) == (np.bool_, np.int64)


def test_batch_padding_is_a_row_without_documents() -> None:
    sample = sample_of(default_collate([SampleDataset(OneDocument(), 7, TRAIN)[None]]))
    assert sample.document.tolist() == [-1] * 7
    assert len(sample.document_keys) == 0
    assert not sample.supervised.any()


class TwoSamples:
    """A source of one document, then of two, of 5 and 2 + 3 tokens."""

    documents = (
        (Document(np.arange(5, dtype=np.int32), np.arange(5) != 2, 11, 7.25),),
        (
            Document(np.arange(10, 12, dtype=np.int32), np.ones(2, np.bool_), 22, 2.0),
            Document(np.arange(20, 23, dtype=np.int32), np.arange(3) > 0, 33, 3.0),
        ),
    )

    def __len__(self) -> int:
        return 2

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        return {"documents": () if idx is None else self.documents[idx]}


def test_rows_of_a_micro_batch_become_one_row() -> None:
    """Padding goes to the end; samples 1 and 2 (the first again) are of two epochs."""
    dataset = SampleDataset(TwoSamples(), 7, TRAIN, size=4, rows=2)
    sample = sample_of(default_collate([dataset[1], dataset[2]]))
    assert sample.tokens.tolist() == [10, 11, 20, 21, 22, 0, 1, 2, 3, 4, 0, 0, 0, 0]
    assert sample.document.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2, -1, -1, -1, -1]
    assert sample.position.tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 0, 0]
    want = [True, True, False, True, True, True, True, False, True, True]
    assert sample.supervised.tolist() == want + [False] * 4
    assert sample.document_keys.tolist() == [22, 33, 11]
    assert sample.document_bytes.tolist() == [2.0, 3.0, 7.25]
    assert sample.document_epochs.tolist() == [0, 0, 1]
    types = [x.dtype for x in (sample.tokens, sample.document, sample.position)]
    assert types == [np.int32] * 3
    assert (sample.supervised.dtype, sample.document_epochs.dtype) == (np.bool_, np.int64)
    nothing = sample_of(default_collate([dataset[None], dataset[None]]))
    assert nothing.document.tolist() == [-1] * 14
    assert len(nothing.document_keys) == 0


def test_a_data_set_offers_the_size_it_was_asked_for() -> None:
    assert len(SampleDataset(OneDocument(), 7, TRAIN)) == 1
    dataset = SampleDataset(OneDocument(), 7, TRAIN, size=3)
    assert len(torch.utils.data.DataLoader(dataset, batch_size=1)) == 3
