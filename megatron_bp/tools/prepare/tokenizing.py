"""Text to ids: byte by byte, or with a tokenizer that Megatron builds from its own flags."""

import argparse
import contextlib
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

EOD_ID = 256
MASK_ID = 257
BYTE_VOCABULARY = 258
Ids = NDArray[np.integer[Any]]

# Chat and image tokenizers of Megatron: they do not take a plain text.
NOT_FOR_TEXT = ("MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer")


class Tokenizer(Protocol):
    """What is asked of a tokenizer; `eod_id` and `mask_id` are None if it has none."""

    vocabulary: int
    eod_id: int | None
    mask_id: int | None

    def encode(self, text: str) -> Ids: ...

    def describe(self) -> dict[str, Any]: ...


class ByteTokenizer:
    """Ids 0 to 255 are the bytes, 256 ends a document, 257 is the mask."""

    vocabulary = BYTE_VOCABULARY
    eod_id: int | None = EOD_ID
    mask_id: int | None = MASK_ID

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), np.uint8)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "bytes",
            "vocabulary": BYTE_VOCABULARY,
            "eod_id": EOD_ID,
            "mask_id": MASK_ID,
            "flags": f"--tokenizer-type NullTokenizer --vocab-size {BYTE_VOCABULARY}"
            f" --null-tokenizer-eod-id {EOD_ID} --mask-token-id {MASK_ID}",
        }


class MegatronTokenizer:
    """A tokenizer of Megatron's `build_tokenizer`."""

    def __init__(self, flags: Sequence[str]) -> None:
        """Build it.

        Args:
            flags: --tokenizer-type and Megatron's other tokenizer flags.

        Raises:
            ValueError: the flags are wrong, or Megatron cannot build the tokenizer.
        """
        self.flags = shlex.join(flags)
        with _quiet():
            args = _megatron_args(flags)
            self.kind = args.tokenizer_type
            self._tokenizer = _build(args, self.flags)
        self.vocabulary = int(self._tokenizer.vocab_size)
        self.eod_id = self._special("eod")
        self.mask_id = self._special("mask")

    def encode(self, text: str) -> Ids:
        return np.array(self._tokenizer.tokenize(text), dtype=np.int64)

    @property
    def hugging_face(self) -> Any:
        """The tokenizer of transformers under Megatron's wrappers; None if it is another kind."""
        if self.kind != "HuggingFaceTokenizer":
            return None
        return self._tokenizer._tokenizer.tokenizer

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "vocabulary": self.vocabulary,
            "eod_id": self.eod_id,
            "mask_id": self.mask_id,
            "flags": self.flags,
        }

    def _special(self, name: str) -> int | None:
        try:
            special = getattr(self._tokenizer, name)
        except (AttributeError, NameError, NotImplementedError, TypeError):
            return None
        return int(special) if special is not None and special >= 0 else None


def build(flags: Sequence[str]) -> Tokenizer:
    """Return Megatron's tokenizer for its flags, bytes if there are none."""
    return MegatronTokenizer(flags) if flags else ByteTokenizer()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(
            f"{message} (--help lists prepare's flags; all others are taken as tokenizer flags of "
            f"Megatron's)"
        )


def _megatron_args(flags: Sequence[str]) -> argparse.Namespace:
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    parser = _Parser(add_help=False, allow_abbrev=False)
    ArgumentGroupFactory(TokenizerConfig).build_group(parser, "tokenizer")
    args = parser.parse_args(flags)
    if args.tokenizer_type is None:
        raise ValueError(f"{shlex.join(flags)}: Megatron's flags need a --tokenizer-type.")
    if args.tokenizer_type in NOT_FOR_TEXT:
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type} does not take plain text: give the tokenizer "
            f"under it, such as HuggingFaceTokenizer."
        )
    args.pad_vocab_size = False  # a matter of the model, not of the data
    return args


def _build(args: argparse.Namespace, flags: str) -> Any:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    try:
        return build_tokenizer(args)
    except Exception as error:  # Megatron's builders raise all kinds, also AssertionError
        raise ValueError(
            f"Megatron cannot build the tokenizer of {flags} ({first_line(error)}): check "
            f"--tokenizer-type and --tokenizer-model."
        ) from error


def first_line(error: BaseException) -> str:
    """Return an error as one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what Megatron and transformers say of a machine without a GPU, and of long texts."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are the parallelism
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
        yield
