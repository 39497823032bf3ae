"""A page as plain values, and its HTML: one file that asks the network for nothing.

The templates in `templates/` escape every value; what a page holds is therefore text, never markup.
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
from personax.report.runs import GREYS, PALETTE

FORMULA = ("=", "+", "-", "@", "\t")  # how a text begins that a spreadsheet would run
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
    """A sample of a line: its style, and its colours on light and on dark pages."""

    line: str
    light: str
    dark: str


class TableCell(NamedTuple):
    """A cell of a table: its text, a class of the style sheet, small lines below it, a warning.

    `mark` is "better" or "worse" where that is certain; `share` is drawn as a bar.
    """

    text: str
    kind: str = ""
    small: Sequence[str] = ()
    flag: str = ""
    mark: str = ""
    swatch: Swatch | None = None
    share: float | None = None


class Row(NamedTuple):
    """A row of a table with its name."""

    name: TableCell
    cells: Sequence[TableCell]
    kind: str = ""


class Group(NamedTuple):
    """Rows that belong together, with a title where there are several groups."""

    rows: Sequence[Row]
    title: TableCell | None = None


class Table(NamedTuple):
    """A table; `over` are titles above its columns, but for the first two and the last, each with its width.

    `data` is what its CSV has, with a row of titles first: by default the texts of the cells.
    """

    caption: str
    heads: Sequence[TableCell]
    groups: Sequence[Group]
    over: Sequence[tuple[str, int]] = ()
    data: Sequence[Sequence[object]] = ()
    macro = "table"

    @property
    def csv(self) -> str:
        """The address of the table as CSV: the text itself, so that a page needs no other file."""
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
    """Names and values in a row."""

    values: Mapping[str, str]
    macro = "facts"


class Bullets(NamedTuple):
    """A list of texts, each with a key before it, or an empty one."""

    items: Sequence[tuple[str, str]]
    macro = "bullets"


class Subtitle(NamedTuple):
    """A title within a section."""

    text: str
    macro = "subtitle"


class Paragraph(NamedTuple):
    """A paragraph of a class of the style sheet; `start` is emphasized."""

    text: str
    kind: str = ""
    start: str = ""
    macro = "paragraph"


class Notes(NamedTuple):
    """The notes that help to read the table of results: those that apply."""

    several_seeds: bool
    baselines: bool
    unranked: bool
    diverged: bool
    several_runs: bool
    macro = "notes"


class Preformatted(NamedTuple):
    """Text as it is; lines that are too long may continue indented."""

    text: str
    hanging: bool = False
    macro = "preformatted"


class Picture(NamedTuple):
    """A drawing as SVG, shown as an image: nothing in it can be a script of the page."""

    svg: str
    alt: str
    macro = "picture"

    @property
    def source(self) -> str:
        """The drawing as an address that holds it."""
        return f"data:image/svg+xml;base64,{b64encode(self.svg.encode()).decode()}"


class Folded(NamedTuple):
    """A block that is hidden until its summary is clicked."""

    summary: str
    block: Table | Preformatted
    macro = "folded"


Block = Table | Facts | Bullets | Subtitle | Paragraph | Notes | Preformatted | Picture | Folded


class PageSection(NamedTuple):
    """A section: its anchor, its title, its blocks, and the figures behind them."""

    anchor: str
    title: str
    blocks: Sequence[Block] = ()
    figures: Sequence[Figure] = ()


def document(name: str, about: Block, sections: Sequence[PageSection], source: str, follow: float = 0) -> str:
    """The HTML of a page; one with `follow` asks its server for new numbers, at intervals of `follow` seconds."""
    drawn = [figure for section in sections for figure in section.figures]
    script = "".join((FOLDER / part).read_text(encoding="utf-8") for part in SCRIPTS)
    page = TEMPLATES.get_template("page.html.jinja")
    values = {"name": name, "about": about, "sections": sections, "source": source, "follow": follow}
    numbers = {figure.name: numbers_table(figure) for figure in drawn}
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page.render(values, numbers=numbers, alt_of=alt_of, figures=_as_json(drawn), script=script, digest=digest)


def alt_of(figure: Figure) -> str:
    """The words for those who cannot see a figure: what it shows, and how it ends."""
    return f"{figure.alt} {sentence(figure.views[0])}".strip()


def numbers_table(figure: Figure) -> Table:
    """The numbers of a figure's first view: its text alternative."""
    found = numbers_of(figure.views[0])
    rows = [Row(TableCell(first), [TableCell(cell) for cell in rest]) for first, *rest in found.rows]
    return table(found.caption, HEADS, rows)


def csv_of(rows: Sequence[Sequence[object]]) -> str:
    """Rows as CSV. A text that a spreadsheet would run gets an apostrophe before it."""
    file = io.StringIO()
    quoted = lambda cell: f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell
    csv.writer(file).writerows([[quoted(cell) for cell in row] for row in rows])
    return file.getvalue()


def _flat(cell: TableCell) -> str:
    """The text of a cell with what is below it."""
    return "; ".join(part for part in (cell.text, *cell.small, cell.flag) if part).replace("\xa0", " ")


def bullets(lines: Sequence[str]) -> Bullets:
    """A list of texts without keys."""
    return Bullets([("", line) for line in lines])


def table(caption: str, heads: Sequence[str], rows: Sequence[Row], kind: str = "") -> Table:
    """A table of a single group; `kind` is the class of its titles."""
    return Table(caption, [TableCell(head, kind) for head in heads], [Group(rows)])


def _as_json(drawn: Sequence[Figure]) -> str:
    """The figures for the script; no character in it can end its element."""
    view = lambda one: {**one.to_plotly_json(), "numbers": numbers_of(one)._asdict()}
    described = [{"name": figure.name, "views": [view(one) for one in figure.views]} for figure in drawn]
    content = {"figures": described, "colors": [*PALETTE, *GREYS.values()]}
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
