"""Raw documents to ids, or to the reason why they are left out.

The part of prepare that takes long, and pure: bytes in, arrays out. Knows nothing of files.
"""

import hashlib
import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_bp.tools.prepare.options import Options
from megatron_bp.tools.prepare.reading import FAILED, JSON
from megatron_bp.tools.prepare.tokenizing import Ids, Tokenizer, first_line

FLAWS = (  # what --strict makes an error
    "bad_gzip",
    "bad_json",
    "missing_key",
    "not_a_string",
    "not_an_object",
    "not_utf8",
    "nul_byte",
    "unreadable",
)
REASONS = ("", *FLAWS, "duplicate", "too_long", "too_short")  # a code is the place in here
OF_A_FILE = ("bad_gzip", "unreadable")  # no document of such a file is taken
CODE = {reason: code for code, reason in enumerate(REASONS)}
LONGEST = 2**31 - 1  # an .idx holds lengths as int32


@dataclass(frozen=True, eq=False)
class Encoded:
    """What became of a batch of n raw documents.

    Attributes:
        ids: the good documents' ids, one after the other.
        reason: uint8[n], code of the reason why it is left out, 0 if it is good.
        tokens: int64[n], length in ids; 0 unless good.
        size: int64[n], UTF-8 bytes of the text; 0 unless good.
        digest: uint64[n, 2], of the text.
        fatal: (which one, what is wrong) if the tokenizer does not fit the text.
    """

    ids: Ids
    reason: NDArray[np.uint8]
    tokens: NDArray[np.int64]
    size: NDArray[np.int64]
    digest: NDArray[np.uint64]
    fatal: tuple[int, str] | None


class RejectedError(Exception):
    """A raw document that cannot be one; its argument is the reason."""


def text_in(kind: int, data: bytes, json_key: str) -> str:
    """Return the text of a raw document.

    Raises:
        RejectedError: it holds none.
    """
    if kind == FAILED:
        raise RejectedError(data.decode())
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise RejectedError("not_utf8") from None
    if kind == JSON:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise RejectedError("bad_json") from None
        if not isinstance(value, dict):
            raise RejectedError("not_an_object")
        if json_key not in value:
            raise RejectedError("missing_key")
        text = value[json_key]
        if not isinstance(text, str):
            raise RejectedError("not_a_string")
    if "\0" in text:
        raise RejectedError("nul_byte")
    return text


class MisfitError(ValueError):
    """The tokenizer does not fit the text."""


def token_dtype(vocabulary: int) -> type[np.uint16] | type[np.int32]:
    """Return the type of an id in the .bin: Megatron's own choice (DType.optimal_dtype)."""
    return np.uint16 if vocabulary < 65500 else np.int32


class Encoder:
    """Encodes batches with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, options: Options) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.dtype = token_dtype(tokenizer.vocabulary)

    def __call__(self, items: list[tuple[int, bytes]]) -> Encoded:
        n = len(items)
        ids: list[Ids] = []
        reason, digest = np.zeros(n, np.uint8), np.zeros((n, 2), np.uint64)
        tokens, size = np.zeros(n, np.int64), np.zeros(n, np.int64)
        fatal = None
        for i, (kind, data) in enumerate(items):
            try:
                text = text_in(kind, data, self.options.json_key)
                encoded = text.encode("utf-8")  # fails on half a surrogate pair, which JSON can say
                one = self._ids(text)
            except RejectedError as error:
                reason[i] = CODE[str(error)]
                continue
            except UnicodeEncodeError:
                reason[i] = CODE["not_utf8"]
                continue
            except MisfitError as error:
                fatal = (i, str(error))
                break
            if not self.options.min_tokens <= len(one) <= LONGEST:
                reason[i] = CODE["too_long" if len(one) > LONGEST else "too_short"]
                continue
            ids.append(one)
            tokens[i], size[i] = len(one), len(encoded)
            digest[i] = np.frombuffer(hashlib.sha256(encoded).digest()[:16], np.uint64)
        joined = np.concatenate(ids) if ids else np.zeros(0, self.dtype)
        return Encoded(joined, reason, tokens, size, digest, fatal)

    def _ids(self, text: str) -> Ids:
        tokenizer = self.tokenizer
        try:
            ids = tokenizer.encode(text)
        except Exception as error:  # tokenizers are not ours and raise all kinds
            raise MisfitError(f"the tokenizer fails on it ({first_line(error)})") from error
        if len(ids) and (ids.min() < 0 or ids.max() >= tokenizer.vocabulary):
            worst = int(ids.min() if ids.min() < 0 else ids.max())
            raise MisfitError(
                f"the tokenizer gives id {worst}, and its vocabulary has the ids 0 to "
                f"{tokenizer.vocabulary - 1}"
            )
        if self.options.append_eod:
            assert tokenizer.eod_id is not None
            return np.append(ids.astype(self.dtype), self.dtype(tokenizer.eod_id))
        return ids.astype(self.dtype)
