"""Text for --tiny where the config's own data is not there: paragraphs of this package.

Chats for a config of chats: few of its own would fit a small row.
"""

from pathlib import Path

from megatron_bp.tools.prepare import BYTE_VOCABULARY, Options, prepare
from megatron_bp.tools.verify.configuration import Values
from megatron_bp.tools.verify.sample_chats import as_chats

OF_DATA = (
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "data_args_path",
    "per_split_data_args_path",
)
BYTES = 100_000


def has_data(values: Values) -> bool:
    """Whether every file that the config names is there."""
    named = [name for name in OF_DATA if values.get(name)]
    paths = [str(p) for n in named for p in _as_list(values[n])]
    prefixes = [p for p in paths if not p.replace(".", "", 1).isdigit()]
    if any(name.endswith("args_path") for name in named):
        return all(Path(p).is_file() for p in prefixes)
    return bool(named) and all(Path(p + ".idx").is_file() for p in prefixes)


def with_sample_data(values: Values, folder: Path) -> Values:
    """The config with data made in `folder`, by the config's own tokenizer.

    Raises:
        ValueError: the vocabulary cannot hold text as bytes; or of the tokenizer.
    """
    flags: tuple[str, ...] = ()
    kind = values.get("tokenizer_type", "NullTokenizer")
    if kind == "NullTokenizer":
        size = int(values.get("vocab_size") or 0)
        if size < BYTE_VOCABULARY:
            raise ValueError(
                f"there is no data, and a NullTokenizer of {size} ids cannot hold text as bytes "
                f"({BYTE_VOCABULARY} ids): give --data-path after --"
            )
    else:
        flags = tuple(_tokenizer_flags(values))
    prefix = folder / "sample" / "text"
    source = Path(__file__).resolve().parents[2]
    prepare(
        Options(
            input=[source],
            suffix=[".py"],
            output_prefix=prefix,
            document_separator="blank-line",
            max_bytes=BYTES,
            overwrite=True,
            tokenizer_flags=flags,
        )
    )
    if values.get("chats"):
        text, prefix = prefix, prefix.with_name("chats")
        as_chats(text, prefix)
    kept = {name: value for name, value in values.items() if name not in OF_DATA}
    return kept | {"data_path": [str(prefix)], "split": "100,0,0"}


def _tokenizer_flags(values: Values) -> list[str]:
    from megatron_bp.arguments.config_file import to_flags
    from megatron_bp.arguments.flags import full_parser

    named = ("vocab_file", "merge_file", "vocab_size", "vocab_extra_ids", "tiktoken_pattern")
    of_tokenizer = {
        name: value
        for name, value in values.items()
        if name.startswith(("tokenizer_", "null_tokenizer_", "tiktoken_")) or name in named
    }
    return to_flags(of_tokenizer, full_parser(), "the config")


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]
