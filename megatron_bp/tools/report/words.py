"""Numbers and tables of a report, as Markdown."""

from collections.abc import Iterator, Sequence

from megatron_bp.tools.report.numbers import Spread


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(_in_cell(text) for text in row)} |" for row in rows)


def _in_cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def of_spread(found: Spread | None, form: str) -> list[str]:
    """Median, quartiles and how many steps."""
    if found is None:
        return ["-", "-", "-"]
    low, high = form.format(found.low), form.format(found.high)
    return [form.format(found.middle), f"{low} to {high}", f"{found.steps:,} steps"]


def with_error(value: float | None, error: float | None, digits: int = 4) -> str:
    """A value and its standard error, as far as they are known."""
    if value is None:
        return "-"
    return number(value, digits) + ("" if error is None else f" +- {error:.{digits}f}")


def number(value: float | None, digits: int) -> str:
    """With so many digits; a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def short(value: float | None) -> str:
    """Three digits that matter."""
    return "-" if value is None else f"{value:.3g}"


def in_bytes(size: float) -> str:
    """Of bytes."""
    unit, power = ("GiB", 30) if size >= 1 << 30 else ("MiB", 20)
    return f"{size / 2**power:,.3f} {unit} ({size:,.0f} bytes)"


def time(seconds: float) -> str:
    """Of seconds."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min {whole % 60:02} s ({seconds:,.1f} s)"


def one_step(step: int | None) -> str:
    """A step, or a dash."""
    return "-" if step is None else f"{step:,}"


def steps_of(steps: Sequence[int]) -> str:
    """The first few of some steps."""
    more = f" and {len(steps) - 8:,} more" if len(steps) > 8 else ""
    return ", ".join(f"{step:,}" for step in steps[:8]) + more
