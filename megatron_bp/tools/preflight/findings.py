"""What one rank found, and the verdict over all ranks. No ranks here: plain values in and out."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from megatron_bp.tools.ranges import ranges

# What to do where ranks differ, by check.
WAYS_OUT = {
    "versions": "let all ranks start from the same environment and the same files",
    "arguments": "start all ranks with the same command line and the same tokenizer",
    "data": "let all ranks see the same files",
    "checkpoint": "let all ranks see the same folder",
    "sample": "their data differ where `data` does not look: compare whole files (sha256sum)",
}
SILENT = "did not answer in time: look at what it printed, and at its host"
LONGEST = 600  # characters of a message that are told


@dataclass(frozen=True)
class Finding:
    """What a check found on one rank.

    Attributes:
        ok: None if it was not looked at, because something else is missing.
        said: the message of a failure, in one line, or what is worth telling, of the lowest rank.
        same: name -> value; on all ranks that have a name its value has to be the same.
    """

    ok: bool | None
    said: str = ""
    same: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What a check found on all ranks.

    Attributes:
        check: its name.
        ok: None if no rank failed, and some could not look.
        lines: what failed, where; if nothing did, what is worth telling.
    """

    check: str
    ok: bool | None
    lines: tuple[str, ...]


def dumped(findings: Mapping[str, Finding]) -> str:
    """Check -> finding, as text."""
    return json.dumps({name: asdict(finding) for name, finding in findings.items()})


def loaded(text: str) -> dict[str, Finding]:
    """The same again."""
    return {name: Finding(**values) for name, values in json.loads(text).items()}


def failed(error: BaseException) -> Finding:
    """What a check that raised found. The message of what a user can cause says all."""
    text = " ".join(str(error).split())[:LONGEST]
    plain = isinstance(error, ValueError | OSError | RuntimeError) and text
    return Finding(False, text if plain else f"{type(error).__name__}: {text}")


def judge(check: str, found: Mapping[int, Finding | None], hosts: Mapping[int, str]) -> Verdict:
    """The verdict over all ranks.

    Args:
        check: its name.
        found: of every rank; None of one that did not answer.
        hosts: of the ranks that told theirs.
    """
    came = {rank: finding for rank, finding in found.items() if finding is not None}
    texts: dict[str, list[int]] = {}
    for rank, finding in found.items():
        if finding is None:
            texts.setdefault(SILENT, []).append(rank)
        elif finding.ok is False:
            texts.setdefault(finding.said, []).append(rank)
    lines = [f"{where(ranks, hosts)}: {text}" for text, ranks in texts.items()]
    way_out = f"; {WAYS_OUT[check]}" if check in WAYS_OUT else ""
    lines += [f"{line}{way_out}" for line in differing(came, hosts)]
    if lines:
        return Verdict(check, False, tuple(lines))
    unseen: dict[str, list[int]] = {}
    for rank, finding in came.items():
        if finding.ok is None:
            unseen.setdefault(finding.said, []).append(rank)
    if unseen:
        lines = [f"{where(ranks, hosts)}: {text}" for text, ranks in unseen.items()]
        return Verdict(check, None, tuple(lines))
    told = list(dict.fromkeys(finding.said for finding in came.values() if finding.said))
    return Verdict(check, True, tuple(told[0].splitlines()) if told else ())


def differing(found: Mapping[int, Finding], hosts: Mapping[int, str]) -> Iterator[str]:
    """A line for each name whose values differ: those of the fewest ranks are told with them."""
    names = dict.fromkeys(name for finding in found.values() for name in finding.same)
    for name in names:
        values = {r: f.same[name] for r, f in found.items() if name in f.same}
        counts = Counter(values.values())
        if len(counts) == 1:
            continue
        usual, _ = counts.most_common(1)[0]  # of equally many that of the lowest rank
        others = [
            f"{value} on {where([r for r, v in values.items() if v == value], hosts)}"
            for value in dict.fromkeys(values.values())
            if value != usual
        ]
        most = where([r for r, v in values.items() if v == usual], hosts)
        yield f"{name}: {usual} on {most}, but {' and '.join(others)}"


def where(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Ranks with their hosts: ranks 0-7 (a), 8 (b)."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts.get(rank, "host unknown"), []).append(rank)
    parts = [f"{ranges(of_host)} ({host})" for host, of_host in by_host.items()]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"


def table(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """A line or more for each verdict."""
    words = {True: "ok", False: "FAILED", None: "not looked at"}
    for verdict in verdicts:
        first, *others = verdict.lines or ("",)
        yield f"  {words[verdict.ok]:<13}  {verdict.check:<12}  {first}".rstrip()
        yield from (f"{'':<31}{line}" for line in others)


def summary(verdicts: Sequence[Verdict]) -> str:
    """The last line."""
    bad = [v.check for v in verdicts if v.ok is False]
    unseen = [v.check for v in verdicts if v.ok is None]
    if not bad and not unseen:
        return f"all {len(verdicts)} checks passed; nothing was trained"
    parts = [f"{len(bad)} of {len(verdicts)} checks failed ({', '.join(bad)})"]
    if unseen:
        parts.append(f"not looked at: {', '.join(unseen)}")
    return "; ".join(parts)
