"""Files to raw documents: whole files, lines, paragraphs and JSON lines, each also gzipped.

A raw document is bytes; what they hold is looked at in `encoding`. Knows nothing of tokenizers.
"""

import contextlib
import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

from megatron_bp.tools.prepare.inputs import Found, is_jsonl
from megatron_bp.tools.prepare.options import Options

TEXT, JSON, FAILED = 0, 1, 2  # what an item's bytes are; FAILED: a reason, for the whole file
BATCH_BYTES, BATCH_ITEMS = 1 << 20, 4096  # independent of the workers, so is the output
BOM = b"\xef\xbb\xbf"
Advance = Callable[[int], object]  # told of bytes of the input that were read


@dataclass
class Batch:
    """Raw documents: items are (TEXT, JSON or FAILED; bytes), places (number of the file, line).

    Line 0 stands for the whole file.
    """

    items: list[tuple[int, bytes]] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)


class ReadError(Exception):
    """A file that cannot be read to its end: none of it is taken."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(reason)
        self.reason, self.line = reason, line


def is_whole(found: Found, options: Options) -> bool:
    """Whether the file is one document."""
    return options.document_separator == "file" and not is_jsonl(found.name, options.format)


def batches(files: Sequence[Found], options: Options, advance: Advance) -> Iterator[Batch]:
    """Yield all raw documents of the files in order, some at a time."""
    batch, size = Batch(), 0
    for number, found in enumerate(files):
        for kind, line, data in _items(found, options, advance):
            batch.items.append((kind, data))
            batch.places.append((number, line))
            size += len(data)
            if size >= BATCH_BYTES or len(batch.items) >= BATCH_ITEMS:
                yield batch
                batch, size = Batch(), 0
    if batch.items:
        yield batch


def _items(found: Found, options: Options, advance: Advance) -> Iterator[tuple[int, int, bytes]]:
    kind = JSON if is_jsonl(found.name, options.format) else TEXT
    try:
        for line, data in _documents(found, options, advance):
            yield kind, line, data
    except ReadError as error:
        yield FAILED, error.line, error.reason.encode()


def _documents(found: Found, options: Options, advance: Advance) -> Iterator[tuple[int, bytes]]:
    """Yield (first line, bytes) of each document of a file.

    Raises:
        ReadError: the file cannot be read to its end.
    """
    line = 0
    try:
        if is_whole(found, options) and not found.gzipped:
            data = found.path.read_bytes()
            advance(len(data))
            yield 0, data
            return
        with open(found.path, "rb") as raw, contextlib.ExitStack() as stack:
            stream: IO[bytes] | gzip.GzipFile = raw
            if found.gzipped:
                stream = stack.enter_context(gzip.GzipFile(fileobj=raw))
            if is_whole(found, options):
                data = stream.read()
                advance(raw.tell())
                yield 0, data
                return
            blank = options.document_separator == "blank-line"
            jsonl = is_jsonl(found.name, options.format)
            told = 0
            cut = _paragraphs if blank and not jsonl else _lines
            for line, data in cut(stream):
                yield line, data.removeprefix(BOM) if jsonl and line == 1 else data
                if raw.tell() != told:
                    advance(raw.tell() - told)
                    told = raw.tell()
            advance(raw.tell() - told)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ReadError("bad_gzip", line) from error
    except OSError as error:
        raise ReadError("unreadable", line) from error


def _lines(stream: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, without their ends."""
    for number, line in enumerate(stream, 1):
        if line.strip():
            yield number, line.rstrip(b"\r\n")


def _paragraphs(stream: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield what blank lines separate, without the end of its last line."""
    block: list[bytes] = []
    start = 0
    for number, line in enumerate(stream, 1):
        if line.strip():
            start = start if block else number
            block.append(line)
        elif block:
            yield start, b"".join(block).rstrip(b"\r\n")
            block = []
    if block:
        yield start, b"".join(block).rstrip(b"\r\n")


def document_at(found: Found, line: int, options: Options) -> bytes:
    """Return the document of a file that starts at a line, read once more.

    Raises:
        ValueError: there is none any more.
    """
    for number, data in _documents(found, options, lambda read: None):
        if number == line:
            return data
    raise ValueError(f"{found.path} was changed while it was read; prepare it again.")
