"""Source trees to Megatron's .bin and .idx, byte by byte: one file is one document.

Ids 0 to 255 are the bytes, 256 ends a document, 257 is the mask. The order of the documents is
shuffled by the seed and their paths, so that Megatron's split by position is a fair one, and a
smaller --max-bytes takes a prefix of a larger one. Knows nothing of blocks, noise or models.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp import __version__

EOD_ID = 256
MASK_ID = 257
BYTE_VOCABULARY = 258
ENDINGS = (".bin", ".json", ".idx")  # in the order in which they get their final names

TOKENIZER = {
    "kind": "bytes",
    "vocabulary": BYTE_VOCABULARY,
    "eod_id": EOD_ID,
    "mask_id": MASK_ID,
    "flags": f"--tokenizer-type NullTokenizer --vocab-size {BYTE_VOCABULARY}"
    f" --null-tokenizer-eod-id {EOD_ID} --mask-token-id {MASK_ID}",
}


@dataclass(frozen=True)
class Found:
    """A file: its name inside the input it was found in, and where it lies."""

    name: str
    path: Path


@dataclass(frozen=True)
class Options:
    """What the command line sets; see `parse`."""

    input: Sequence[Path]
    output_prefix: Path
    suffix: Sequence[str] = ()
    exclude: Sequence[str] = ()
    max_bytes: int | None = None
    min_tokens: int = 2
    append_eod: bool = False
    seed: int = 1234
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ValueError(f"--min-tokens is {self.min_tokens}: a document has at least 1 token.")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"--max-bytes is {self.max_bytes}: give 1 or more, or leave it away.")
        for path in self.input:
            if not os.path.exists(path):
                raise ValueError(f"--input {path} does not exist: give a file or a folder.")
        for ending in ENDINGS:
            final = f"{self.output_prefix}{ending}"
            if os.path.lexists(final) and not self.overwrite:
                raise ValueError(f"{final} exists: give another --output-prefix, or --overwrite.")


@dataclass
class Tally:
    """What went into the data set, and what did not."""

    documents: int = 0
    bytes: int = 0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BYTE_VOCABULARY, np.int64))
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())


def excluded(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern fits the whole of `name` or one of the names in it."""
    parts = (name, *name.split("/"))
    return any(fnmatch.fnmatchcase(part, pattern) for pattern in patterns for part in parts)


def walk(
    inputs: Sequence[Path], suffixes: Sequence[str], exclude: Sequence[str], skipped: Counter[str]
) -> Iterator[Found]:
    """Yield the regular files under `inputs` in sorted order; counts the others in `skipped`.

    An input that is itself a link is followed; a link inside it is not.
    """

    def wanted(name: str, path: Path) -> bool:
        reason = None
        if excluded(name, exclude):
            reason = "excluded"
        elif os.path.islink(path):
            reason = "symlink"
        elif not os.path.isdir(path):
            if not os.path.isfile(path):
                reason = "not_a_regular_file"
            elif suffixes and not name.endswith(tuple(suffixes)):
                reason = "other_suffix"
        if reason:
            skipped[reason] += 1
        return reason is None

    def unreadable(error: OSError) -> None:
        skipped["unreadable"] += 1

    for number, given in enumerate(inputs):
        root = given.resolve()
        if root.is_file():
            if wanted(root.name, root):
                yield Found(f"{number}/{root.name}", root)
            continue
        for folder, folders, files in os.walk(root, onerror=unreadable):
            inside = Path(folder).relative_to(root)
            folders[:] = sorted(
                x for x in folders if wanted((inside / x).as_posix(), root / inside / x)
            )
            for file in sorted(files):
                name = (inside / file).as_posix()
                if wanted(name, root / name):
                    yield Found(f"{number}/{name}", root / name)


def shuffled(files: Iterable[Found], seed: int) -> list[Found]:
    """Return the files in the seed's order: that of two files does not depend on the others."""
    return sorted(files, key=lambda x: hashlib.sha256(os.fsencode(f"{seed}/{x.name}")).digest())


def flaw(text: bytes) -> str | None:
    """Return why `text` cannot be a document, None if it can."""
    if b"\0" in text:
        return "nul_byte"
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return "not_utf8"
    return None


def encode(text: bytes, append_eod: bool) -> NDArray[np.uint16]:
    """Return the ids of `text`, shape [bytes] or [bytes + 1]."""
    ids = np.frombuffer(text, np.uint8).astype(np.uint16)
    return np.append(ids, np.uint16(EOD_ID)) if append_eod else ids


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy of the distribution that `counts` [ids] is in proportion to, in bits."""
    p = counts[counts > 0] / max(int(counts.sum()), 1)
    return float(-(p * np.log2(p)).sum()) + 0.0  # + 0.0: no minus zero


def documents(
    files: Iterable[Found], options: Options, tally: Tally
) -> Iterator[NDArray[np.uint16]]:
    """Yield the ids of one file after the other, up to --max-bytes; counts them in `tally`."""
    seen: set[bytes] = set()
    for file in files:
        if options.max_bytes is not None and tally.bytes >= options.max_bytes:
            return
        try:
            text = file.path.read_bytes()
        except OSError:
            tally.skipped["unreadable"] += 1
            continue
        digest, ids = hashlib.sha256(text).digest(), encode(text, options.append_eod)
        reason = flaw(text)
        if reason is None and len(ids) < options.min_tokens:
            reason = "too_short"
        elif reason is None and digest in seen:
            reason = "duplicate"
        if reason:
            tally.skipped[reason] += 1
            continue
        seen.add(digest)
        tally.documents += 1
        tally.bytes += len(text)
        tally.counts += np.bincount(ids, minlength=BYTE_VOCABULARY)
        yield ids


def report(tally: Tally, seed: int) -> dict[str, Any]:
    """Return what P.json says: the same for the same files, seed and options, wherever they lie."""
    bits = entropy(tally.counts)
    return {
        "megatron_bp": __version__,
        "seed": seed,
        "documents": tally.documents,
        "tokens": tally.tokens,
        "bytes": tally.bytes,
        "skipped": dict(sorted(tally.skipped.items())),
        "unigram_bits_per_token": round(bits, 6),
        "unigram_bits_per_byte": round(bits * tally.tokens / max(tally.bytes, 1), 6),
        "tokenizer": TOKENIZER,
    }


def write_indexed(prefix: Path, sequences: Iterable[NDArray[np.uint16]]) -> None:
    """Write `prefix`.bin and .idx, each array of ids a document of one sequence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Megatron misses on a machine without a GPU
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", DType.optimal_dtype(BYTE_VOCABULARY))
    for ids in sequences:
        builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")


def publish(temporary: Path, prefix: Path) -> None:
    """Move the files to their final names, the index last: without it there is no data set."""
    Path(f"{prefix}.idx").unlink(missing_ok=True)  # an old one must not stand beside new data
    for ending in ENDINGS:
        os.replace(f"{temporary}{ending}", f"{prefix}{ending}")


def prepare(options: Options) -> dict[str, Any]:
    """Write .bin, .idx and .json, all or none, and return what .json says."""
    prefix, tally = options.output_prefix, Tally()
    files = list(walk(options.input, options.suffix, options.exclude, tally.skipped))
    if not files:
        raise ValueError(
            f"No file found in --input {' '.join(map(str, options.input))} "
            f"(left out: {told(tally.skipped)}): check the paths, --suffix and --exclude."
        )
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=f".{prefix.name}-", dir=prefix.parent)
    except OSError as error:
        raise ValueError(
            f"Cannot write in {prefix.parent} ({error.strerror}): choose another --output-prefix."
        ) from error
    with scratch:  # removed with what is in it, whatever happens
        temporary = Path(scratch.name, "data")
        write_indexed(temporary, documents(shuffled(files, options.seed), options, tally))
        if not tally.documents:
            raise ValueError(
                f"None of {len(files)} files can be a document "
                f"(left out: {told(tally.skipped)}): check --suffix, --exclude and --min-tokens."
            )
        result = report(tally, options.seed)
        Path(f"{temporary}.json").write_text(json.dumps(result, indent=2) + "\n")
        publish(temporary, prefix)
    return result


def told(skipped: Mapping[str, int]) -> str:
    """Return the counts in words: "2 duplicate, 1 symlink"."""
    return ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items())) or "none"


def parse(argv: Sequence[str] | None) -> Options:
    """Return the options that the command line gives."""
    parser = argparse.ArgumentParser("python -m megatron_bp.tools.prepare", description=__doc__)
    add = parser.add_argument
    add("--input", nargs="+", type=Path, required=True, metavar="PATH", help="files or folders")
    add("--output-prefix", type=Path, required=True, metavar="P", help="writes P.bin, .idx, .json")
    add("--suffix", nargs="+", action="extend", help="only names that end so")
    add("--exclude", nargs="+", action="extend", metavar="GLOB", help="not these paths or names")
    add("--max-bytes", type=int, metavar="N", help="stop after the document that reaches N bytes")
    add("--min-tokens", type=int, metavar="N", help="skip shorter documents (default 2)")
    add("--append-eod", action="store_true", help=f"end each document with id {EOD_ID}")
    add("--seed", type=int, help="of the order of the documents (default 1234)")
    add("--overwrite", action="store_true", help="replace an earlier P")
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    return Options(**given)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    try:
        options = parse(argv)
        result = prepare(options)
    except (ValueError, OSError) as error:
        sys.exit(f"prepare: error: {error}")
    print(
        f"{options.output_prefix}: {result['documents']} documents, {result['tokens']} tokens, "
        f"{result['unigram_bits_per_byte']:.3f} bits per byte by unigrams; "
        f"left out: {told(result['skipped'])}"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files go too
    main()
