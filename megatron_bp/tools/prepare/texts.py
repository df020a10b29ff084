"""Raw documents of plain text or JSON lines with a text, to ids."""

import numpy as np

from megatron_bp.tools.prepare.objects import decoded, object_in
from megatron_bp.tools.prepare.options import Options
from megatron_bp.tools.prepare.outcome import MisfitError, Piece, RejectedError
from megatron_bp.tools.prepare.tokenizing import Ids, Tokenizer, first_line


def text_in(data: bytes, json_key: str | None) -> str:
    """Return the text of a raw document: under a key of its JSON, or all of it.

    Raises:
        RejectedError: it holds none.
    """
    text = decoded(data)
    if json_key is not None:
        value = object_in(text)
        if json_key not in value:
            raise RejectedError("missing_key")
        text = value[json_key]
        if not isinstance(text, str):
            raise RejectedError("not_a_string")
    if "\0" in text:
        raise RejectedError("nul_byte")
    return text


class Texts:
    """Makes pieces of texts."""

    def __init__(self, tokenizer: Tokenizer, options: Options) -> None:
        self.tokenizer, self.options = tokenizer, options

    def __call__(self, data: bytes, json: bool) -> Piece:
        """Return the piece of a raw document.

        Raises:
            RejectedError: it cannot be one.
            MisfitError: the tokenizer fails on it.
        """
        text = text_in(data, self.options.json_key if json else None)
        try:
            encoded = text.encode("utf-8")  # fails on half a surrogate pair, which JSON can say
        except UnicodeEncodeError:
            raise RejectedError("not_utf8") from None
        return Piece(self._ids(text), encoded, len(encoded))

    def _ids(self, text: str) -> Ids:
        try:
            ids = self.tokenizer.encode(text)
        except Exception as error:  # tokenizers are not ours and raise all kinds
            raise MisfitError(
                f"the tokenizer fails on it ({first_line(error)}); check --tokenizer-type and its "
                f"flags."
            ) from error
        if self.options.append_eod:
            assert self.tokenizer.eod_id is not None
            return np.append(ids.astype(np.int64), self.tokenizer.eod_id)
        return ids
