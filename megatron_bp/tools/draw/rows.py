"""Packed rows to draw: given document by document, or of random lengths."""

import numpy as np

from megatron_bp.data.document import Document
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.tools.modes import random_row


def described(text: str, length: int | None = None) -> Sample:
    """The packed row that a text describes.

    Args:
        text: documents and their tokens, "22,8+6,20": three, of which the second has a prompt of 8
            and an answer of 6.
        length: of the row; None for just what the documents hold.

    Raises:
        ValueError: the text is no such list, or the documents do not fit.
    """
    documents = []
    for key, part in enumerate(text.split(",")):
        prompt, plus, answer = part.rpartition("+")
        if not answer.isdecimal() or not (prompt.isdecimal() if plus else True):
            raise ValueError(
                f"--documents {text}: {part!r} is neither tokens nor PROMPT+ANSWER; write numbers "
                f"with commas between, such as 22,8+6,20"
            )
        before, after = int(prompt or 0), int(answer)
        supervised = np.arange(before + after) >= before
        documents.append(Document(np.zeros(before + after, np.int32), supervised, key))
    used = sum(len(document.tokens) for document in documents)
    if used == 0:
        raise ValueError(f"--documents {text}: holds no token; give at least one")
    return pack(documents, used if length is None else length)


def random_lengths(length: int, documents: int, seed: int) -> Sample:
    """A row of documents of random lengths, as `tools.modes --draws` takes them.

    Raises:
        ValueError: there are more documents than tokens, or none.
    """
    if not 1 <= documents <= length:
        raise ValueError(f"--random {documents}: must be from 1 to --length {length}")
    return random_row(length, documents, seed)


def told(sample: Sample) -> str:
    """The row in words."""
    tokens, documents = int(np.count_nonzero(sample.document >= 0)), len(sample.document_keys)
    several = "one document" if documents == 1 else f"{documents} documents"
    return f"{tokens:,} tokens in {several}"
