"""What a dry run tells, in words."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import yaml


def lines(facts: dict[str, Any]) -> Iterator[str]:
    """The page, line by line."""
    degrees, derived = facts["degrees"], facts["derived"]
    yield f"Dry run of {facts['config']} on {facts['ranks']} ranks ({facts['ranks_from']})"
    yield ""
    yield "Given"
    yield from (
        f"  {line}" for line in yaml.safe_dump(facts["given"], sort_keys=False).splitlines()
    )
    yield ""
    yield f"Mode: {derived['mode']}"
    sharing = ", sequence parallel" if degrees["sequence_parallel"] else ""
    experts = f", EP {degrees['ep']}" if degrees["ep"] > 1 else ""
    yield (
        f"  TP {degrees['tp']} x PP {degrees['pp']} x DP {degrees['dp']} x slot {degrees['slot']} "
        f"(BP {degrees['bp']}, CP {degrees['cp']}){sharing}{experts}"
    )
    yield from _pairs((k.replace("_", " "), _number(v)) for k, v in _of_run(derived).items())
    yield ""
    yield from _parameters(facts["parameters"])
    if "rows" in facts:
        yield ""
        yield from _planned(facts)
    if facts["notes"]:
        yield ""
        yield "Not looked at here; a run does it at its start, and is refused if it does not hold"
        yield from (f"  - {note}" for note in facts["notes"])


def _of_run(derived: dict[str, Any]) -> dict[str, Any]:
    """What is not told elsewhere."""
    told = ("mode", "tensor_parallel_size", "pipeline_stages", "data_parallel_size")
    return {name: value for name, value in derived.items() if name not in told}


def _parameters(found: dict[str, Any]) -> Iterator[str]:
    yield f"Parameters: {found['total']:,} ({found['dtype']})"
    planned = found.get("planned")
    if planned is not None and planned != found["total"]:
        yield (
            f"  the planner counts {planned:,}, which is wrong by {planned - found['total']:+,}: "
            f"its traffic and memory below are wrong by as much; please report it"
        )
    for number, stage in enumerate(found["stages"]):
        where = f"stage {number}: " if len(found["stages"]) > 1 else ""
        yield f"  {where}{stage['of_a_rank']:,} on each of its ranks"
        rows = [
            (s["name"], " x ".join(map(str, s["shape"])), f"x {s['times']}" * (s["times"] > 1))
            for s in stage["shapes"]
        ]
        yield from _table(rows, indent=4)


def _planned(facts: dict[str, Any]) -> Iterator[str]:
    rows, sent, memory = facts["rows"], facts["traffic"], facts["memory"]
    pairs = [rank["pairs"] for rank in rows]
    yield "Rows of each slot rank, of a micro-batch of full documents"
    head = ("slot rank", "clean", "corrupted", "visible pairs", "to mean")
    mean = sum(pairs) / len(pairs)
    yield from _table(
        [head]
        + [
            (str(n), f"{r['clean']:,}", f"{r['corrupted']:,}", f"{p:,}", f"{p / mean:.3f}")
            for n, (r, p) in enumerate(zip(rows, pairs, strict=True))
        ]
    )
    yield ""
    yield f"Sent in a step by {_gpu(sent)}, which sends most"
    flows = [(_flow(f), f"{f['bytes']:,} bytes", _size(f["bytes"])) for f in sent["flows"]]
    yield from _table(flows or [("nothing", "", "")])
    yield ""
    layers = "layers of Transformer Engine" if memory["fused"] else "local layers"
    yield f"Memory of {_gpu(memory)}, which holds most, at its peak, with {layers}; estimated"
    parts = [(name, _size(size)) for name, size in memory["parts"].items() if size]
    yield from _table([*parts, ("all", _size(memory["total"]))])
    yield "  (process: of a CPU run; on a GPU it lies outside of what torch reports as allocated)"


def _gpu(found: dict[str, Any]) -> str:
    return f"the GPU of stage {found['stage']} and slot rank {found['slot_rank']}"


def _flow(flow: dict[str, Any]) -> str:
    of = f" ({flow['of']})" if flow["of"] else ""
    return f"{flow['what']}{of} among {flow['ranks']}"


def _size(size: int) -> str:
    unit, power = ("GiB", 30) if size >= 1 << 30 else ("MiB", 20)
    return f"{size / 2**power:,.3f} {unit}"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _pairs(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Names and values, both to the left."""
    every = list(rows)
    width = max(len(name) for name, _ in every)
    yield from (f"  {name:<{width}}  {value}" for name, value in every)


def _table(rows: Sequence[Sequence[str]], indent: int = 2) -> Iterator[str]:
    """Columns as wide as they must be; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [c.rjust(w) for c, w in zip(others, widths[1:], strict=True)]
        yield (" " * indent + "  ".join(cells)).rstrip()
