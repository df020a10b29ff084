"""What prepare's P.json says of a data set, and whether it is of this one.

Knows nothing of ids or masks.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from megatron_bp.data.indexed import AGAIN, DataError

CHECKSUM_BYTES = 2 << 30  # checksums of more are not verified
DESCRIPTION_BYTES = 1 << 20  # a P.json above this is none of prepare's
BESIDE = ("bytes.npy", "supervised.npy")  # their checksum is looked at where they are there


def description(prefix: str) -> dict[str, Any]:
    """Return what prepare's P.json says; empty if there is none, or it is another tool's.

    Raises:
        DataError: it is damaged.
    """
    path = f"{prefix}.json"
    if not os.path.isfile(path) or os.path.getsize(path) > DESCRIPTION_BYTES:
        return {}
    with open(path, "rb") as stream:
        text = stream.read()
    if b'"megatron_bp"' not in text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is damaged ({error}); {AGAIN}, or remove it") from error
    return value if isinstance(value, dict) else {}


def check_description(prefix: str, said: Mapping[str, Any], documents: int, tokens: int) -> str:
    """Return whether the checksums in P.json were verified; its counts must be the data's.

    Raises:
        DataError: they are not, or a file was changed.
    """
    for name, count in (("documents", documents), ("tokens", tokens)):
        check_number(prefix, name, said.get(name, count))
        if said.get(name, count) != count:
            raise DataError(
                f"{prefix}.json: says {said[name]} {name}, and there are {count}: it belongs to "
                f"other data; {AGAIN}, or remove it"
            )
    sums = said.get("sha256")
    if sums is None:
        return "none"
    needed = ("bin", "idx", "supervised.npy")[: 3 if said.get("kind") == "chats" else 2]
    if not isinstance(sums, dict) or not sums.keys() >= set(needed):
        raise DataError(
            f"{prefix}.json: its sha256 is {sums!r}, with no {' and '.join(needed)}; {AGAIN}"
        )
    if os.path.getsize(f"{prefix}.bin") >= CHECKSUM_BYTES:
        return "skipped"
    for ending in ("bin", "idx", *BESIDE):
        path, want = f"{prefix}.{ending}", sums.get(ending)
        if want is None or (ending in BESIDE and not os.path.lexists(path)):
            continue
        with open(path, "rb") as stream:
            got = hashlib.file_digest(stream, "sha256").hexdigest()
        if got != want:
            raise DataError(
                f"{path}: its sha256 is {got[:16]}..., and {prefix}.json says {str(want)[:16]}...: "
                f"it was changed after it was prepared; {AGAIN}"
            )
    return "verified"


def check_number(prefix: str, name: str, value: Any) -> None:
    """Raise a DataError if what P.json says of a count is no whole number, such as a text of one.

    Args:
        prefix: P.
        name: of the field.
        value: what P.json says.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(
            f"{prefix}.json: {name} is {value!r}, and has to be a whole number; write it as one, "
            f"or {AGAIN}"
        )


def unreadable(prefix: str, error: OSError) -> DataError:
    """Return the error of a file of a data set that cannot be read."""
    return DataError(
        f"{error.filename or prefix}: cannot be read ({error.strerror or error}): give the prefix "
        f"of a .bin/.idx pair (`python -m megatron_bp.tools.prepare` makes one)"
    )
