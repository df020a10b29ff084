"""What becomes of one raw document: a piece of the data set, or a reason why it is left out."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_bp.tools.prepare.tokenizing import Ids

OF_CHATS = (
    "bad_type",
    "empty_turn",
    "missing_content",
    "missing_role",
    "no_messages",
    "no_supervised_turn",
    "not_a_chat",
    "special_token_in_text",
    "template_changes_text",
    "template_refuses",
    "template_rewrites_history",
    "turn_too_long",
    "unknown_role",
)
FLAWS = (  # what --strict makes an error
    "bad_gzip",
    "bad_json",
    "missing_key",
    "not_a_string",
    "not_an_object",
    "not_utf8",
    "nul_byte",
    "unreadable",
    *OF_CHATS,
)
REASONS = ("", *FLAWS, "duplicate", "too_long", "too_short")  # a code is the place in here
OF_A_FILE = ("bad_gzip", "unreadable")  # no document of such a file is taken
CODE = {reason: code for code, reason in enumerate(REASONS)}


@dataclass(frozen=True, eq=False)
class Piece:
    """A document that can be one.

    Attributes:
        ids: n ids.
        content: what is alike of equal documents.
        size: UTF-8 bytes of the text; of a chat, of its supervised text.
        supervised: bool[n] of a chat; empty for a text, of which all is.
        turns: how many turns are supervised; 0 for a text.
        roles: bit k says that a turn of the k-th of --supervise-roles is; 0 for a text.
    """

    ids: Ids
    content: bytes
    size: int
    supervised: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    turns: int = 0
    roles: int = 0


class RejectedError(Exception):
    """A raw document that cannot be one: the reason, and more words on it in one line."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, " ".join(detail.split())[:300]


class MisfitError(ValueError):
    """Tokenizer or template do not fit the document, so likely no other: with the way out."""
