"""A page as plain values, and its HTML: one file that asks the network for nothing.

The templates in `templates/` escape every value; what a page holds is therefore text, never markup.
"""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from personax.report.figures import Figure
from personax.report.runs import GREYS, PALETTE

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


class Swatch(NamedTuple):
    """A sample of a line: its style, and its colours on light and on dark pages."""

    line: str
    light: str
    dark: str


class TableCell(NamedTuple):
    """A cell of a table: its text, a class of the style sheet, small lines below it, a warning.

    `mark` is "better" or "worse" where that is certain.
    """

    text: str
    kind: str = ""
    small: Sequence[str] = ()
    flag: str = ""
    mark: str = ""
    swatch: Swatch | None = None


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
    """A table; `over` are titles above its columns, but for the first two and the last, each with its width."""

    caption: str
    heads: Sequence[TableCell]
    groups: Sequence[Group]
    over: Sequence[tuple[str, int]] = ()
    macro = "table"


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


def document(name: str, about: Block, sections: Sequence[PageSection], source: str) -> str:
    """The HTML of a page."""
    drawn = [figure for section in sections for figure in section.figures]
    page = TEMPLATES.get_template("page.html.jinja")
    values = {"name": name, "about": about, "sections": sections, "source": source}
    return page.render(values, figures=_as_json(drawn), plotly=get_plotlyjs())


def bullets(lines: Sequence[str]) -> Bullets:
    """A list of texts without keys."""
    return Bullets([("", line) for line in lines])


def table(caption: str, heads: Sequence[str], rows: Sequence[Row], kind: str = "") -> Table:
    """A table of a single group; `kind` is the class of its titles."""
    return Table(caption, [TableCell(head, kind) for head in heads], [Group(rows)])


def _as_json(drawn: Sequence[Figure]) -> str:
    """The figures for the script; no character in it can end its element."""
    described = [{"name": f.name, "views": [view.to_plotly_json() for view in f.views]} for f in drawn]
    content = {"figures": described, "colours": [*PALETTE, *GREYS.values()]}
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
