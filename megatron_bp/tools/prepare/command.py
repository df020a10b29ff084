"""The command line of prepare."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from megatron_bp.tools.prepare.inputs import walk
from megatron_bp.tools.prepare.options import (
    ANSWER_ENDS,
    ANSWER_HEADERS,
    FORMATS,
    SEPARATORS,
    SUPERVISE,
    Options,
)
from megatron_bp.tools.prepare.report import Tally, told
from megatron_bp.tools.prepare.run import prepare

DESCRIPTION = """Text and chats to Megatron's .bin and .idx, by bytes or any Megatron tokenizer.

Megatron's own tokenizer flags (--tokenizer-type, --tokenizer-model, --vocab-size, ...) are taken as
well. docs/data.md has examples."""


def _prefix(text: str) -> Path:
    if text.endswith(("/", os.sep)):
        raise argparse.ArgumentTypeError(f"{text} names no file; give a folder and a name")
    return Path(text)


def parse(argv: Sequence[str] | None) -> Options:
    """Return the options that the command line gives."""
    parser = argparse.ArgumentParser(
        "python -m megatron_bp.tools.prepare",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", nargs="+", type=Path, required=True, metavar="PATH", help="files or folders")
    add(
        "--output-prefix",
        type=_prefix,
        required=True,
        metavar="P",
        help="writes P.bin, P.idx, P.bytes.npy, P.json, of chats P.supervised.npy",
    )
    add("--suffix", nargs="+", action="extend", help="only names that end so (or so and .gz)")
    add("--exclude", nargs="+", action="extend", metavar="GLOB", help="not these paths or names")
    add(
        "--format",
        choices=FORMATS,
        help="auto (default): .jsonl, .ndjson, .json.gz are JSON lines with a text; chats: JSON "
        "lines with messages, or prompt and completion",
    )
    add("--document-separator", choices=SEPARATORS, help="between texts (default: a file is one)")
    add("--json-key", metavar="KEY", help="of the text in a JSON line (default text)")
    add("--strict", action="store_true", help="a flawed document is an error, not a counted skip")
    add("--tokenizer", choices=["bytes"], help="the default; else use Megatron's --tokenizer-type")
    add("--append-eod", action="store_true", help="end each document with the tokenizer's eod id")
    add("--workers", type=int, metavar="N", help="processes that tokenize (default 1)")
    add("--max-bytes", type=int, metavar="N", help="stop after the document that reaches N bytes")
    add("--min-tokens", type=int, metavar="N", help="skip shorter documents (default 2)")
    add("--seed", type=int, help="of the order of the documents (default 1234)")
    add("--overwrite", action="store_true", help="replace an earlier P")
    _add_flags_of_chats(parser.add_argument_group("with --format chats"))
    known, rest = parser.parse_known_args(argv)
    megatron = any(token.split("=")[0] == "--tokenizer-type" for token in rest)
    if rest and not megatron:
        parser.error(f"unrecognized arguments: {' '.join(rest)} (Megatron's need --tokenizer-type)")
    if megatron and known.tokenizer:
        parser.error("--tokenizer bytes and --tokenizer-type exclude each other: give one")
    given = {k: v for k, v in vars(known).items() if v is not None and k != "tokenizer"}
    return Options(**given, tokenizer_flags=tuple(rest))


def _add_flags_of_chats(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--chat-template", type=Path, metavar="FILE", help="Jinja (default: the tokenizer's own)")
    add("--supervise", choices=SUPERVISE, help="all (default) or the last of the turns of ...")
    add("--supervise-roles", nargs="+", metavar="ROLE", help="... these roles (default assistant)")
    add(
        "--answer-header",
        choices=ANSWER_HEADERS,
        help="a template's text between its generation prompt and an answer: an error (refuse, the "
        "default), left unsupervised (skip), or the start of the answer (supervise)",
    )
    add(
        "--answer-end",
        choices=ANSWER_ENDS,
        help="supervise the template's special token that ends the turn (turn, the default), the "
        "EOS token at the end of a chat instead of what the template puts there (eos), or none",
    )
    add(
        "--split-at-spans",
        action="store_true",
        help="tokenize supervised texts apart, as when an answer is generated",
    )
    add("--max-turn-bytes", type=int, metavar="N", help="of a message, at most (default 16 MiB)")


def input_size(options: Options) -> int:
    """Return the bytes of the files that will be read."""
    size = 0
    for found in walk(options.input, options.suffix, options.exclude, Tally().skipped):
        with contextlib.suppress(OSError):
            size += os.path.getsize(found.path)
    return size


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    try:
        options = parse(argv)
        # disable=None: no bar unless somebody is looking at a terminal.
        with tqdm(total=None, unit="B", unit_scale=True, disable=None) as bar:
            if not bar.disable:
                bar.reset(total=input_size(options))
            result = prepare(options, bar.update)
    except (ValueError, OSError) as error:
        sys.exit(f"prepare: error: {error}")
    print(summary(options.output_prefix, result))
    if "sample" in result:
        encoding = sys.stdout.encoding or "utf-8"
        sample = result["sample"].encode(encoding, "backslashreplace").decode(encoding)
        print(f"its first chat, supervised text in >>> <<<:\n{sample}")
    for reason, places in result["skipped_places"].items():
        detail = result.get("skipped_details", {}).get(reason)
        words = f"; first {detail}" if detail else ""
        print(f"  {reason}: {', '.join(places)}{words}", file=sys.stderr)


def summary(prefix: Path, result: dict[str, Any]) -> str:
    """Return a line on what was written."""
    chats = ""
    if "supervised_tokens" in result:
        chats = (
            f"{result['supervised_tokens']} of them supervised in {result['supervised_turns']} "
            f"turns, "
        )
    silent = [role for role, count in result.get("chats_by_role", {}).items() if not count]
    warning = f"\nwarning: --supervise-roles: no chat has a turn of {', '.join(silent)}"
    return (
        f"{prefix}: {result['documents']} documents, {result['tokens']} tokens, {chats}"
        f"{result['unigram_bits_per_byte']:.3f} bits per byte by unigrams; "
        f"left out: {told(result['skipped'])}{warning if silent else ''}"
    )
