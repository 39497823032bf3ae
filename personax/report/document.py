"""Pages as plain values, rendered to a single HTML file that makes no network requests.

The templates in `templates/` escape every value, so a page's content is always text, never markup.
"""

import base64
import csv
import hashlib
import io
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from personax.experiment.folders import readable_slug
from personax.report.alternatives import HEADS, numbers_of, sentence
from personax.report.figures import Figure
from personax.report.runs import GRAYS, PALETTE

FORMULA = ("=", "+", "-", "@", "\t")  # a spreadsheet evaluates text that begins with one of these
SCRIPTS = ("numbers.js", "marks.js", "chart.js", "page.js")
FOLDER = Path(__file__).with_name("templates")
TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["file_name"] = readable_slug


class Swatch(NamedTuple):
    """A sample of a line: its style, and its colors on light and dark pages."""

    line: str
    light: str
    dark: str


class TableCell(NamedTuple):
    """A table cell: its text, its CSS class, small lines below it and a warning.

    `mark` is "better" or "worse" if the difference is clear; `share` is drawn as a bar.
    """

    text: str
    kind: str = ""
    small: Sequence[str] = ()
    flag: str = ""
    mark: str = ""
    swatch: Swatch | None = None
    share: float | None = None


class Row(NamedTuple):
    """A named table row."""

    name: TableCell
    cells: Sequence[TableCell]
    kind: str = ""


class Group(NamedTuple):
    """Rows that belong together, with a title if there are several groups."""

    rows: Sequence[Row]
    title: TableCell | None = None


class Table(NamedTuple):
    """A table; `over` has titles that span several columns, with their widths, excluding the first two and the last.

    `data` holds the rows of its CSV, titles first; by default the texts of the cells.
    """

    caption: str
    heads: Sequence[TableCell]
    groups: Sequence[Group]
    over: Sequence[tuple[str, int]] = ()
    data: Sequence[Sequence[object]] = ()
    macro = "table"

    @property
    def csv(self) -> str:
        """Return the table as a CSV data URL, so that the page needs no other file."""
        return f"data:text/csv;charset=utf-8,{quote(csv_of(self.data or self._texts()))}"

    def _texts(self) -> list[list[str]]:
        rows = [[_flat(cell) for cell in (row.name, *row.cells)] for group in self.groups for row in group.rows]
        titles = [group.title for group in self.groups for _ in group.rows]
        heads = [_flat(head) for head in self.heads]
        if not any(titles):
            return [heads, *rows]
        named = ((_flat(title) if title else "", row) for title, row in zip(titles, rows, strict=True))
        return [["", *heads], *([title, *row] for title, row in named)]


class Facts(NamedTuple):
    """Names with values, shown in a row."""

    values: Mapping[str, str]
    macro = "facts"


class Bullets(NamedTuple):
    """A list of texts, each preceded by a key, which may be empty."""

    items: Sequence[tuple[str, str]]
    macro = "bullets"


class Subtitle(NamedTuple):
    """A heading within a section."""

    text: str
    macro = "subtitle"


class Paragraph(NamedTuple):
    """A paragraph with a CSS class; `start` is emphasized."""

    text: str
    kind: str = ""
    start: str = ""
    macro = "paragraph"


class Notes(NamedTuple):
    """The notes that apply to a table of results."""

    several_seeds: bool
    baselines: bool
    unranked: bool
    diverged: bool
    several_runs: bool
    macro = "notes"


class Preformatted(NamedTuple):
    """Preformatted text; with `hanging`, long lines wrap with an indent."""

    text: str
    hanging: bool = False
    macro = "preformatted"


class Picture(NamedTuple):
    """An SVG drawing, embedded as an image so that it cannot run scripts in the page."""

    svg: str
    alt: str
    macro = "picture"

    @property
    def source(self) -> str:
        """Return the drawing as a data URL."""
        return f"data:image/svg+xml;base64,{b64encode(self.svg.encode()).decode()}"


class Folded(NamedTuple):
    """A block that stays hidden until its summary is clicked."""

    summary: str
    block: Table | Preformatted
    macro = "folded"


Block = Table | Facts | Bullets | Subtitle | Paragraph | Notes | Preformatted | Picture | Folded


class PageSection(NamedTuple):
    """A section: its anchor, its title, its blocks, and the figures after them."""

    anchor: str
    title: str
    blocks: Sequence[Block] = ()
    figures: Sequence[Figure] = ()


def document(name: str, about: Block, sections: Sequence[PageSection], source: str, follow: float = 0) -> str:
    """Render a page as HTML; with `follow`, it polls its server for new numbers every `follow` seconds."""
    drawn = [figure for section in sections for figure in section.figures]
    script = "".join((FOLDER / part).read_text(encoding="utf-8") for part in SCRIPTS)
    page = TEMPLATES.get_template("page.html.jinja")
    values = {"name": name, "about": about, "sections": sections, "source": source, "follow": follow}
    numbers = {figure.name: numbers_table(figure) for figure in drawn}
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page.render(values, numbers=numbers, alt_of=alt_of, figures=_as_json(drawn), script=script, digest=digest)


def alt_of(figure: Figure) -> str:
    """Return the alternative text of a figure: its description and a summary of its last values."""
    return f"{figure.alt} {sentence(figure.views[0])}".strip()


def numbers_table(figure: Figure) -> Table:
    """Tabulate the numbers of a figure's first view."""
    found = numbers_of(figure.views[0])
    rows = [Row(TableCell(first), [TableCell(cell) for cell in rest]) for first, *rest in found.rows]
    return table(found.caption, HEADS, rows)


def csv_of(rows: Sequence[Sequence[object]]) -> str:
    """Format rows as CSV, with an apostrophe before any text that a spreadsheet would evaluate."""
    file = io.StringIO()
    quoted = lambda cell: f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell
    csv.writer(file).writerows([[quoted(cell) for cell in row] for row in rows])
    return file.getvalue()


def _flat(cell: TableCell) -> str:
    """Return the text of a cell including the lines below it."""
    return "; ".join(part for part in (cell.text, *cell.small, cell.flag) if part).replace("\xa0", " ")


def bullets(lines: Sequence[str]) -> Bullets:
    """Make a list of texts without keys."""
    return Bullets([("", line) for line in lines])


def table(caption: str, heads: Sequence[str], rows: Sequence[Row], kind: str = "") -> Table:
    """Make a table with a single group; `kind` is the CSS class of its titles."""
    return Table(caption, [TableCell(head, kind) for head in heads], [Group(rows)])


def _as_json(drawn: Sequence[Figure]) -> str:
    """Serialize figures for the script, escaped so that no character can close its element."""
    view = lambda one: {**one.to_plotly_json(), "numbers": numbers_of(one)._asdict()}
    described = [{"name": figure.name, "views": [view(one) for one in figure.views]} for figure in drawn]
    content = {"figures": described, "colors": [*PALETTE, *GRAYS.values()]}
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
