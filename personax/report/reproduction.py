"""The page of a reproduction: the paper's numbers beside ours, the claims judged, the curves."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from personax.report.figures import Figure
from personax.report.page import bullets, document, facts_html, figure_html
from personax.report.runs import PALETTE, SYMBOLS, Look
from personax.report.tables import table
from personax.report.traces import band_and_line, figure, text, thin_line
from personax.report.words import is_share, moment, seconds
from personax.reproduce.outcome import (
    CellRecord,
    ClaimRecord,
    CurveRecord,
    ReadingRecord,
    ReproductionRecord,
    difference_shown,
    shown,
)


def render(record: ReproductionRecord) -> str:
    """The whole page."""
    drawn = list(_curves(record))
    sections = [
        ("results", "The paper's numbers and ours", _warning(record) + _tables(record)),
        ("claims", "The paper's claims", _claims(record.claims)),
        *([("curves", "Curves", "".join(figure_html(one, with_title=True) for one in drawn))] if drawn else []),
        ("choices", "What the paper does not say, and what was chosen", bullets(record.choices)),
        ("protocols", "What each reading measures", bullets(_readings(record.cells))),
        ("data", "Data", bullets([f"{name}: {origin}" for name, origin in record.data.items()])),
    ]
    facts = {
        "from": record.source,
        "started": moment(record.started),
        "took": seconds(record.seconds),
        "length": record.length,
        "seeds": str(len(record.seeds)),
        **record.machine,
        "personax": record.personax,
    }
    named = f"{record.name}: {record.title}"
    return document(named, facts_html(facts), sections, drawn, "the results.json of a reproduction")


def _warning(record: ReproductionRecord) -> str:
    quick = "<p class='verdict'>Quick: fewer rounds and seeds than the paper. Not a reproduction.</p>"
    return quick if record.quick else ""


def _tables(record: ReproductionRecord) -> str:
    """A table for each row of the paper's: columns, the paper, and every reading of ours."""
    rows = dict.fromkeys(cell.row for cell in record.cells)
    return "".join(_row_table(row, [cell for cell in record.cells if cell.row == row]) for row in rows)


def _row_table(row: str, cells: Sequence[CellRecord]) -> str:
    names = list(dict.fromkeys(reading.reading for cell in cells for reading in cell.readings))
    heads = "".join(f"<th scope='col'>{escape(name)}</th>" for name in ("paper", *names, "difference"))
    body = []
    for cell in cells:
        found = {reading.reading: reading for reading in cell.readings}
        ours = "".join(f"<td>{_number(found.get(name), cell.metric)}</td>" for name in names)
        paper, away = "–", "–"
        if cell.paper is not None and cell.paper_interval is not None:
            paper = f"{shown(cell.paper, cell.metric)} ±&nbsp;{shown(cell.paper_interval, cell.metric)}"
            away = shown(cell.readings[0].ours - cell.paper, cell.metric, "+")
        chosen = f" <span class='small'>{escape(cell.chosen)}</span>" if cell.chosen else ""
        name = f"<th scope='row'>{escape(cell.column)}{chosen}</th>"
        body.append(f"<tr>{name}<td>{paper}</td>{ours}<td>{away}</td></tr>")
    return table(f"{escape(row)}: {_metric(cells)}", f"<tr><th scope='col'></th>{heads}</tr>", body)


def _metric(cells: Sequence[CellRecord]) -> str:
    """What is measured, with its unit."""
    names = dict.fromkeys(cell.metric for cell in cells)
    return ", ".join(text(name) + (", %" if is_share(name) else "") for name in names)


def _number(reading: ReadingRecord | None, metric: str) -> str:
    if reading is None:
        return "–"
    half = "" if reading.high is None else f" ±&nbsp;{shown(reading.high - reading.ours, metric)}"
    flag = f" <span class='small'>{escape(reading.flag)}</span>" if reading.flag else ""
    return f"{shown(reading.ours, metric)}{half}{flag}"


def _claims(claims: Sequence[ClaimRecord]) -> str:
    body = []
    for claim in claims:
        rows = "; ".join(f"{row.name}: {difference_shown(row)}" for row in claim.contrasts)
        name = f"<th scope='row'>{escape(claim.words)} <span class='small'>{escape(claim.place)}</span></th>"
        body.append(f"<tr>{name}<td>{claim.verdict}</td><td class='words'>{escape(rows)}</td></tr>")
    head = "<tr><th scope='col'>claim</th><th scope='col'>here</th><th scope='col'>paired difference</th></tr>"
    return table("Paired differences over seeds with their 95 % intervals", head, body)


ALONG = {"rounds": "rounds", "times": "virtual time", "seconds": "seconds"}


def _curves(record: ReproductionRecord) -> list[Figure]:
    """Each row along its training, where it was followed; the paper's end points as lines."""
    followed = [cell for cell in record.cells if cell.curve is not None]
    rows = dict.fromkeys(cell.row for cell in followed)
    return [_row_figure(at, row, [cell for cell in followed if cell.row == row]) for at, row in enumerate(rows)]


def _row_figure(at: int, row: str, cells: Sequence[CellRecord]) -> Figure:
    delayed = any(cell.curve is not None and cell.curve.times for cell in cells)
    along = {name: words for name, words in ALONG.items() if delayed or name != "times"}
    if delayed:  # a synchronous round and an arrival are not the same amount of work
        along = {"times": along["times"], **along}
    views = [_view(cells, name, words) for name, words in along.items()]
    facts = (
        "Mean over clients; bands are 95 % t-intervals over seeds. Seconds are those of training all seeds together on "
        "the machine above. Thin lines are the paper's numbers at the end."
    )
    return Figure(f"curves-{at}", row, facts, facts, views, {"against": list(along.values())})


def _view(cells: Sequence[CellRecord], along: str, words: str) -> go.Figure:
    traces = []
    for at, cell in enumerate(cells):
        look = Look(PALETTE[at % len(PALETTE)][0], "solid", SYMBOLS[at % len(SYMBOLS)])
        assert isinstance(cell.curve, CurveRecord)  # only such cells are drawn
        x = getattr(cell.curve, along)
        scale = 100 if is_share(cell.metric) else 1
        values = [[value / scale for value in of_seeds] for of_seeds in cell.curve.of_seeds]
        traces += band_and_line(look, cell.column, x, values, cell.metric)
        if cell.paper is not None:
            traces.append(thin_line(look, f"{cell.column}: the paper", [x[0], x[-1]], [cell.paper] * 2, "dot"))
    return figure(traces, words, f"mean {_metric(cells)}")


def _readings(cells: Sequence[CellRecord]) -> list[str]:
    return list(dict.fromkeys(f"{one.reading}: {one.words}" for cell in cells for one in cell.readings))
