"""The page of a reproduction: its figure, the paper's numbers beside ours, the verdicts and the curves."""

from collections.abc import Iterator, Sequence

import plotly.graph_objects as go

from personax.report.comparison import (
    MEASURES,
    NumberTable,
    comparisons,
    effect_shown,
    mark,
    reading_groups,
    reading_words,
    scorings_of,
    tables_of,
    verdicts_by_reading,
)
from personax.report.document import (
    Block,
    Bullets,
    Facts,
    Folded,
    PageSection,
    Paragraph,
    Picture,
    Row,
    Table,
    TableCell,
    bullets,
    document,
    table,
)
from personax.report.drawings import figure_of
from personax.report.figures import Figure
from personax.report.overview import findings_of, why_of
from personax.report.runs import PALETTE, SYMBOLS, Look
from personax.report.traces import band_and_line, figure, thin_line
from personax.report.words import is_share, moment, seconds
from personax.reproduce.outcome import CellRecord, CurveRecord, ReproductionRecord


def render(record: ReproductionRecord) -> str:
    """Render the page."""
    drawn = _curves(record)
    quick = [Paragraph("Quick: fewer rounds and seeds than the paper. Not a reproduction.", "verdict")]
    drawing = Picture(figure_of(record), f"{record.source}: {record.title}")
    findings = [] if record.quick else findings_of(record, {record.name: record})
    results: list[Block] = [*(quick if record.quick else []), drawing, *_tables(record)]
    sections = [
        PageSection("results", "The paper's numbers and ours", results),
        PageSection("claims", "The paper's claims", list(_claims(record))),
        *([PageSection("findings", "Findings from the published record", [bullets(findings)])] if findings else []),
        *([PageSection("curves", "Curves", figures=drawn)] if drawn else []),
        PageSection("choices", "What the paper leaves open, and our choices", [bullets(record.choices)]),
        PageSection("protocols", "What each scoring measures", [bullets(scorings_of(record))]),
        PageSection("data", "Data", [bullets([f"{name}: {origin}" for name, origin in record.data.items()])]),
    ]
    facts = {
        "from": record.source,
        "started": moment(record.started),
        "took": seconds(record.seconds),
        "length": record.length,
        "seeds": str(len(record.seeds)),
        "precision": record.precision,
        **record.machine,
        "personax": record.personax,
    }
    return document(f"{record.name}: {record.title}", Facts(facts), sections, "the results.json of a reproduction")


def _tables(record: ReproductionRecord) -> Iterator[Block]:
    """Yield the tables for the first scoring, and folded tables for the others."""
    for group in reading_groups(record):
        if len(record.readings) > 1:
            yield Bullets([(reading.name, reading_words(reading)) for reading in group])
        for found in tables_of(record, group):
            yield _as_block(found)
        for found in tables_of(record, group, first=False):
            yield Folded(f"The same tables with another scoring: {found.scoring}", _as_block(found))


def _as_block(found: NumberTable) -> Table:
    rows = [Row(TableCell(line[0]), [TableCell(text or "–") for text in line[1:]]) for line in found.rows]
    return table("; ".join([found.caption, *found.notes]), found.heads, rows)


def _claims(record: ReproductionRecord) -> Iterator[Block]:
    """Yield the claims with their effects, and the folded comparisons behind them."""
    claims = record.claims
    why = lambda claim: " ".join(filter(None, (why_of(record, claim), claim.reason)))
    texts = [(mark(claim.verdict), effect_shown(claim.effect), why(claim)) for claim in claims]
    rows = [
        Row(TableCell(claim.words, small=[claim.place]), [TableCell(text, "text") for text in of])
        for claim, of in zip(claims, texts, strict=True)
    ]
    yield table("The papers' claims, judged over seeds", ("claim", "here", "effect", "why"), rows)
    by_reading = verdicts_by_reading(record)
    if by_reading is not None:
        yield _as_block(by_reading)
    for claim in claims:
        lines = [
            Row(TableCell(words), [TableCell(found), TableCell(verdict)])
            for words, found, verdict in comparisons(claim)
        ]
        if lines:
            heads = ("comparison", "paired difference with its 95 % interval", "")
            yield Folded(f"Every comparison: {claim.words}", table(claim.words, heads, lines))


ALONG = {"rounds": "rounds", "times": "virtual time", "seconds": "seconds"}


def _curves(record: ReproductionRecord) -> list[Figure]:
    """Draw the training curve of each row that has one, with the paper's final numbers as lines."""
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
        "Mean over clients; bands are 95 % t-intervals over seeds. Seconds cover the training of all seeds together on "
        "the machine above. Thin lines are the paper's final numbers."
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
    return figure(traces, words, f"mean {MEASURES.get(cells[0].metric, cells[0].metric)}")
