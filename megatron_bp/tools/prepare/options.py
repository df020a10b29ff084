"""What the command line of prepare sets, checked once."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FORMATS = ("auto", "text", "jsonl", "chats")
SEPARATORS = ("file", "line", "blank-line")
SUPERVISE = ("all", "last")
ANSWER_HEADERS = ("refuse", "skip", "supervise")
ANSWER_ENDS = ("turn", "eos", "none")
OF_CHATS = {  # fields that mean something for chats only, by their flags
    "chat_template": "--chat-template",
    "supervise": "--supervise",
    "supervise_roles": "--supervise-roles",
    "answer_header": "--answer-header",
    "answer_end": "--answer-end",
    "split_at_spans": "--split-at-spans",
    "max_turn_bytes": "--max-turn-bytes",
}
OF_TEXTS = {
    "append_eod": "--append-eod (--answer-end says how a chat ends)",
    "document_separator": "--document-separator",
    "json_key": "--json-key",
}


@dataclass(frozen=True)
class Options:
    """What the command line sets; see `command.parse`.

    Attributes:
        tokenizer_flags: Megatron's own tokenizer flags; none means bytes.
        workers: processes that tokenize; the output does not depend on it.
        chat_template: a Jinja file; None means the tokenizer's own.
        supervise: "all" or "last" of the turns of supervise_roles.
        answer_header: what a template's text between its generation prompt and an answer is: an
            error ("refuse"), unsupervised ("skip"), or the start of the answer ("supervise").
        answer_end: what ends a supervised turn: the template's special token ("turn"), the EOS id
            after the last one ("eos"), nothing that is supervised ("none").
        split_at_spans: tokenize supervised texts and the others each by itself.
        max_turn_bytes: UTF-8 bytes of all texts of a message, at most.
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
    chat_template: Path | None = None
    supervise: str = "all"
    supervise_roles: Sequence[str] = ("assistant",)
    answer_header: str = "refuse"
    answer_end: str = "turn"
    split_at_spans: bool = False
    max_turn_bytes: int = 1 << 24

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
        for flag, value, choices in (
            ("--format", self.format, FORMATS),
            ("--document-separator", self.document_separator, SEPARATORS),
            ("--supervise", self.supervise, SUPERVISE),
            ("--answer-header", self.answer_header, ANSWER_HEADERS),
            ("--answer-end", self.answer_end, ANSWER_ENDS),
        ):
            if value not in choices:
                raise ValueError(f"{flag} is {value}: choose one of {', '.join(choices)}.")
        if self.max_turn_bytes < 1:
            raise ValueError(f"--max-turn-bytes is {self.max_turn_bytes}: give 1 or more.")
        if not self.supervise_roles or not all(self.supervise_roles):
            raise ValueError("--supervise-roles: give one role or more, such as assistant.")
        if len(self.supervise_roles) > 60:  # a bit of an int64 each
            raise ValueError(f"--supervise-roles: {len(self.supervise_roles)} roles; give fewer.")
        self._check_format()
        for path in self.input:
            if not os.path.exists(path):
                raise ValueError(f"--input {path} does not exist: give a file or a folder.")

    def _check_format(self) -> None:
        """Refuse what means nothing for the format: it would be left out in silence."""
        chats = self.format == "chats"
        for name, flag in (OF_TEXTS if chats else OF_CHATS).items():
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default:
                only = "is for texts, not for --format chats" if chats else "needs --format chats"
                raise ValueError(f"{flag} {only}: leave it away.")
