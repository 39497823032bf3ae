"""The figure of a reproduction: curves if training was recorded, otherwise a trend over settings, or dots."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite

from personax.evaluation.scores import Interval, interval
from personax.report.clients import thinned
from personax.report.comparison import MEASURES
from personax.report.svg import Dot, DotPanel, Line, LinePanel, draw
from personax.report.words import is_share
from personax.reproduce.outcome import CellRecord, CurveRecord, ReproductionRecord, shown

# Experiments whose horizontal axis is a setting: the axis title, and a pattern that finds the setting in a row's name.
TRENDS = {
    "apfl-figure1": ("classes of each client", r"(?P<at>[^:]+?)( classes)?: (?P<panel>.+)"),
    "apfl-figure6": ("epochs of the new client", r"(?P<data>.+), (?P<at>\d) epochs?: (?P<panel>.+)"),
}
ALONG = {"fallah-appendix": "seconds"}  # the axis of curves, if it is not virtual time or rounds
AXES = {"rounds": "rounds", "times": "virtual time", "seconds": "seconds of training, all seeds together"}
WIDE = 20  # at this ratio or above, losses are drawn on a logarithmic axis
HUGE = 100.0  # larger losses are written, not drawn
MOST_PANELS = 16
MOST_POINTS = 1000  # in all lines together, to keep the file small
NOT_DRAWN = ("step_times_curvature",)
EARLY = 0.1  # the first share of training, which is ignored when the height is scaled


def figure_of(record: ReproductionRecord) -> str:
    """Draw the figure as SVG, with the readings that count, or all if none does."""
    left_out = {reading.name for reading in record.readings if reading.excluded}
    drawn = [cell for cell in record.cells if cell.metric not in NOT_DRAWN]
    counted = [cell for cell in drawn if cell.reading not in left_out]
    return _figure(replace(record, cells=counted or drawn))


def _figure(record: ReproductionRecord) -> str:
    followed = any(cell.curve is not None for cell in record.cells)
    words = "Means over clients and seeds, with 95 % bands over seeds."
    if followed:
        panels = list(_curve_panels(record))
    elif record.name in TRENDS and all(re.fullmatch(TRENDS[record.name][1], cell.row) for cell in record.cells):
        panels = list(_trends(record))
    else:
        panels, words = (
            list(_dot_panels(record)),
            "Dots: our numbers with 95 % intervals over seeds. Diamonds: the paper's numbers.",
        )
    if followed and any(cell.paper is not None for cell in record.cells):
        words += " Diamonds: the paper's final numbers."
    if len(panels) > MOST_PANELS:
        words = f"The first {MOST_PANELS} of {len(panels)} settings (see the tables for all). {words}"
    return draw(f"{record.source}: {record.title}", panels[:MOST_PANELS], words)


def _curve_panels(record: ReproductionRecord) -> Iterator[LinePanel]:
    """Yield a panel for each row with a training curve; methods without training are level lines."""
    most = max(9, MOST_POINTS // sum(cell.curve is not None for cell in record.cells))
    for row, every in _rows(record.cells):
        cells = [cell for cell in every if cell.curve is not None]
        if not cells:
            continue
        delayed = any(cell.curve is not None and cell.curve.times for cell in cells)
        along = "times" if delayed else ALONG.get(record.name, "rounds")
        lines = [_curve(cell, cell.curve, along, most) for cell in cells if cell.curve is not None]
        ends = [edge(x for line in lines for x in line.x) for edge in (min, max)]
        metric, begin = cells[0].metric, EARLY * ends[1]
        untrained = [cell for cell in every if cell.is_baseline]
        lines += [_line(one.column, ends, [one.scorings[0].of_seeds] * 2, None, metric) for one in untrained]
        yield LinePanel(row, AXES[along], MEASURES.get(metric, metric), lines, {}, _is_wide(lines), begin)


def _curve(cell: CellRecord, curve: CurveRecord, along: str, most: int) -> Line:
    kept = thinned(len(curve.of_seeds), most)
    x = getattr(curve, along)
    return _line(cell.column, [x[at] for at in kept], [curve.of_seeds[at] for at in kept], cell.paper, cell.metric)


def _trends(record: ReproductionRecord) -> Iterator[LinePanel]:
    """Yield a panel for each measure, over the settings in the order of the rows."""
    across, pattern = TRENDS[record.name]
    found: dict[str, dict[str, list[CellRecord]]] = {}
    for row, cells in _rows(record.cells):
        match = re.fullmatch(pattern, row)
        assert match is not None  # the caller checked this
        title = ": ".join(filter(None, (match.groupdict().get("data"), match["panel"])))
        found.setdefault(title, {})[match["at"]] = cells
    for title, settings in found.items():
        ticks = {float(at): name for at, name in enumerate(settings)}
        metric = next(iter(settings.values()))[0].metric
        columns = dict.fromkeys(cell.column for cells in settings.values() for cell in cells)
        lines = []
        for column in columns:
            mine = [next(cell for cell in cells if cell.column == column) for cells in settings.values()]
            lines.append(_line(column, list(ticks), [cell.scorings[0].of_seeds for cell in mine], None, metric))
        yield LinePanel(title, across, MEASURES.get(metric, metric), lines, ticks, _is_wide(lines))


def _line(name: str, x: Sequence[float], of_seeds: Sequence[Sequence[float]], paper: float | None, metric: str) -> Line:
    found = [interval(values) for values in of_seeds]
    ends = [_ends(one, metric) or (one.mean, one.mean) for one in found]
    return Line(name, x, [one.mean for one in found], [low for low, _ in ends], [high for _, high in ends], paper)


def _ends(found: Interval, metric: str) -> tuple[float, float] | None:
    """Clip an interval to the range of the metric."""
    if found.low is None or found.high is None:
        return None
    return max(found.low, 0.0), min(found.high, _most(metric))


def _most(metric: str) -> float:
    return 100.0 if is_share(metric) else HUGE


def _dot_panels(record: ReproductionRecord) -> Iterator[DotPanel]:
    """Yield a panel for each row."""
    for row, cells in _rows(record.cells):
        metric, dots = cells[0].metric, [_dot(cell) for cell in sorted(cells, key=lambda cell: cell.is_baseline)]
        numbers = [number for dot in dots for number in (dot.value, dot.paper) if number is not None and not dot.words]
        yield DotPanel(row, MEASURES.get(metric, metric), dots, not is_share(metric) and _spans_decades(numbers))


def _dot(cell: CellRecord) -> Dot:
    ours = cell.scorings[0].ours
    words = "" if ours.mean <= _most(cell.metric) else shown(ours.mean, cell.metric)
    return Dot(cell.column, ours.mean, *(_ends(ours, cell.metric) or (None, None)), cell.paper, words)


def _is_wide(lines: Sequence[Line]) -> bool:
    return _spans_decades([y for line in lines for y in line.y])


def _spans_decades(numbers: Sequence[float]) -> bool:
    finite = [number for number in numbers if isfinite(number)]
    return bool(finite) and min(finite) > 0 and max(finite) > WIDE * min(finite)


def _rows(cells: Sequence[CellRecord]) -> Iterator[tuple[str, list[CellRecord]]]:
    """Group cells by row: (a), (b), ... in alphabetical order, the others in the given order."""
    for row in sorted(dict.fromkeys(cell.row for cell in cells), key=lambda row: row[:3] if row[0] == "(" else ""):
        yield row, [cell for cell in cells if cell.row == row]
