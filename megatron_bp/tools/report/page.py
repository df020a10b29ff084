"""The page: what a run left on record, in words and tables. Pure: no file is read here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from megatron_bp.tools.report import numbers, words
from megatron_bp.tools.report.numbers import Row, Session

STEPS = 12  # in the table of losses
MESSAGES = 50


@dataclass(frozen=True)
class Record:
    """What a run left.

    Attributes:
        name: of its folder.
        rows: of its metrics.
        journal: of its journal.
        config: sections `given` and `derived` of its config.yaml; empty where there is none.
    """

    name: str
    rows: list[Row]
    journal: list[Row]
    config: dict[str, Any]

    @property
    def start(self) -> Row:
        """The last start, which tells of the machine and what was predicted."""
        return next((r for r in reversed(self.journal) if r["kind"] == "start"), {})


def page(record: Record, picture: str | None = None) -> str:
    """The report as Markdown.

    Args:
        record: what the run left.
        picture: of the losses, a file beside the report; None for none.
    """
    steps = numbers.of_kind(record.rows, "train")
    evaluations = numbers.evaluations(record.rows)
    sessions = numbers.sessions(record.journal)
    parts: list[tuple[str, Iterator[str]]] = [
        ("", _head(record, steps, sessions)),
        ("Losses", _losses(steps, picture)),
        ("Evaluations", _evaluations(evaluations)),
        ("Throughput", _throughput(record, steps, sessions)),
        ("Memory", _memory(record, numbers.of_last(steps, sessions))),
        ("Traffic", _traffic(record, numbers.of_last(steps, sessions))),
        ("Balance and noise", _balance(steps)),
        ("Topology", _topology(record)),
        ("Warnings", _warnings(record, steps)),
        ("Config", _config(record)),
    ]
    text = []
    for title, lines in parts:
        text += [f"## {title}\n", *lines, ""] if title else [*lines, ""]
    return "\n".join(text).rstrip() + "\n"


def _head(record: Record, steps: Sequence[Row], sessions: Sequence[Session]) -> Iterator[str]:
    yield f"# Run {record.name}"
    yield ""
    whole = record.start.get("train_iters")
    of = f" of {whole:,}" if whole else ""
    done = f"step {steps[-1]['iteration']:,}{of}" if steps else "no training step is on record"
    end = f"; {sessions[-1].how}" if sessions else ""
    yield f"After {done}{end}." if steps else f"{done.capitalize()}{end}."
    if record.journal:
        yield f"Last entry: {record.journal[-1]['time']}."


def _losses(steps: Sequence[Row], picture: str | None) -> Iterator[str]:
    if not steps:
        yield "No step."
        return
    if picture is not None:
        yield f"![Losses of the run]({picture})"
        yield ""
    names = numbers.losses(steps)
    yield "Of the step itself, and the mean since the row above; nats a token."
    yield ""
    shown = numbers.chosen(steps, STEPS)
    before = 0
    rows = []
    for row in shown:
        mean = numbers.since(steps, before, row["iteration"], "loss")
        before = row["iteration"]
        rows.append(
            [
                f"{before:,}",
                *(words.number(row.get(n), 6) for n in names),
                words.number(mean, 6),
                words.number(row.get("grad_norm"), 4),
                words.short(row.get("learning_rate")),
            ]
        )
    heads = [n.replace("_", " ") for n in names]
    yield from words.table(["step", *heads, "mean loss", "gradient norm", "learning rate"], rows)


def _evaluations(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        yield "None."
        return
    lines = []
    for r in rows:
        bounds = [
            words.with_error(r.get(f"bound_bits_per_{u}"), r.get(f"bound_bits_per_{u}_error"))
            for u in ("token", "byte")
        ]
        drawn = f"{r['samples']:,} x {r['draws']}"
        loss = words.with_error(r["loss"], r.get("standard_error"), 6)
        lines.append([f"{r['iteration']:,}", r["kind"], loss, *bounds, drawn])
    yield from words.table(
        ["step", "split", "loss", "bound, bits/token", "bound, bits/byte", "samples x draws"], lines
    )


def _throughput(record: Record, steps: Sequence[Row], sessions: Sequence[Session]) -> Iterator[str]:
    if not steps:
        yield "No step."
        return
    warm = numbers.warm(steps, sessions)
    speed, seconds = (numbers.spread(warm, name) for name in ("clean_tokens_per_second", "seconds"))
    tokens = sum(row["clean_tokens"] for row in steps)
    taken = sum(row["seconds"] for row in record.rows)
    yield from words.table(
        ["", "median", "quartiles", "of"],
        [
            ["clean tokens/s", *words.of_spread(speed, "{:,.0f}")],
            ["seconds a step", *words.of_spread(seconds, "{:,.3f}")],
        ],
    )
    yield ""
    yield f"- without the first step after each start: {len(steps) - len(warm)} of {len(steps)}"
    yield f"- {tokens:,} clean tokens trained on, in {words.time(sum(r['seconds'] for r in steps))}"
    yield f"- steps and evaluations together: {words.time(taken)}"
    walls = [session.wall for session in sessions]
    if walls and None not in walls:
        yield f"- from start to end of all sessions: {words.time(sum(w for w in walls if w))}"
    again = sum(session.again for session in sessions)
    lost = sum(session.seconds for session in sessions)
    if len(sessions) > 1:
        yield f"- {len(sessions)} starts; made again after one: {again:,} rows, {words.time(lost)}"
        yield ""
        yield from words.table(
            ["start", "end", "first step", "made again", "how it ended"],
            [
                [s.start, s.end or "-", words.one_step(s.first), f"{s.again:,}", s.how]
                for s in sessions
            ],
        )


def _memory(record: Record, steps: Sequence[Row]) -> Iterator[str]:
    peak = max((row["memory_bytes"] for row in steps), default=None)
    predicted = record.start.get("predicted", {}).get("memory_bytes")
    of = "GPU" if record.start.get("device") == "cuda" else "process (its resident set)"
    yield from _against(f"peak of the {of} that holds most", peak, predicted, words.in_bytes)
    yield from _since_last_start(record, steps)


def _traffic(record: Record, steps: Sequence[Row]) -> Iterator[str]:
    sent = numbers.spread(steps, "bytes_sent")
    predicted = record.start.get("predicted", {}).get("attention_bytes")
    counted = None if sent is None else sent.middle
    yield from _against(
        "sent in attention in a step, all ranks, median", counted, predicted, words.in_bytes
    )
    yield ""
    yield "Predicted for rows that are one document of full length each; packed rows send less."
    yield from _since_last_start(record, steps)


def _since_last_start(record: Record, steps: Sequence[Row]) -> Iterator[str]:
    if sum(row["kind"] == "start" for row in record.journal) > 1 and steps:
        yield ""
        yield f"Of the steps from {steps[0]['iteration']:,} on: those of the last start."


def _balance(steps: Sequence[Row]) -> Iterator[str]:
    if not steps:
        yield "No step."
        return
    lines = []
    for name, what in (
        ("balance", "planned work, worst rank over mean"),
        ("masked_fraction", "corrupted of the tokens that could be"),
    ):
        found = numbers.spread(steps, name)
        if found is not None:
            lines.append([what, *words.of_spread(found, "{:.4f}")[:2], f"{found.worst:.4f}"])
    yield from words.table(["", "median", "quartiles", "largest"], lines)


def _topology(record: Record) -> Iterator[str]:
    derived, start = record.config.get("derived", {}), record.start
    predicted = start.get("predicted", {})
    names = (
        "mode",
        "ranks_per_sequence",
        "clean_shard_groups",
        "tensor_parallel_size",
        "pipeline_stages",
        "data_parallel_size",
        "micro_batches_per_step",
        "exchange",
    )
    rows = [[n.replace("_", " "), str(derived[n])] for n in names if n in derived]
    for name in ("ranks", "hosts", "machine"):
        if name in start:
            rows.append([name, str(start[name])])
    rows += [[f"version of {name}", v] for name, v in start.get("versions", {}).items()]
    if "parameters" in predicted:
        rows.append(["parameters", f"{predicted['parameters']:,}"])
    yield from words.table(["", ""], rows) if rows else ["Not on record."]


def _warnings(record: Record, steps: Sequence[Row]) -> Iterator[str]:
    skipped = [row["iteration"] for row in steps if row.get("skipped")]
    missing = [row["iteration"] for row in steps if row.get("loss") is None]
    found = numbers.warnings(record.journal)
    if skipped:
        yield f"- skipped steps, {len(skipped):,}: {words.steps_of(skipped)}"
    if missing:
        yield f"- steps without a finite loss, {len(missing):,}: {words.steps_of(missing)}"
    for message, often, at in found[:MESSAGES]:
        times = f" ({often} times)" if often > 1 else ""
        yield f"- after step {words.steps_of(at)}{times}: {message}"
    if len(found) > MESSAGES:
        yield f"- and {len(found) - MESSAGES:,} more in journal.jsonl"
    if not (skipped or missing or found):
        yield "None."


def _config(record: Record) -> Iterator[str]:
    given = record.config.get("given")
    if not given:
        yield "Not on record."
        return
    yield "```yaml"
    yield yaml.safe_dump(given, sort_keys=False).rstrip()
    yield "```"


def _against(what: str, got: float | None, predicted: float | None, form: Any) -> Iterator[str]:
    """A number, what was predicted for it, and the one over the other."""
    row = [what, *("-" if v is None else form(v) for v in (got, predicted))]
    row.append(f"{got / predicted:.3f}" if got and predicted else "-")
    yield from words.table(["", "counted", "predicted", "counted / predicted"], [row])
