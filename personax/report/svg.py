"""Small SVG figures that can be committed: a grid of panels with lines or dots, and one legend."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from personax.report.runs import PALETTE

PANEL_WIDTH, PLOT_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 190, 58, 14, 34, 44
PLOT_WIDTH = PANEL_WIDTH - LEFT - RIGHT
NAMES_WIDTH, DOT_STEP = 168, 20  # in a panel of dots: the width of names, the distance between dots
NARROW = 4.0  # bands no higher than this are not visible behind their line
LEGEND_STEP, CHARACTER = 20, 6.3  # the height of a legend row, the width of a character
COLORS = tuple(light for light, _ in PALETTE)
DASHES = ("", "6 3", "2 2")  # the next one is used once the colors run out
GRID, INK, PALE = "#ddd", "#222", "#666"


class Line(NamedTuple):
    """A line with its band, and the paper's number for its end."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    paper: float | None = None


class LinePanel(NamedTuple):
    """Lines over a common axis; `ticks` label positions by name instead of by number.

    The height is scaled to the points after `begin`, so that an initial jump does not flatten the rest.
    """

    title: str
    across: str
    up: str
    lines: Sequence[Line]
    ticks: Mapping[float, str] = {}
    log: bool = False
    begin: float = -math.inf


class Dot(NamedTuple):
    """A number with its interval and the paper's number; `words` replace it if it cannot be drawn."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    paper: float | None = None
    words: str = ""


class DotPanel(NamedTuple):
    """Named numbers in a column."""

    title: str
    across: str
    dots: Sequence[Dot]
    log: bool = False


class PlotAxis(NamedTuple):
    """A map from numbers to positions on an axis, and its ticks."""

    place: Callable[[float], float]
    ticks: list[float]


def draw(title: str, panels: Sequence[LinePanel | DotPanel], words: str) -> str:
    """Draw the panels in two columns, with the legend and an explanation of the marks below."""
    names = list(dict.fromkeys(line.name for panel in panels if isinstance(panel, LinePanel) for line in panel.lines))
    styles = {name: _style(at) for at, name in enumerate(names)}
    abreast = min(2, len(panels))
    width, margin = (2.0 * PANEL_WIDTH, 0.0) if abreast == 2 else (1.5 * PANEL_WIDTH, 0.25 * PANEL_WIDTH)
    parts, top = [], 26.0
    for at in range(0, len(panels), abreast):
        row = panels[at : at + abreast]
        for column, panel in enumerate(row):
            drawn = _lines(panel, styles) if isinstance(panel, LinePanel) else _dots(panel)
            parts += [f'<g transform="translate({margin + column * PANEL_WIDTH:g} {top:g})">', *drawn, "</g>"]
        top += max(map(height_of, row))
    legend, top = _legend(styles, width, top + 14)
    parts += [*legend, text(width / 2, top, words, "middle", 10, PALE)]
    height = top + 12
    sized = f' width="{width:g}" height="{height:g}"'
    clip = f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}"/></clipPath>'
    opening = [*head(width, height, sized), clip, text(width / 2, 18, title, "middle", _fitting(title, width))]
    return "\n".join([*opening, *parts, "</svg>"]) + "\n"


def _fitting(title: str, width: float) -> int:
    """Return the largest font size at which a title fits the width."""
    return min(14, int(1.7 * width / max(len(title), 1)))


def height_of(panel: LinePanel | DotPanel) -> float:
    """Return the height of a panel with its titles."""
    inside = PLOT_HEIGHT if isinstance(panel, LinePanel) else DOT_STEP * len(panel.dots) + 6
    return TOP + inside + BOTTOM


def head(width: float, height: float, more: str = "") -> list[str]:
    """Open an SVG element with a white background."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif"{more}>',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]


def text(x: float, y: float, words: str, anchor: str, size: int = 11, color: str = INK) -> str:
    """Return a text element; `anchor` is "start", "middle" or "end"."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}"'
    return f"<text {place}>{escape(words)}</text>"


def rule(x1: float, y1: float, x2: float, y2: float, color: str = GRID, more: str = "") -> str:
    """Return a straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{more}/>'


def polyline(points: Sequence[tuple[float, float]], color: str, more: str = "") -> str:
    """Return a line through points."""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2"{more}/>'


def circle(x: float, y: float, color: str, radius: float = 3) -> str:
    """Return a dot."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{color}"/>'


def decades(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten within a range, or its ends if there are none.

    >>> decades(0.9, 30)
    [1.0, 2.0, 5.0, 10.0, 20.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [part * 10.0**power for power in powers for part in (1, 2, 5)]
    return [mark for mark in marks if low <= mark <= high] or [low, high]


def axis(values: Sequence[float], begin: float, end: float, log: bool = False) -> PlotAxis:
    """Return an axis that covers all values, with round numbers as ticks.

    >>> axis([0.0, 1.0], 0, 105).ticks
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
    view = (lambda value: math.log(max(value, min(finite) / 10))) if log else float
    ends = view(min(finite)), view(max(finite))
    room = 0.05 * (ends[1] - ends[0]) or 0.05 * abs(ends[0]) or 1.0
    low, high = ends[0] - room, ends[1] + room
    place = lambda value: begin + (view(value) - low) / (high - low) * (end - begin)
    return PlotAxis(place, _thinned(decades(math.exp(low), math.exp(high))) if log else _round_numbers(low, high))


def _round_numbers(low: float, high: float) -> list[float]:
    """Return four to nine multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = max((part * power for part in (1, 2, 5) if (high - low) / (part * power) >= 4), default=power)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(step * at, digits) for at in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _thinned(marks: list[float]) -> list[float]:
    """Keep only powers of ten if there are many decades."""
    powers = [mark for mark in marks if f"{mark:e}".startswith("1.0")]
    return marks if len(marks) <= 8 or len(powers) < 2 else powers


def short(number: float) -> str:
    """Format a number in a few characters.

    >>> short(0.05), short(1000), short(25_000), short(3e6)
    ('0.05', '1000', '25 k', '3 M')
    """
    if number >= 10_000:
        return f"{number / 1e6:g} M" if number >= 1e6 else f"{number / 1e3:g} k"
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


def _style(at: int) -> tuple[str, str]:
    """Return the color and dashes of a line by its position in the legend."""
    return COLORS[at % len(COLORS)], DASHES[at // len(COLORS) % len(DASHES)]


def _lines(panel: LinePanel, styles: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    bottom, right = TOP + PLOT_HEIGHT, PANEL_WIDTH - RIGHT
    across = axis([x for line in panel.lines for x in line.x], LEFT, right)
    up = axis(list(_heights(panel)), bottom, TOP, panel.log)
    yield from _titles(panel.title, panel.across, (LEFT + right) / 2, bottom)
    yield text(LEFT - 50, TOP - 6, panel.up, "start", 10, PALE)
    for x in panel.ticks or across.ticks:
        yield text(across.place(x), bottom + 15, panel.ticks.get(x, short(x)), "middle", 10)
    for y in up.ticks:
        yield text(LEFT - 6, up.place(y) + 4, short(y), "end", 10)
    vertical = [f"M{across.place(x):.1f} {TOP}V{bottom}" for x in panel.ticks or across.ticks]
    yield _grid([*vertical, *(f"M{LEFT} {up.place(y):.1f}H{right}" for y in up.ticks)])
    yield '<g clip-path="url(#plot)">'
    for line in panel.lines:
        yield from _line(line, across, up, *styles[line.name])
    yield "</g>"


def _grid(lines: Sequence[str]) -> str:
    return f'<path d="{"".join(lines)}" stroke="{GRID}"/>'


def _heights(panel: LinePanel) -> Iterator[float]:
    """Yield the values that the axis must cover."""
    for line in panel.lines:
        shown = [at for at, x in enumerate(line.x) if x >= panel.begin]
        for numbers in (line.y,) if panel.log else (line.y, line.low, line.high):
            yield from (numbers[at] for at in shown if at < len(numbers))
        yield from () if line.paper is None else (line.paper,)


def _line(line: Line, across: PlotAxis, up: PlotAxis, color: str, dash: str) -> Iterator[str]:
    """Draw a line with its band behind it, without nonfinite points."""
    seen = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
    known = [
        (x, low, high)
        for x, low, high in zip(line.x, line.low, line.high, strict=False)
        if math.isfinite(low) and math.isfinite(high)
    ]
    if any(abs(up.place(low) - up.place(high)) > NARROW for _, low, high in known):
        outline = [(x, high) for x, _, high in known] + [(x, low) for x, low, _ in reversed(known)]
        joined = " ".join(f"{across.place(x):.0f},{up.place(y):.1f}" for x, y in outline)
        yield f'<polygon points="{joined}" fill="{color}" fill-opacity="0.15"/>'
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    yield polyline([(across.place(x), up.place(y)) for x, y in seen], color, dashed)
    if line.paper is not None:
        at, ends = up.place(line.paper), (across.place(min(line.x)), across.place(max(line.x)))
        yield rule(ends[0], at, ends[1], at, color, ' stroke-dasharray="1 3"')
        yield _diamond(ends[1], at, color)


def _dots(panel: DotPanel) -> Iterator[str]:
    right, bottom = PANEL_WIDTH - RIGHT, TOP + DOT_STEP * len(panel.dots) + 6
    drawn = [dot for dot in panel.dots if not dot.words]
    ends = [] if panel.log else [end for dot in drawn for end in (dot.low, dot.high)]
    numbers = [*(dot.value for dot in drawn), *ends, *(dot.paper for dot in panel.dots)]
    along = axis([number for number in numbers if number is not None], NAMES_WIDTH, right, panel.log)
    yield from _titles(panel.title, panel.across, (NAMES_WIDTH + right) / 2, bottom)
    for x in along.ticks:
        yield text(along.place(x), bottom + 15, short(x), "middle", 10)
    yield _grid([f"M{along.place(x):.1f} {TOP}V{bottom}" for x in along.ticks])
    for at, dot in enumerate(panel.dots):
        y = TOP + DOT_STEP * (at + 0.5) + 3
        yield text(NAMES_WIDTH - 8, y + 4, dot.name, "end", 10)
        yield from _dot(dot, along, y)


def _dot(dot: Dot, along: PlotAxis, y: float) -> Iterator[str]:
    if dot.paper is not None:
        yield _diamond(along.place(dot.paper), y, COLORS[1])
    if dot.words:
        yield text(NAMES_WIDTH + 4, y + 4, dot.words, "start", 10, PALE)
        return
    if dot.low is not None and dot.high is not None:
        ends = max(along.place(dot.low), NAMES_WIDTH), min(along.place(dot.high), PANEL_WIDTH - RIGHT)
        yield rule(ends[0], y, ends[1], y, COLORS[0], ' stroke-width="2"')
    yield circle(along.place(dot.value), y, COLORS[0], 3.5)


def _diamond(x: float, y: float, color: str) -> str:
    return f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z" fill="white" stroke="{color}" stroke-width="1.5"/>'


def _titles(title: str, across: str, middle: float, bottom: float) -> Iterator[str]:
    yield text(PANEL_WIDTH / 2, 14, title, "middle", 12)
    yield text(middle, bottom + 31, across, "middle", 10, PALE)


def _legend(styles: Mapping[str, tuple[str, str]], width: float, top: float) -> tuple[list[str], float]:
    """Draw the legend, with as many entries per row as fit, and return it with the position below it."""
    sizes = [40 + CHARACTER * len(name) for name in styles]
    rows: list[list[int]] = [[]]
    for at, size in enumerate(sizes):
        if sum(sizes[i] for i in rows[-1]) + size > width - 20 and rows[-1]:
            rows.append([])
        rows[-1].append(at)
    parts, names = [], list(styles)
    for row in rows if names else []:
        x = (width - sum(sizes[at] for at in row)) / 2
        starts = [x, *(x + sum(sizes[at] for at in row[: i + 1]) for i in range(len(row)))]
        for at, (start, _) in zip(row, pairwise(starts), strict=True):
            color, dash = styles[names[at]]
            more = f' stroke-width="2"{f" stroke-dasharray={chr(34)}{dash}{chr(34)}" if dash else ""}'
            parts += [rule(start, top - 4, start + 20, top - 4, color, more), text(start + 26, top, names[at], "start")]
        top += LEGEND_STEP
    return parts, top
