"""A small line plot as SVG, both axes logarithmic: how cost grows with one size."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 300, 64, 16, 34, 48
COLORS = ("#1f5fa8", "#c4661f", "#3a7d34", "#7a3b8f")
Points = Sequence[tuple[float, float]]


def draw(title: str, across: str, up: str, lines: Mapping[str, Points]) -> str:
    """One picture with a line, and dots, for each name."""
    every = [point for points in lines.values() for point in points]
    place_x = _scale([x for x, _ in every], LEFT, WIDTH - RIGHT)
    place_y = _scale([y for _, y in every], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 16, title, "middle", 13),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across, "middle"),
        _text(8, TOP - 8, up, "start"),
    ]
    for x in sorted({x for x, _ in every}):
        parts += [_text(place_x(x), HEIGHT - BOTTOM + 16, _short(x), "middle"), _tick(place_x(x), vertical=True)]
    for y in _decades([y for _, y in every]):
        parts += [_text(LEFT - 6, place_y(y) + 4, _short(y), "end"), _tick(place_y(y), vertical=False)]
    for (name, points), color in zip(lines.items(), COLORS, strict=False):
        spots = [(place_x(x), place_y(y)) for x, y in sorted(points)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in spots]
        parts.append(_text(spots[-1][0], spots[-1][1] - 8, name, "end", color=color))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scale(values: Sequence[float], begin: float, end: float) -> Callable[[float], float]:
    low, high = math.log(min(values)) - 0.1, math.log(max(values)) + 0.1
    return lambda value: begin + (math.log(value) - low) / (high - low) * (end - begin)


def _decades(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten within the range; its ends where there are none."""
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    marks = [part * 10.0**power for power in powers for part in (1, 2, 5)]
    return [mark for mark in marks if min(values) <= mark <= max(values)] or [min(values), max(values)]


def _text(x: float, y: float, words: str, anchor: str, size: int = 11, color: str = "#222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}"'
    return f"<text {place}>{escape(words)}</text>"


def _tick(at: float, vertical: bool) -> str:
    ends = (at, TOP, at, HEIGHT - BOTTOM) if vertical else (LEFT, at, WIDTH - RIGHT, at)
    x1, y1, x2, y2 = (f"{end:.1f}" for end in ends)
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#ddd"/>'


def _short(number: float) -> str:
    return f"{number:.3g}" if number < 10_000 else f"{number / 1e6:g} M" if number >= 1e6 else f"{number / 1e3:g} k"
