"""Files to .bin, .idx and what is beside them: the order of the steps, and the errors of a run."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp.tools.prepare.encoding import Encoded, Encoder
from megatron_bp.tools.prepare.inputs import Found, shuffled, walk
from megatron_bp.tools.prepare.options import Options
from megatron_bp.tools.prepare.outcome import FLAWS, REASONS
from megatron_bp.tools.prepare.reading import Batch, batches, document_at, is_whole
from megatron_bp.tools.prepare.report import Tally, count_ids, report, told
from megatron_bp.tools.prepare.table import (
    Spool,
    Table,
    count_skipped,
    first_places,
    place_of,
    select,
)
from megatron_bp.tools.prepare.tokenizing import build
from megatron_bp.tools.prepare.workers import encoded_in_order
from megatron_bp.tools.prepare.writing import (
    MASK,
    SPOOL,
    SPOOL_MASK,
    STEM,
    checksums,
    publish,
    refuse_to_overwrite,
    scratch,
    write_indexed,
    write_mask,
)

Advance = Callable[[int], object]


def prepare(options: Options, advance: Advance = lambda read: None) -> dict[str, Any]:
    """Write the files of P, all or none, and return what P.json says.

    Args:
        options: what to do.
        advance: told of the bytes of the input that were read since the last call.

    Raises:
        ValueError: with the way out.
    """
    prefix, tally = options.output_prefix, Tally()
    found = list(walk(options.input, options.suffix, options.exclude, tally.skipped))
    if not found:
        raise ValueError(
            f"No file found in --input {' '.join(map(str, options.input))} "
            f"(left out: {told(tally.skipped)}): check the paths, --suffix and --exclude."
        )
    if options.strict and tally.skipped["unreadable"]:
        raise ValueError("--strict: a folder of --input cannot be read: check its permissions.")
    files = shuffled(found, options.seed)
    with scratch(prefix) as folder:
        if not options.overwrite:
            refuse_to_overwrite(prefix)
        tokenizer = build(options.tokenizer_flags)
        if options.append_eod and tokenizer.eod_id is None:
            raise ValueError(
                "--append-eod: the tokenizer has no end-of-document id; leave the flag away (block "
                "diffusion needs none: documents are kept apart without), or change the tokenizer."
            )
        encoder = Encoder(tokenizer, options)
        with Spool(folder / SPOOL, folder / SPOOL_MASK, files, options.seed) as spool:
            _fill(spool, encoder, options, advance)
        table = spool.table()
        kept, considered, reason = select(table, options.max_bytes)
        tally.skipped += count_skipped(reason[considered])
        if not len(kept):
            raise ValueError(
                f"None of {len(files)} files can be a document "
                f"(left out: {told(tally.skipped)}): "
                f"{_most(spool, tally, first_places(table, considered, reason, files))}"
            )
        stem = folder / STEM
        ids = np.memmap(folder / SPOOL, encoder.dtype, "r")
        write_indexed(stem, encoder.dtype, _gather(ids, table, kept))
        np.save(f"{stem}.bytes.npy", table.size[kept])
        tally.documents, tally.bytes = len(kept), int(table.size[kept].sum())
        tally.tokens = int(table.tokens[kept].sum())
        bits = None
        if encoder.chats is not None:
            mask = np.memmap(folder / SPOOL_MASK, np.bool_, "r")
            supervised = write_mask(stem, tally.tokens, _gather(mask, table, kept))
            bits = np.load(f"{stem}{MASK}", mmap_mode="r")
            first = document_at(files[table.file[kept[0]]], int(table.line[kept[0]]), options)
            tally.chats = {
                "supervised_tokens": supervised,
                "supervised_turns": int(table.turns[kept].sum()),
                "chats_by_role": {
                    role: int((table.roles[kept] >> k & 1).sum())
                    for k, role in enumerate(options.supervise_roles)
                },
                "skipped_details": {k: spool.detail[k] for k in tally.skipped if k in spool.detail},
                **encoder.chats.describe(),
                "sample": encoder.chats.sample(first),
            }
        counted = Path(f"{stem}.bin"), encoder.dtype, tokenizer.vocabulary
        tally.counts = count_ids(*counted, bits)
        tally.places = first_places(table, considered, reason, files)
        result = report(tally, options, tokenizer, checksums(stem))
        Path(f"{stem}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        publish(folder, prefix)
    return result


def _fill(spool: Spool, encoder: Encoder, options: Options, advance: Advance) -> None:
    """Put the documents of all files into the spool, or as many as --max-bytes can need."""
    files = spool.files
    # Whole files come in the data set's own order, so that the rest need not be read.
    enough = options.max_bytes if all(is_whole(x, options) for x in files) else None
    seen: set[bytes] = set()
    size = 0
    every = encoded_in_order(encoder, batches(files, options, advance), options)
    for batch, encoded in every:
        _check(batch, encoded, files, options)
        spool.add(batch, encoded)
        if enough is None:
            continue
        for i in np.flatnonzero(encoded.reason == 0):
            digest = encoded.digest[i].tobytes()
            size += 0 if digest in seen else int(encoded.size[i])
            seen.add(digest)
        if size >= enough:
            break
    every.close()


def _check(batch: Batch, encoded: Encoded, files: Sequence[Found], options: Options) -> None:
    """Raise a ValueError for what is not to be counted, but to be an error."""
    end = len(batch.items) if encoded.fatal is None else encoded.fatal[0]
    if options.strict:
        codes = [REASONS.index(name) for name in FLAWS]
        for i in np.flatnonzero(np.isin(encoded.reason[:end], codes))[:1]:
            words = f" ({encoded.detail[i]})" if i in encoded.detail else ""
            raise ValueError(
                f"{place_of(files, *batch.places[i])}: {REASONS[encoded.reason[i]]}{words}; mend "
                f"it, or leave --strict away to have such documents skipped and counted."
            )
    if encoded.fatal is not None:
        raise ValueError(f"{place_of(files, *batch.places[end])}: {encoded.fatal[1]}")


def _most(spool: Spool, tally: Tally, places: dict[str, list[str]]) -> str:
    """Return a sentence on the most frequent reason of documents: its first place, the way out."""
    for name, _ in tally.skipped.most_common():
        if name in places:
            first = spool.detail.get(name, places[name][0])
            way = "mend such documents, or give others"
            if name in FLAWS and name.startswith("template"):
                way = "mend the template, or such chats"
            elif name in ("too_short", "too_long"):
                way = "check --min-tokens" if name == "too_short" else "split such documents"
            return f"{way}. First {name}: {first}."
    return "check the files, --suffix and --exclude."


def _gather[T: np.generic](
    values: NDArray[T], table: Table, rows: NDArray[np.int64]
) -> Iterator[NDArray[T]]:
    """Yield the part of each of the rows; `values` has one for each id in the spool."""
    for row in rows:
        start = table.offset[row]
        yield values[start : start + table.tokens[row]]
