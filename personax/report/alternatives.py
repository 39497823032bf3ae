"""Text alternatives for figures: a small table of the numbers and a one-sentence summary for screen readers."""

from collections.abc import Sequence
from html import unescape
from math import isfinite
from typing import Any, NamedTuple

import plotly.graph_objects as go

HEADS = ("", "first", "lowest", "highest", "last")


class ViewNumbers(NamedTuple):
    """The numbers of a view: the start, the extremes and the end of each line or group of bars."""

    caption: str
    rows: list[list[str]]


class Point(NamedTuple):
    """A point of a line: its value and its position."""

    y: float
    x: float
    name: str  # label of x

    def __str__(self) -> str:
        return f"{_shown(self.y)} at {self.name}"


def numbers_of(view: go.Figure) -> ViewNumbers:
    """Return the numbers of a view, without empty lines."""
    layout: Any = view.layout
    across, up = (_title(axis) for axis in (layout.xaxis, layout.yaxis))
    rows = []
    for name, points in _lines(view):
        low, high = min(points), max(points)
        rows.append([name, *map(str, (points[0], low, high, points[-1]))])
    return ViewNumbers(f"{up}, against {across}" if up and across else up or across, rows)


def sentence(view: go.Figure) -> str:
    """Summarize the ends of lines, or the extremes of bars and points, in one sentence; empty without numbers."""
    found = _lines(view)
    if not found:
        return ""
    along = all(trace.type == "scatter" and "lines" in (trace.mode or "lines") for trace in view.data)
    tops = {name: points[-1] if along else max(points) for name, points in found}
    best, last = max(tops, key=lambda name: tops[name]), min(tops, key=lambda name: tops[name])
    if not along:
        return f"The highest value is {tops[best]}" + (f" ({best})." if len(tops) > 1 else ".")
    if len(tops) == 1:
        return f"The last value is {tops[best]}."
    return f"At the end, the highest is {best} ({_shown(tops[best].y)}) and the lowest {last} ({_shown(tops[last].y)})."


def _lines(view: go.Figure) -> list[tuple[str, list[Point]]]:
    """Return the finite points of each trace with its name, without bands."""
    layout: Any = view.layout
    axis, found = layout.xaxis, []
    names = dict(zip(_list(axis.tickvals), map(unescape, _list(axis.ticktext)), strict=False))
    for trace in view.data:
        if trace.hoverinfo == "skip":
            continue
        pairs = [(x, y) for x, y in zip(_list(trace.x), _list(trace.y), strict=True) if _known(x, y)]
        points = [Point(float(y), float(x), names.get(x, _shown(x))) for x, y in pairs]
        if points:
            found.append((unescape(trace.name or "points"), points))
    return found


def _list(values: Sequence[Any] | None) -> Sequence[Any]:
    return () if values is None else values


def _known(*numbers: Any) -> bool:
    return all(number is not None and isfinite(number) for number in numbers)


def _title(axis: Any) -> str:
    return unescape(axis.title.text or "")


def _shown(number: float) -> str:
    return f"{number:.4g}".replace("-", "\N{MINUS SIGN}")
