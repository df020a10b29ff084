"""What a run says of its chats at its start: counts, and some as text with what is supervised.

The text is decoded from the samples that training reads.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp.batch.balance import Balanced, CostedBlend
from megatron_bp.batch.dataset import FirstSamples, SampleDataset
from megatron_bp.data.description import description
from megatron_bp.data.pretrain import blend_place
from megatron_bp.data.sft import NAMES, ChatDataset, left_out

Decode = Callable[[list[int]], str]
MOST = 2000  # characters of a run that are shown


def chat_report(
    datasets: Sequence[SampleDataset | None], samples: int, detokenize: Decode
) -> Iterator[str]:
    """Lines to print.

    Args:
        datasets: training, validation and test samples of chats; None for a split left out.
        samples: chats of the first of these to show.
        detokenize: of the run's tokenizer, for data that is not of bytes.
    """
    for name, dataset in zip(NAMES, datasets, strict=True):
        for part in parts_of(dataset):
            yield f"megatron_bp: {name} chats of {part.dataset.path_prefix}: {counts(part)}"
    for dataset in [d for d in datasets if d is not None][:1]:
        yield from texts(dataset, samples, detokenize)


def parts_of(dataset: SampleDataset | None) -> list[ChatDataset]:
    """The data sets that samples come from, in the order of the blend."""
    source: Any = None if dataset is None else dataset.source
    while isinstance(source, Balanced | FirstSamples):
        source = source.source
    if isinstance(source, CostedBlend):
        source = source.blend
    return [] if source is None else list(getattr(source, "datasets", [source]))


def counts(part: ChatDataset) -> str:
    """In words: chats, rows, how full they are, what is supervised and what is left out."""
    facts, kept = part.dataset.facts, part.kept
    tokens, rows = int(facts.tokens[kept].sum()), part.rows_per_epoch
    return (
        f"{len(kept)} chats in {rows} rows an epoch, {tokens / (rows * part.policy.length):.1%} "
        f"full; {int(facts.supervised[kept].sum()) / tokens:.1%} of tokens supervised, of which "
        f"{int(facts.filled[kept].sum())} fill up {int((facts.filled[kept] > 0).sum())} answers; "
        f"{left_out(facts, part.indices)}"
    )


def texts(dataset: SampleDataset, samples: int, detokenize: Decode) -> Iterator[str]:
    """The first chats of a data set, as text."""
    parts = parts_of(dataset)
    left = samples
    for row in range(len(dataset) if samples else 0):
        sample = dataset[row]
        for ordinal in range(sample["documents"]):
            place, number = blend_place(int(sample["document_keys"][ordinal]))
            prefix = parts[place].dataset.path_prefix
            decode = as_bytes if is_bytes(prefix) else detokenize
            mine = sample["document"] == ordinal
            tokens, supervised = sample["tokens"][mine], sample["supervised"][mine]
            yield (
                f"megatron_bp: chat {number} of {prefix} as it is trained with ({len(tokens)} "
                f"tokens, {int(supervised.sum())} >>>supervised<<<):"
            )
            yield textwrap.indent(marked(tokens, supervised, decode), "    | ", lambda line: True)
            left -= 1
            if not left:
                return


def is_bytes(prefix: str) -> bool:
    """Whether ids are bytes, as P.json says."""
    tokenizer = description(prefix).get("tokenizer")
    return isinstance(tokenizer, dict) and tokenizer.get("kind") == "bytes"


def as_bytes(ids: list[int]) -> str:
    """The text of bytes; <id> where an id is none."""
    out, run = [], bytearray()
    for token in [*ids, None]:
        if token is not None and token < 256:
            run.append(token)
            continue
        out.append(run.decode("utf-8", "backslashreplace"))
        out += [] if token is None else [f"<{token}>"]
        run.clear()
    return "".join(out)


def marked(tokens: NDArray[np.int32], supervised: NDArray[np.bool_], decode: Decode) -> str:
    """The text, each run of supervised tokens as >>>text<<<; long runs are shortened."""
    edges = np.flatnonzero(np.diff(supervised)) + 1
    out = []
    for run in np.split(np.arange(len(tokens)), edges):
        text = decode(tokens[run].tolist()) if len(run) else ""
        if len(text) > MOST:
            cut = len(text) - MOST
            text = f"{text[: MOST // 2]}[... {cut} characters ...]{text[-MOST // 2 :]}"
        out.append(f">>>{text}<<<" if len(run) and supervised[run[0]] else text)
    return "".join(out)
