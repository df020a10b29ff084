"""Bytes to text, and a line of JSON to its object."""

import json
from typing import Any

from megatron_bp.tools.prepare.outcome import RejectedError


def decoded(data: bytes) -> str:
    """Return the text.

    Raises:
        RejectedError: it is no UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise RejectedError("not_utf8") from None


def object_in(text: str) -> dict[str, Any]:
    """Return the object that a line of JSON holds.

    Raises:
        RejectedError: it holds none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise RejectedError("bad_json") from None
    if not isinstance(value, dict):
        raise RejectedError("not_an_object")
    return value
