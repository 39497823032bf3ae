"""Small log-log line plots as SVG, which show how cost grows with one size."""

import math
from collections.abc import Callable, Mapping, Sequence

from personax.report.svg import circle, decades, head, polyline, rule, short, text

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 300, 64, 16, 34, 48
COLORS = ("#1f5fa8", "#c4661f", "#3a7d34", "#7a3b8f")
Points = Sequence[tuple[float, float]]


def draw(title: str, across: str, up: str, lines: Mapping[str, Points]) -> str:
    """Draw a plot with a line and dots for each name."""
    every = [point for points in lines.values() for point in points]
    place_x = _scale([x for x, _ in every], LEFT, WIDTH - RIGHT)
    place_y = _scale([y for _, y in every], HEIGHT - BOTTOM, TOP)
    parts = [
        *head(WIDTH, HEIGHT),
        text(WIDTH / 2, 16, title, "middle", 13),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across, "middle"),
        text(8, TOP - 8, up, "start"),
    ]
    for x in sorted({x for x, _ in every}):
        at = place_x(x)
        parts += [text(at, HEIGHT - BOTTOM + 16, short(x), "middle"), rule(at, TOP, at, HEIGHT - BOTTOM)]
    heights = [y for _, y in every]
    for y in decades(min(heights), max(heights)):
        at = place_y(y)
        parts += [text(LEFT - 6, at + 4, short(y), "end"), rule(LEFT, at, WIDTH - RIGHT, at)]
    for (name, points), color in zip(lines.items(), COLORS, strict=False):
        spots = [(place_x(x), place_y(y)) for x, y in sorted(points)]
        parts += [polyline(spots, color), *(circle(x, y, color) for x, y in spots)]
        parts.append(text(spots[-1][0], spots[-1][1] - 8, name, "end", color=color))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _scale(values: Sequence[float], begin: float, end: float) -> Callable[[float], float]:
    low, high = math.log(min(values)) - 0.1, math.log(max(values)) + 0.1
    return lambda value: begin + (math.log(value) - low) / (high - low) * (end - begin)
