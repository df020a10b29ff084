"""Raw documents to ids, or to the reason why they are left out.

The part of prepare that takes long, and pure: bytes in, arrays out. Knows nothing of files, and of
texts and chats no more than that they become pieces.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_bp.tools.prepare.chats.source import Chats
from megatron_bp.tools.prepare.options import Options
from megatron_bp.tools.prepare.outcome import CODE, MisfitError, Piece, RejectedError
from megatron_bp.tools.prepare.reading import FAILED, JSON
from megatron_bp.tools.prepare.texts import Texts
from megatron_bp.tools.prepare.tokenizing import Ids, Tokenizer

LONGEST = 2**31 - 1  # an .idx holds lengths as int32


@dataclass(frozen=True, eq=False)
class Encoded:
    """What became of a batch of n raw documents.

    Attributes:
        ids: the good documents' ids, one after the other.
        supervised: bool, one for each id; empty for texts.
        reason: uint8[n], code of the reason why it is left out, 0 if it is good.
        tokens: int64[n], length in ids; 0 unless good.
        size: int64[n], UTF-8 bytes of the (supervised) text; 0 unless good.
        turns: int64[n], supervised turns of a chat.
        roles: int64[n], bits of their roles, see `Piece`.
        digest: uint64[n, 2], of the content.
        detail: more words on the first document of a reason, by its place in the batch.
        fatal: (which one, what is wrong and the way out) if tokenizer or template do not fit.
    """

    ids: Ids
    supervised: NDArray[np.bool_]
    reason: NDArray[np.uint8]
    tokens: NDArray[np.int64]
    size: NDArray[np.int64]
    turns: NDArray[np.int64]
    roles: NDArray[np.int64]
    digest: NDArray[np.uint64]
    detail: dict[int, str]
    fatal: tuple[int, str] | None


def token_dtype(vocabulary: int) -> type[np.uint16] | type[np.int32]:
    """Return the type of an id in the .bin: Megatron's own choice (DType.optimal_dtype)."""
    return np.uint16 if vocabulary < 65500 else np.int32


class Encoder:
    """Encodes batches with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, options: Options) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.dtype = token_dtype(tokenizer.vocabulary)
        self.chats = Chats(tokenizer, options) if options.format == "chats" else None
        self._pieces = self.chats or Texts(tokenizer, options)

    def __call__(self, items: list[tuple[int, bytes]]) -> Encoded:
        n = len(items)
        ids: list[Ids] = [np.zeros(0, self.dtype)]
        supervised = [np.zeros(0, np.bool_)]
        reason, digest = np.zeros(n, np.uint8), np.zeros((n, 2), np.uint64)
        tokens, size, turns, roles = (np.zeros(n, np.int64) for _ in range(4))
        detail: dict[int, str] = {}
        fatal = None
        for i, (kind, data) in enumerate(items):
            try:
                piece = self._piece(kind, data)
            except RejectedError as error:
                code = CODE[error.reason]
                if error.detail and code not in reason[:i]:
                    detail[i] = error.detail
                reason[i] = code
                continue
            except MisfitError as error:
                fatal = (i, str(error))
                break
            ids.append(piece.ids)
            supervised.append(piece.supervised)
            tokens[i], size[i], turns[i] = len(piece.ids), piece.size, piece.turns
            roles[i] = piece.roles
            digest[i] = np.frombuffer(hashlib.sha256(piece.content).digest()[:16], np.uint64)
        return Encoded(
            np.concatenate(ids, dtype=self.dtype, casting="unsafe"),  # in range: see _piece
            np.concatenate(supervised),
            reason,
            tokens,
            size,
            turns,
            roles,
            digest,
            detail,
            fatal,
        )

    def _piece(self, kind: int, data: bytes) -> Piece:
        if kind == FAILED:
            raise RejectedError(data.decode())
        piece = self._pieces(data, kind == JSON)
        ids, vocabulary = piece.ids, self.tokenizer.vocabulary
        if len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
            worst = int(ids.min() if ids.min() < 0 else ids.max())
            raise MisfitError(
                f"the tokenizer gives id {worst}, and its vocabulary has the ids 0 to "
                f"{vocabulary - 1}; check --tokenizer-type and its flags."
            )
        if not self.options.min_tokens <= len(ids) <= LONGEST:
            raise RejectedError("too_long" if len(ids) > LONGEST else "too_short")
        return piece
