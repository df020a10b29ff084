"""What the command line of prepare sets, checked once."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FORMATS = ("auto", "text", "jsonl")
SEPARATORS = ("file", "line", "blank-line")


@dataclass(frozen=True)
class Options:
    """What the command line sets; see `command.parse`.

    Attributes:
        tokenizer_flags: Megatron's own tokenizer flags; none means bytes.
        workers: processes that tokenize; the output does not depend on it.
    """

    input: Sequence[Path]
    output_prefix: Path
    suffix: Sequence[str] = ()
    exclude: Sequence[str] = ()
    max_bytes: int | None = None
    min_tokens: int = 2
    append_eod: bool = False
    seed: int = 1234
    overwrite: bool = False
    format: str = "auto"
    document_separator: str = "file"
    json_key: str = "text"
    strict: bool = False
    tokenizer_flags: Sequence[str] = ()
    workers: int = 1

    def __post_init__(self) -> None:
        if self.output_prefix.name in ("", ".."):
            raise ValueError(
                f"--output-prefix {self.output_prefix}: names no file; give a folder and a name, "
                f"such as data/mine."
            )
        if self.min_tokens < 1:
            raise ValueError(f"--min-tokens is {self.min_tokens}: a document has at least 1 token.")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"--max-bytes is {self.max_bytes}: give 1 or more, or leave it away.")
        if self.workers < 1:
            raise ValueError(f"--workers is {self.workers}: give 1 or more.")
        if self.format not in FORMATS:
            raise ValueError(f"--format is {self.format}: choose one of {', '.join(FORMATS)}.")
        if self.document_separator not in SEPARATORS:
            raise ValueError(
                f"--document-separator is {self.document_separator}: choose one of "
                f"{', '.join(SEPARATORS)}."
            )
        for path in self.input:
            if not os.path.exists(path):
                raise ValueError(f"--input {path} does not exist: give a file or a folder.")
