"""The text of a chat to ids and the characters that each stands for, and spans to a mask.

All of the text is tokenized at once, special tokens of the template as what they are. A token that
stands for characters on both sides of a span's end cannot be told supervised or not: an error,
unless the text is cut there, and each piece tokenized by itself, as it is when an answer is
generated after its prompt.
"""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_bp.tools.prepare.chats.normalized import Normalizer
from megatron_bp.tools.prepare.chats.spans import Span
from megatron_bp.tools.prepare.outcome import MisfitError
from megatron_bp.tools.prepare.tokenizing import EOD_ID

BEFORE_BLANKS = (
    "let the template's generation prompt end before them, and give --answer-header supervise"
)
SHOWN = 20  # characters of a text in an error
EOD_TEXT = "<|endoftext|>"  # what stands for id 256 in the template of a chat in bytes


@dataclass(frozen=True, eq=False)
class Tokens:
    """n tokens of a text: int64[n] each; a token stands for characters start to stop."""

    ids: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


class Offsets(Protocol):
    """Text to tokens.

    Attributes:
        special: fits the text of any special token.
        special_ids: their ids, but that of `unknown`.
        unknown: text of the token that stands for text without one.
        normalizer: that changes a text first; None if none does.
    """

    special: re.Pattern[str]
    special_ids: NDArray[np.int64]
    unknown: str | None
    normalizer: Normalizer | None

    def __call__(self, text: str) -> Tokens: ...


class ByteOffsets:
    """A token a byte, and EOD_TEXT is one token."""

    special = re.compile(re.escape(EOD_TEXT))
    special_ids = np.array([EOD_ID])
    unknown: str | None = None
    normalizer: Normalizer | None = None

    def __call__(self, text: str) -> Tokens:
        parts, at = [], 0
        for piece in re.split(f"({self.special.pattern})", text):
            if piece == EOD_TEXT:
                one = np.array([[EOD_ID], [0], [len(piece)]])
            else:
                ids = np.frombuffer(piece.encode("utf-8"), np.uint8).astype(np.int64)
                place = np.cumsum(ids & 0xC0 != 0x80) - 1  # a character starts at no 10xxxxxx
                one = np.stack([ids, place, place + 1])
            parts.append(one + np.array([[0], [at], [at]]))
            at += len(piece)
        return Tokens(*np.concatenate(parts, axis=1))


class HuggingFaceOffsets:
    """The fast tokenizer that is under one of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        """Take a copy of it.

        Args:
            tokenizer: a PreTrainedTokenizerFast.
        """
        backend = tokenizer.backend_tokenizer
        said = json.loads(backend.to_str())
        # Some tell a token's place without the blanks that it stands for: not for a copy of it.
        _untrimmed(said.get("post_processor"))
        said |= {"truncation": None, "padding": None}
        self._backend = type(backend).from_str(json.dumps(said))
        added = tokenizer.added_tokens_decoder.values()
        texts = {x.content for x in added if x.special} | {*tokenizer.all_special_tokens}
        longest_first = sorted(texts - {""}, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.unknown = tokenizer.unk_token
        known = [x for x in longest_first if x != self.unknown]
        self.special_ids = np.array(tokenizer.convert_tokens_to_ids(known), np.int64)
        self.normalizer: Normalizer | None = None
        if self._backend.normalizer is not None:
            first = [x.content for x in added if not x.normalized]
            self.normalizer = Normalizer(self._backend.normalizer.normalize_str, first)

    def __call__(self, text: str) -> Tokens:
        encoded = self._backend.encode(text, add_special_tokens=False)
        places = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        return Tokens(np.array(encoded.ids, np.int64), places[:, 0], places[:, 1])

    def check_pieces(self) -> None:
        """Raise a ValueError if pieces of a text by themselves become another text."""
        for one, two in (("a\n", "b"), ("a", " b"), ("a", "\nb"), ("a ", "b")):
            ids = [self(x).ids for x in (one, two)]
            text = self._backend.decode(np.concatenate(ids).tolist())
            if text != self._backend.decode(self(one + two).ids.tolist()):
                raise ValueError(
                    f"--split-at-spans: the tokenizer makes {text!r} of {one!r} and {two!r}, so "
                    f"pieces are not what stands in the text; leave the flag away. For blanks "
                    f"before an answer that are in its first token, {BEFORE_BLANKS}."
                )


def _untrimmed(said: object) -> None:
    if isinstance(said, dict):
        if "trim_offsets" in said:
            said["trim_offsets"] = False
        for one in said.values():
            _untrimmed(one)
    elif isinstance(said, list):
        for one in said:
            _untrimmed(one)


def tokenized(
    text: str, spans: Sequence[Span], offsets: Offsets, split: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return (ids int64[n], which are supervised bool[n]) of a text with supervised spans.

    Args:
        text: of a chat.
        spans: in order, apart from each other.
        offsets: the tokenizer.
        split: cut the text at the spans' ends first.

    Raises:
        MisfitError: a token stands for characters on both sides of a span's end.
    """
    cuts = [x for span in spans for x in (span.start, span.stop)]
    if split:
        edges = [0, *cuts, len(text)]
        pieces = [offsets(text[a:b]).ids for a, b in itertools.pairwise(edges)]
        masks = [np.full(len(ids), i % 2 == 1) for i, ids in enumerate(pieces)]
        return np.concatenate(pieces), np.concatenate(masks)
    tokens = offsets(text)
    _check_cuts(text, cuts, tokens, offsets.normalizer)
    # A token is where its first character is: between an odd number of cuts, in a span.
    return tokens.ids, np.searchsorted(cuts, tokens.start, side="right") % 2 == 1


def _check_cuts(
    text: str, cuts: Iterable[int], tokens: Tokens, normalizer: Normalizer | None
) -> None:
    for i, cut in enumerate(cuts):
        across = np.flatnonzero((tokens.start < cut) & (cut < tokens.stop))
        joined = normalizer.joins(text, cut) if normalizer else None
        if len(across):
            at = across[0]
            sides = text[tokens.start[at] : cut], text[cut : tokens.stop[at]]
            what = f"token {tokens.ids[at]} stands for"
        elif joined:
            sides = joined[0][-SHOWN:], joined[1][:SHOWN]
            what = "the tokenizer's normalizer joins"
        else:
            continue
        where = ("starts", "ends")[i % 2]
        blanks = i % 2 == 0 and not sides[0].strip()
        raise MisfitError(
            f"{what} {sides[0]!r} before and {sides[1]!r} after the place where a supervised text "
            f"{where}; with --split-at-spans they are tokenized apart, as when an answer is "
            f"generated.{f' Or, of an answer, {BEFORE_BLANKS}.' if blanks else ''}"
        )
