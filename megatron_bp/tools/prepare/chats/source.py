"""A line of a file of chats to a piece of the data set."""

from typing import Any

import numpy as np

from megatron_bp.tools.prepare.chats.parse import ROLES, Limits, chat_in
from megatron_bp.tools.prepare.chats.spans import Marked, mark
from megatron_bp.tools.prepare.chats.template import Template
from megatron_bp.tools.prepare.chats.tokens import (
    EOD_TEXT,
    ByteOffsets,
    HuggingFaceOffsets,
    Offsets,
    tokenized,
)
from megatron_bp.tools.prepare.options import Options
from megatron_bp.tools.prepare.outcome import MisfitError, Piece, RejectedError
from megatron_bp.tools.prepare.tokenizing import ByteTokenizer, Ids, MegatronTokenizer, Tokenizer

SHOWN_TURNS, SHOWN_TEXT = 20, 600  # of a sample: supervised turns, characters of a piece of text


class Chats:
    """Makes pieces of chats."""

    def __init__(self, tokenizer: Tokenizer, options: Options) -> None:
        """Look at tokenizer and template.

        Args:
            tokenizer: of bytes, or a fast one of Hugging Face.
            options: the template, which turns are supervised, and how they end.

        Raises:
            ValueError: they do not fit together.
        """
        hugging_face = None
        self._offsets: Offsets = ByteOffsets()
        variables: dict[str, Any] = {"eos_token": EOD_TEXT}
        if not isinstance(tokenizer, ByteTokenizer):
            hugging_face = _fast(tokenizer)
            self._offsets = HuggingFaceOffsets(hugging_face)
            variables = dict(hugging_face.special_tokens_map)
            if options.split_at_spans:
                self._offsets.check_pieces()
        if options.answer_end == "eos" and tokenizer.eod_id is None:
            raise ValueError("--answer-end eos: the tokenizer has no EOS token; give another end.")
        self._tokenizer, self._options = tokenizer, options
        self._template = Template(options.chat_template, variables, hugging_face)
        roles = dict.fromkeys([*ROLES, *options.supervise_roles])
        self._limits = Limits(tuple(roles), options.max_turn_bytes, self._offsets.special)

    def __call__(self, data: bytes, json: bool = True) -> Piece:
        """Return the piece of a line.

        Raises:
            RejectedError: it cannot be one.
            MisfitError: tokenizer or template do not fit it.
        """
        assert json
        marked = self._marked(data)
        ids, supervised = tokenized(
            marked.text, marked.spans, self._offsets, self._options.split_at_spans
        )
        self._check_special(marked.text, ids)
        if marked.eos:
            assert self._tokenizer.eod_id is not None
            ids, supervised = np.append(ids, self._tokenizer.eod_id), np.append(supervised, True)
        mask_id = self._tokenizer.mask_id
        if mask_id is not None and (ids == mask_id).any():
            raise MisfitError(
                f"the chat's text holds the mask token (id {mask_id}), which no text may; mend the "
                f"template."
            )
        spans = [(x.start, x.stop) for x in marked.spans]
        content = f"{marked.text}\0{spans}{marked.eos}".encode()
        return Piece(ids, content, marked.supervised_bytes, supervised, len(spans), marked.roles)

    def _check_special(self, text: str, ids: Ids) -> None:
        """Reject text that becomes a special token without being one's text.

        A tokenizer that changes letters before it looks for special tokens can make one of others.
        """
        offsets = self._offsets
        want = sum(x[0] != offsets.unknown for x in offsets.special.finditer(text))
        got = int(np.isin(ids, offsets.special_ids).sum())
        if got != want:
            words = f"it holds {want} special tokens, and the tokenizer makes {got} of it"
            raise RejectedError("special_token_in_text", words)

    def _marked(self, data: bytes) -> Marked:
        chat = chat_in(data, self._limits)
        return mark(chat, self._template, self._offsets.special, self._options)

    def sample(self, data: bytes) -> str:
        """Return the text of a chat, supervised text as >>>text<<<, long texts cut short."""
        marked = self._marked(data)
        parts, at = [], 0
        for i, span in enumerate(marked.spans[:SHOWN_TURNS]):
            eos = EOD_TEXT if isinstance(self._tokenizer, ByteTokenizer) else "[EOS]"
            end = marked.text[span.end : span.stop]
            end += eos if marked.eos and i == len(marked.spans) - 1 else ""
            parts += [_short(marked.text[at : span.start]), ">>>"]
            parts += [_short(marked.text[span.start : span.end]), end, "<<<"]
            at = span.stop
        more = len(marked.spans) - SHOWN_TURNS
        parts.append(f"[{more} more supervised turns]" if more > 0 else _short(marked.text[at:]))
        return "".join(parts)

    def describe(self) -> dict[str, Any]:
        """Return what P.json says of template and spans."""
        options = self._options
        return {
            "template": self._template.describe(),
            "spans": {
                "supervise": options.supervise,
                "supervise_roles": list(options.supervise_roles),
                "answer_header": options.answer_header,
                "answer_end": options.answer_end,
                "split_at_spans": options.split_at_spans,
                "max_turn_bytes": options.max_turn_bytes,
            },
        }


def _fast(tokenizer: Tokenizer) -> Any:
    """Return the fast tokenizer of transformers under Megatron's.

    Raises:
        ValueError: there is none.
    """
    inner = tokenizer.hugging_face if isinstance(tokenizer, MegatronTokenizer) else None
    if inner is None or not getattr(inner, "is_fast", False):
        raise ValueError(
            "--format chats needs to know which characters a token stands for: give "
            "--tokenizer-type HuggingFaceTokenizer with a fast tokenizer (tokenizer.json), or no "
            "tokenizer flags for bytes."
        )
    return inner


def _short(text: str) -> str:
    left = len(text) - SHOWN_TEXT
    half = SHOWN_TEXT // 2
    return text if left <= 0 else f"{text[:half]}[... {left} characters ...]{text[-half:]}"
