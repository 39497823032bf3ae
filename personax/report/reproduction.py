"""The page of a reproduction: the paper's numbers beside ours, the claims judged, the curves."""

from collections.abc import Sequence

import plotly.graph_objects as go

from personax.report.document import (
    Block,
    Facts,
    PageSection,
    Paragraph,
    Row,
    Table,
    TableCell,
    bullets,
    document,
    table,
)
from personax.report.figures import Figure
from personax.report.runs import PALETTE, SYMBOLS, Look
from personax.report.tables import NO_BREAK
from personax.report.traces import band_and_line, figure, thin_line
from personax.report.words import is_share, moment, seconds
from personax.reproduce.outcome import (
    CellRecord,
    ClaimRecord,
    CurveRecord,
    ReproductionRecord,
    ScoringRecord,
    difference_shown,
    interval_shown,
    shown,
)


def render(record: ReproductionRecord) -> str:
    """The whole page."""
    drawn = _curves(record)
    quick = [Paragraph("Quick: fewer rounds and seeds than the paper. Not a reproduction.", "verdict")]
    results: list[Block] = [*(quick if record.quick else []), *_tables(record)]
    sections = [
        PageSection("results", "The paper's numbers and ours", results),
        PageSection("claims", "The paper's claims", [_claims(record.claims)]),
        *([PageSection("curves", "Curves", figures=drawn)] if drawn else []),
        PageSection("choices", "What the paper does not say, and what was chosen", [bullets(record.choices)]),
        PageSection("protocols", "What each reading measures", [bullets(_readings(record.cells))]),
        PageSection("data", "Data", [bullets([f"{name}: {origin}" for name, origin in record.data.items()])]),
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
    return document(f"{record.name}: {record.title}", Facts(facts), sections, "the results.json of a reproduction")


def _tables(record: ReproductionRecord) -> list[Table]:
    """A table for each row of the paper's: columns, the paper, and every reading of ours."""
    rows = dict.fromkeys(cell.row for cell in record.cells)
    return [_row_table(row, [cell for cell in record.cells if cell.row == row]) for row in rows]


def _row_table(row: str, cells: Sequence[CellRecord]) -> Table:
    names = list(dict.fromkeys(one.name for cell in cells for one in cell.scorings))
    rows = []
    for cell in cells:
        found = {one.name: one for one in cell.scorings}
        ours = [_number(found.get(name), cell.metric) for name in names]
        paper, away = "–", "–"
        if cell.paper is not None and cell.paper_interval is not None:
            paper = f"{shown(cell.paper, cell.metric)} ±{NO_BREAK}{shown(cell.paper_interval, cell.metric)}"
            away = shown(cell.scorings[0].ours.mean - cell.paper, cell.metric, "+")
        rows.append(Row(TableCell(cell.column, small=_some(cell.chosen)), [TableCell(paper), *ours, TableCell(away)]))
    return table(f"{row}: {_metric(cells)}", ("", "paper", *names, "difference"), rows)


def _some(text: str | None) -> list[str]:
    return [text] if text else []


def _metric(cells: Sequence[CellRecord]) -> str:
    """What is measured, with its unit."""
    names = dict.fromkeys(cell.metric for cell in cells)
    return ", ".join(name + (", %" if is_share(name) else "") for name in names)


def _number(scoring: ScoringRecord | None, metric: str) -> TableCell:
    if scoring is None:
        return TableCell("–")
    return TableCell(interval_shown(scoring.ours, metric, f" ±{NO_BREAK}"), small=_some(scoring.flag))


def _claims(claims: Sequence[ClaimRecord]) -> Table:
    rows = []
    for claim in claims:
        found = claim.reason or "; ".join(
            f"{row.name}: {difference_shown(row)}" for one in claim.judged for row in one.contrasts
        )
        rows.append(
            Row(TableCell(claim.words, small=[claim.place]), [TableCell(claim.verdict), TableCell(found, "words")])
        )
    heads = ("claim", "here", "paired difference")
    return table("Paired differences over seeds with their 95 % intervals", heads, rows)


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
    return list(dict.fromkeys(f"{one.name}: {one.words}" for cell in cells for one in cell.scorings))
