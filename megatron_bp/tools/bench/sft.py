"""What a long prompt with a short answer costs: corrupted rows for the answer's blocks, or for all.

One chat, a row of its own, in two ways: the answer alone is supervised, as in fine-tuning, so that
the prompt has clean rows only; and every token is. Rows and visible pairs are counted in the plan
that training makes; time and memory are those of one forward and backward of a small model.
"""

import argparse
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from megatron_bp.data.document import Document
from megatron_bp.sequence.packing import Sample, pack
from megatron_bp.sequence.plan import SequenceOptions, SequencePlan, make_plan
from megatron_bp.sequence.visibility import visibility
from megatron_bp.tools.bench.machine import measure, processor

WAYS = {"answer supervised": False, "all supervised": True}


@dataclass(frozen=True)
class Counts:
    """Of one row: clean and corrupted rows that are computed, and the pairs that they see."""

    clean_rows: int
    corrupted_rows: int
    visible_pairs: int


def chat(prompt: int, answer: int, everything: bool) -> Sample:
    """A row that is one chat of random bytes, its answer supervised or all of it."""
    length = prompt + answer
    supervised = np.arange(length) >= (0 if everything else prompt)
    tokens = np.random.default_rng(1).integers(0, 255, length, dtype=np.int32)
    return pack([Document(tokens, supervised, 0)], length)


def counts(plan: SequencePlan) -> Counts:
    """What a single rank computes of the row."""
    rows = plan.rows_of(0)
    pairs = visibility(plan, rows.clean, rows.corrupted).pairs()
    return Counts(len(rows.clean), len(rows.corrupted), pairs)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--prompt", type=int, default=30000, metavar="N", help="tokens, default 30000")
    add("--answer", type=int, default=512, metavar="N", help="tokens, default 512")
    add("--block", type=int, default=32, metavar="B", help="tokens a block, default 32")
    add("--layers", type=int, default=1, help="of the model, default 1")
    add("--heads", type=int, default=4, help="of 64 each, default 4")
    add("--repeats", type=int, default=3, help="of each way, turn by turn; 0 to count alone")
    add("--threads", type=int, default=1, help="default 1")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The result, as JSON.

    Raises:
        ValueError: a size that no row can have.
    """
    for name in ("prompt", "answer", "block", "layers", "heads", "threads"):
        if getattr(options, name) < (0 if name == "prompt" else 1):
            raise ValueError(f"--{name} {getattr(options, name)}: is too small")
    if options.repeats < 0:
        raise ValueError(f"--repeats {options.repeats}: must be at least 0")
    how = SequenceOptions(options.block, grid="response")
    samples = {way: chat(options.prompt, options.answer, all_) for way, all_ in WAYS.items()}
    plans = {way: make_plan(sample, how) for way, sample in samples.items()}
    ways: dict[str, dict[str, Any]] = {
        way: asdict(counts(plans[way])) | {"seconds": [], "peak_bytes": []} for way in WAYS
    }
    if options.repeats:
        from megatron_bp.tools.bench.model import build, one_process, step

        with one_process(options.threads):
            model = build(options.layers, options.heads, 64)
            small = chat(3 * options.block, options.block, True)
            step(model, small, make_plan(small, how))  # what a first call alone does
            for _ in range(options.repeats):
                for way, found in ways.items():
                    seconds, peak = measure(partial(step, model, samples[way], plans[way]))
                    found["seconds"].append(seconds)
                    found["peak_bytes"].append(peak)
    sizes = {k: getattr(options, k) for k in ("prompt", "answer", "block", "layers", "heads")}
    return {"machine": processor(), "threads": options.threads, **sizes, "ways": ways}


def lines(result: dict[str, Any]) -> list[str]:
    """The result as a Markdown table."""
    ways = result["ways"]
    out = [
        f"{result['machine']}, {result['threads']} used; prompt {result['prompt']:,}, answer "
        f"{result['answer']:,}, blocks of {result['block']}; layers: {result['layers']}, "
        f"{result['heads']} heads x 64",
        "",
        f"| | {' | '.join(ways)} | ratio |",
        "|---|---|---|---|",
    ]
    names = {
        "clean_rows": "clean rows",
        "corrupted_rows": "corrupted rows",
        "visible_pairs": "visible pairs",
    }
    for key, name in names.items():
        few, all_ = (way[key] for way in ways.values())
        out.append(f"| {name} | {few:,} | {all_:,} | {_ratio(all_, few)} |")
    for key, name, unit in (
        ("seconds", "forward and backward, s", 1.0),
        ("peak_bytes", "peak memory of it, MB", 1e6),
    ):
        values = [[v / unit for v in way[key] if v is not None] for way in ways.values()]
        if not all(values):
            continue
        told = [f"{statistics.median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in values]
        few, all_ = (statistics.median(v) for v in values)
        out.append(f"| {name} | {told[0]} | {told[1]} | {_ratio(all_, few)} |")
    return out


def _ratio(all_: float, few: float) -> str:
    return f"{all_ / few:.2f}" if few else "-"
