"""How every picture looks: colours, sizes, files, and what can be told to be wrong with one.

Needs matplotlib, the extra `plot`, and imports it only where something is drawn. Nothing of this
project is imported here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which colour-blind people tell apart. Where colour carries a meaning by
# itself, a hatch, a line style, a marker or a number says the same: pictures are printed in grey.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, YELLOW, BLACK = "#56B4E9", "#D55E00", "#F0E442", "#000000"
GREY = "#606060"  # for their black, which is for lines and text here
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", ":", "-.")
SMALLEST = 8.0  # points; pictures are shown as wide as they are drawn
WIDTH = 7.4  # inches
DPI = 150

_STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "figure.titlesize": 10.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#D0D0D0",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "megatron_bp",  # the same picture, the same file
}


def need_matplotlib() -> None:
    """Raise an ImportError that says how to get matplotlib, if it is not there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            'pictures need matplotlib, which is not installed: .venv/bin/pip install -e ".[plot]"'
        ) from error


def tint(colour: str, white: float = 0.7) -> str:
    """A colour mixed with so much white, as #RRGGBB."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02X}" for part in parts)


def on(colour: str) -> str:
    """Black or white, whichever is read better on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return BLACK if 0.3 * red + 0.59 * green + 0.11 * blue > 105 else "#FFFFFF"


def tokens(value: float, _: object = None) -> str:
    """So many tokens, as 64K (64 x 1,024) where that is exact."""
    whole = round(value)
    return f"{whole // 1024:,}K" if whole and whole % 1024 == 0 else f"{whole:,}"


def of_rank(rank: int) -> str:
    """The colour of a rank; with many ranks they come again."""
    return COLOURS[rank % len(COLOURS)]


def look(number: int) -> dict[str, str]:
    """Colour, line style and marker of a line, each its own for the first four."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINES[number % len(LINES)],
        "marker": MARKERS[number % len(MARKERS)],
    }


@contextmanager
def style() -> Iterator[None]:
    """Everything that is drawn and saved inside looks as it should."""
    need_matplotlib()
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def new(height: float, width: float = WIDTH) -> Any:
    """An empty figure of that size in inches, for use inside `style`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


@contextmanager
def drawn(prefix: str | Path, height: float, width: float = WIDTH) -> Iterator[Any]:
    """A figure to draw on; after that it stands in the two files of `files`."""
    with style():
        figure = new(height, width)
        yield figure
        png, svg = files(prefix)
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=DPI)
        figure.savefig(svg, dpi=DPI, metadata={"Date": None})


def files(prefix: str | Path) -> list[Path]:
    """PREFIX.png and PREFIX.svg."""
    return [Path(f"{prefix}.{kind}") for kind in ("png", "svg")]


def flaws(figure: Any) -> list[str]:
    """What a look over the artists finds: small, cut or overlapping text, colours not of ours.

    To be called inside `style`. Text inside an image cannot be seen by this.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    hidden = _hidden(figure)
    texts = [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text not in hidden
    ]
    found = [
        f"{text.get_text()!r} has {text.get_fontsize():g} points"
        for text in texts
        if text.get_fontsize() < SMALLEST
    ]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    whole = figure.bbox
    found += [
        f"{text!r} is cut by the edge"
        for text, box in boxes
        if min(box.x0, box.y0) < -1 or box.x1 > whole.x1 + 1 or box.y1 > whole.y1 + 1
    ]
    found += [
        f"{a!r} and {b!r} overlap"
        for (a, one), (b, other) in combinations(boxes, 2)
        if one.padded(-1).overlaps(other.padded(-1))
    ]
    return found + [f"{colour} is no colour of ours" for colour in _foreign(figure)]


def _hidden(figure: Any) -> set[Any]:
    """Labels that are there and not drawn: of ticks outside of the view, of axes that are off."""
    hidden: set[Any] = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            low, high = sorted(axis.get_view_interval())
            slack = (high - low) * 1e-9
            for tick in ticks:
                seen = axes.axison and low - slack <= tick.get_loc() <= high + slack
                for label, on in (
                    (tick.label1, tick.label1.get_visible()),
                    (tick.label2, tick.label2.get_visible()),
                ):
                    if not (seen and on):
                        hidden.add(label)
            if not axes.axison:
                hidden.add(axis.label)
    return hidden


def _foreign(figure: Any) -> list[str]:
    """Colours of lines, patches and texts that are neither ours, nor a tint of ours, nor grey."""
    from matplotlib.colors import to_hex
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    used: set[str] = set()
    for artist in figure.findobj(lambda a: isinstance(a, Line2D | Patch | Text)):
        if isinstance(artist, Patch):
            used |= {to_hex(artist.get_facecolor()), to_hex(artist.get_edgecolor())}
        else:
            used.add(to_hex(artist.get_color()))
    ours = {colour.lower() for colour in (*COLOURS, BLACK)}
    ours |= {tint(colour).lower() for colour in COLOURS}
    return sorted(c for c in used if c not in ours and len({c[1:3], c[3:5], c[5:7]}) > 1)
