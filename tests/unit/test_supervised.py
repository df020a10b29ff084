"""megatron_bp.data.supervised: the bits by hand, and what is refused."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_bp.data.checks import DataError, check_indexed
from megatron_bp.data.supervised import supervised_of

# Documents of 5, 1 and 5 tokens; 11 bits, from the lowest of a byte: 0b10001100, 0b00000110.
MASK = [[0, 0, 1, 1, 0], [0], [0, 1, 0, 1, 1]]
BYTES = [0b10001100, 0b00000110]


@pytest.fixture
def chats(tmp_path: Path) -> str:
    builder = IndexedDatasetBuilder(f"{tmp_path}/p.bin", np.uint16)
    for row in MASK:
        builder.add_document(np.arange(len(row)), [len(row)])
    builder.finalize(f"{tmp_path}/p.idx")
    np.save(tmp_path / "p.supervised.npy", np.array(BYTES, np.uint8))
    said = {"megatron_bp": "0", "kind": "chats", "supervised_tokens": 5}
    (tmp_path / "p.json").write_text(json.dumps(said))
    return str(tmp_path / "p")


def test_bits_by_hand(chats: str) -> None:
    mask = supervised_of(chats)
    assert mask is not None
    assert isinstance(mask.bits, np.memmap)
    flat = [bool(x) for row in MASK for x in row]
    for first in range(12):
        for n in range(12 - first):
            got = mask.of(first, n)
            assert got.dtype == np.bool_
            assert got.tolist() == flat[first : first + n]
    assert mask.count() == 5
    check_indexed(chats, 5)
    Path(f"{chats}.json").unlink()  # the file alone says that they are chats
    assert supervised_of(chats) is not None


def test_texts_have_none(chats: str) -> None:
    Path(f"{chats}.supervised.npy").unlink()
    Path(f"{chats}.json").write_text('{"megatron_bp": "0", "kind": "text"}')
    assert supervised_of(chats) is None
    Path(f"{chats}.json").write_text('{"megatron_bp": "0"}')  # of before there were kinds
    assert supervised_of(chats) is None
    Path(f"{chats}.json").unlink()
    assert supervised_of(chats) is None


def save(array: np.ndarray) -> Callable[[str], object]:
    return lambda p: np.save(f"{p}.supervised.npy", array)


def say(**more: object) -> Callable[[str], object]:
    text = json.dumps({"megatron_bp": "0", "kind": "chats"} | more)
    return lambda p: Path(f"{p}.json").write_text(text)


def zipped(prefix: str) -> None:
    np.savez(f"{prefix}.npz", a=1)
    os.replace(f"{prefix}.npz", f"{prefix}.supervised.npy")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: Path(f"{p}.supervised.npy").unlink(), r"p\.supervised\.npy: is missing, and .*"),
        (lambda p: Path(f"{p}.supervised.npy").write_bytes(b"x"), r"supervised\.npy: no array"),
        (zipped, r"supervised\.npy: holds no"),
        (save(np.zeros(1, np.uint8)), r"is uint8\[1\], and .*p\.idx has 11 tokens.*uint8\[2\]"),
        (save(np.zeros(3, np.uint8)), r"is uint8\[3\]"),
        (save(np.zeros(11, np.bool_)), r"is bool\[11\]"),
        (save(np.zeros((2, 1), np.uint8)), r"is uint8\[2, 1\]"),
        (save(np.array([0, 8], np.uint8)), r"bits after the last of 11 tokens"),
        (save(np.array([1, 0], np.uint8)), r"1 supervised tokens, and .*p\.json says 5"),
        (say(supervised_tokens=4), r"5 supervised tokens, and .*p\.json says 4"),
        (
            say(supervised_tokens="5"),
            r"p\.json: supervised_tokens is '5', and has to be a whole number",
        ),
        (say(supervised_tokens=5.0), r"supervised_tokens is 5\.0, and has to be a whole"),
        (say(documents="3"), r"p\.json: documents is '3', and has to be a whole number"),
        (say(tokens=None), r"p\.json: tokens is None, and has to be a whole number"),
        (say(kind="text"), r"a mask, and .*p\.json says that the data are texts"),
        (say(kind="images"), r"p\.json: kind 'images' is none of text, chats"),
        (
            lambda p: (save(np.zeros(2, np.uint8))(p), say()(p)),
            r"supervised\.npy: no token is supervised",
        ),
        (say(sha256={"bin": "0", "idx": "0"}), r"its sha256 is"),
    ],
)
def test_refused(chats: str, damage: Callable[[str], object], message: str) -> None:
    damage(chats)
    with pytest.raises(DataError, match=message) as error:
        check_indexed(chats, 5)
    assert "\n" not in str(error.value)
    assert re.search(r"again|prepare", str(error.value))
