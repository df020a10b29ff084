"""Megatron's tokenizers in prepare, through Megatron's own flags; small ones, made here."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_bp.tools import prepare as tool
from megatron_bp.tools.prepare import Options, encoding, tokenizing

TEXTS = [f"the quick brown fox number {i} jumps over \u00e9t\u00e9\n" for i in range(20)]
VOCABULARY = 400


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 400 ids, saved as Hugging Face does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<eod>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = (f"word{i:03} number{i * 7}" for i in range(300))
    bpe.train_from_iterator([*TEXTS, *words], trainer)
    folder = tmp_path_factory.mktemp("hf")
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eod>", mask_token="<mask>")
    assert len(fast) == VOCABULARY
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import sentencepiece

    folder = tmp_path_factory.mktemp("sp")
    (folder / "text").write_text("".join(TEXTS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=60,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return folder / "m.model"


@pytest.fixture(scope="module")
def tik_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tik") / "vocabulary.json"
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": str(i)}
        for i in range(256)
    ]
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def run(lines: Path, prefix: Path, *flags: str, **options: Any) -> dict[str, Any]:
    return tool.prepare(Options([lines], prefix, tokenizer_flags=flags, **options))


def read(prefix: Path) -> list[list[int]]:
    data = IndexedDataset(str(prefix))
    return [data[i].tolist() for i in range(len(data))]


def flags_of(folder: Path) -> list[str]:
    return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]


def test_hugging_face(lines: Path, tmp_path: Path, hugging_face: Path) -> None:
    from transformers import AutoTokenizer

    result = run(lines, tmp_path / "p", *flags_of(hugging_face), append_eod=True)
    reference = AutoTokenizer.from_pretrained(hugging_face)
    want = {text: [*reference.encode(text), 0] for text in TEXTS}
    documents = read(tmp_path / "p")
    assert sorted(documents) == sorted(want.values())
    assert result["tokenizer"] == {
        "kind": "HuggingFaceTokenizer",
        "vocabulary": VOCABULARY,
        "eod_id": 0,
        "mask_id": 1,
        "flags": f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {hugging_face}",
    }
    texts = {tuple(ids): text for text, ids in want.items()}
    sizes = [len(texts[tuple(ids)].encode()) for ids in documents]
    assert np.load(tmp_path / "p.bytes.npy").tolist() == sizes
    assert result["bytes"] == sum(sizes)
    assert result["tokens"] == sum(map(len, documents)) < result["bytes"] / 2
    counts = np.bincount([i for ids in documents for i in ids])
    p = counts[counts > 0] / counts.sum()
    bits = -(p * np.log2(p)).sum()
    assert result["unigram_bits_per_token"] == pytest.approx(bits, abs=1e-6)
    assert result["unigram_bits_per_byte"] == pytest.approx(
        bits * result["tokens"] / result["bytes"], abs=1e-6
    )


def test_workers_build_the_same_tokenizer(lines: Path, tmp_path: Path, hugging_face: Path) -> None:
    run(lines, tmp_path / "p", *flags_of(hugging_face))
    run(lines, tmp_path / "q", *flags_of(hugging_face), workers=2)
    for ending in tool.ENDINGS:
        one, two = ((tmp_path / f"{x}{ending}").read_bytes() for x in "pq")
        assert one == two


def test_sentence_piece(lines: Path, tmp_path: Path, sentence_piece: Path) -> None:
    import sentencepiece

    flags = ["--tokenizer-type=SentencePieceTokenizer", f"--tokenizer-model={sentence_piece}"]
    result = run(lines, tmp_path / "p", *flags)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentence_piece))
    assert sorted(read(tmp_path / "p")) == sorted(reference.encode(TEXTS))
    assert result["tokenizer"]["vocabulary"] == len(reference)
    assert (result["tokenizer"]["eod_id"], result["tokenizer"]["mask_id"]) == (2, None)


def test_tik_token(lines: Path, tmp_path: Path, tik_token: Path) -> None:
    flags = f"--tokenizer-type TikTokenizer --tokenizer-model {tik_token} --tiktoken-pattern v2"
    flags += " --vocab-size 266 --tiktoken-num-special-tokens 10"
    result = run(lines, tmp_path / "p", *flags.split())
    want = [[10 + byte for byte in text.encode()] for text in TEXTS]
    assert sorted(read(tmp_path / "p")) == sorted(want)
    assert (result["tokenizer"]["eod_id"], result["tokenizer"]["mask_id"]) == (2, 3)


def null(vocabulary: int) -> list[str]:
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocabulary)]


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(65499, np.uint16), (65500, np.int32), (200000, np.int32)]
)
def test_type_by_vocabulary(tmp_path: Path, vocabulary: int, dtype: type) -> None:
    from megatron.core.datasets.indexed_dataset import DType

    (tmp_path / "a.txt").write_text(f"3 {vocabulary - 1} 0")
    run(tmp_path / "a.txt", tmp_path / "p", *null(vocabulary))
    assert read(tmp_path / "p") == [[3, vocabulary - 1, 0]]
    assert IndexedDataset(str(tmp_path / "p")).index.dtype is dtype
    assert encoding.token_dtype(vocabulary) is DType.optimal_dtype(vocabulary) is dtype


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "1 2 100 3",
            r"the tokenizer gives id 100, and its vocabulary has the ids 0 to 99; check",
        ),
        (
            "1 -2 3",
            r"the tokenizer gives id -2, and its vocabulary has the ids 0 to 99; check",
        ),
        ("1 2 three", r"the tokenizer fails on it \(ValueError: .*three.*\); check"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.txt").write_text(f"1 2\n3 4\n{text}\n5 six\n")
    with pytest.raises(ValueError, match=rf"^0/a\.txt:3: {message}[^\n]*$"):
        run(tmp_path / "a.txt", tmp_path / "p", *null(100), document_separator="line")
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tokenizer-type Nonesuch", "invalid choice: .Nonesuch.*SentencePieceTokenizer"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model ./no/where", "cannot build"),
        ("--tokenizer-type SentencePieceTokenizer", "cannot build"),
        ("--tokenizer-type SFTTokenizer", "does not take plain text: give the tokenizer under it"),
        ("--tokenizer-model x", "Megatron's flags need a --tokenizer-type"),
        ("--tokenizer-type NullTokenizer --vocab-size ten", "--vocab-size: invalid int value"),
        ("--tokenizer-type NullTokenizer --vocab 9", r"--vocab 9 \(--help lists prepare.s flags"),
    ],
)
def test_flags_that_megatron_cannot_use(
    lines: Path, tmp_path: Path, flags: str, message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^[^\n]*{message}[^\n]*$"):
        run(lines, tmp_path / "p", *flags.split())
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_no_end_of_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing.ByteTokenizer, "eod_id", None)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"--append-eod: the tokenizer has no end-of-document id"):
        run(tmp_path / "a.txt", tmp_path / "p", append_eod=True)


def test_command_line(lines: Path, tmp_path: Path, hugging_face: Path) -> None:
    tool.main(["--input", str(lines), *flags_of(hugging_face), f"--output-prefix={tmp_path}/p"])
    run(lines, tmp_path / "q", *flags_of(hugging_face))
    assert (tmp_path / "p.bin").read_bytes() == (tmp_path / "q.bin").read_bytes()


def test_foreign_errors_are_told_in_one_short_line() -> None:
    error = OSError("no\nsuch   tokenizer " + "x" * 999)
    told = tokenizing.first_line(error)
    assert told.startswith("OSError: no such tokenizer xxx")
    assert len(told) == 300
