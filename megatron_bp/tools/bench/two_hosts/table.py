"""The result as Markdown: the forms, what was promised, and the ends of the curve."""

from typing import Any

from megatron_bp.tools.bench.two_hosts.forms import CSBP

HEAD = (
    "form",
    "s a step, limited",
    "against CSBP",
    "waits for K/V",
    "s a step, unlimited",
    "MB sent",
    "MB handed over",
    "of them K/V",
    "MB on the link",
    "counters off by",
)

TRAFFIC = (
    "a host's bytes a step",
    "K/V by hand",
    "K/V handed over",
    "all handed over",
    "on the link",
    "counters off by",
    "holds",
)


def lines(result: dict[str, Any]) -> list[str]:
    """All of it."""
    out = [
        f"{result['machine']}; {result['ranks']} ranks, half of them on each host, sharing those "
        f"cores; link {result['rate'] * 8 / 1e6:.1f} Mbit/s each way; {result['date']}",
        "",
        f"| {' | '.join(HEAD)} |",
        "|" + "---|" * len(HEAD),
    ]
    figures = {name: form["figures"] for name, form in result["forms"].items() if form["figures"]}
    csbp = figures[CSBP]["limited"]["median"]
    out += [_row(name, form, csbp) for name, form in figures.items()]
    out += ["", "| what has to hold | value | rule | holds |", "|---|---|---|---|"]
    for check in result["checks"]:
        holds = "yes" if check["holds"] else "**no**"
        out.append(f"| {check['name']} | {check['value']:.3f} | {check['rule']} | {holds} |")
    if result["traffic"]:
        out += ["", f"| {' | '.join(TRAFFIC)} |", "|" + "---|" * len(TRAFFIC)]
        out += [_traffic(case) for case in result["traffic"]]
    for name, form in result["forms"].items():
        if form["refused"]:
            out += ["", f"{name} did not run: {form['refused']}"]
    if result["curve"]:
        seconds = result["curve"]["seconds"]
        out += ["", f"Trained for {seconds:.0f} s on the limited link, each:", ""]
        out += ["| form | steps | s | bound, bits/byte |", "|---|---|---|---|"]
        for name, points in result["curve"]["forms"].items():
            last = points[-1]
            out.append(
                f"| {name} | {last['step']:.0f} | {last['seconds']:.1f} | "
                f"{last['bits_per_byte']:.3f} |"
            )
        if result["curve"]["failed"]:
            out += ["", f"The curve did not come to its end: {result['curve']['failed']}"]
    return out


def _row(name: str, form: dict[str, Any], csbp: float) -> str:
    limited, unlimited = form["limited"], form["unlimited"]
    cells = [
        name,
        _spread(limited),
        f"{limited['median'] / csbp:.3f}",
        f"{form['waiting']:.2f}",
        _spread(unlimited),
        *(f"{form[key] / 1e6:.2f}" for key in ("sent", "handed", "by_attention", "link")),
        f"{100 * form['counters']:.1f} %",
    ]
    return f"| {' | '.join(cells)} |"


def _traffic(case: dict[str, Any]) -> str:
    cells = [
        case["name"],
        f"{case['by_hand']:,}",
        *(_of_hosts(case[key]) for key in ("by_attention", "handed", "link")),
        f"{100 * case['counters']:.1f} %",
        "yes" if case["holds"] else "**no**",
    ]
    return f"| {' | '.join(cells)} |"


def _of_hosts(values: list[float]) -> str:
    """Of both hosts, once where they are the same."""
    return ", ".join(dict.fromkeys(f"{value:,.0f}" for value in values))


def _spread(spread: dict[str, Any]) -> str:
    return f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f})"
