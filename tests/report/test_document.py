"""Pages are rendered from values: every text is escaped, whatever block it is in."""

import json
import re
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest
from jinja2 import UndefinedError

from personax.report.document import (
    TEMPLATES,
    Bullets,
    Facts,
    Folded,
    Group,
    PageSection,
    Paragraph,
    Preformatted,
    Row,
    Subtitle,
    Swatch,
    Table,
    TableCell,
    document,
)
from personax.report.figures import Figure
from tests.sources import ROOT

HOSTILE = "<img src=x onerror=alert(1)> '\"&"
CELL = TableCell(HOSTILE, HOSTILE, [HOSTILE], HOSTILE, "better", Swatch(HOSTILE, HOSTILE, HOSTILE))
TABLE = Table(HOSTILE, [CELL], [Group([Row(CELL, [CELL], HOSTILE)], CELL)], [(HOSTILE, 1)])
BLOCKS = {
    "table": TABLE,
    "facts": Facts({HOSTILE: HOSTILE}),
    "bullets": Bullets([(HOSTILE, HOSTILE)]),
    "subtitle": Subtitle(HOSTILE),
    "paragraph": Paragraph(HOSTILE, HOSTILE, HOSTILE),
    "hanging": Preformatted(HOSTILE, hanging=True),
    "folded table": Folded(HOSTILE, TABLE),
    "folded text": Folded(HOSTILE, Preformatted(HOSTILE)),
}


class Elements(HTMLParser):
    """The names of elements and attributes, and all text and values of attributes."""

    def __init__(self, page):
        super().__init__()
        self.names, self.texts = set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names |= {tag, *(name for name, _ in attrs)}
        self.texts += [value or "" for _, value in attrs]

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_text_of_a_block_is_escaped(kind):
    page = document("name", BLOCKS[kind], [], "source")
    found = Elements(page[page.index("<h1>") : page.index("<nav")])
    assert not found.names & {"img", "src", "onerror", "x"}
    assert "".join(found.texts).count(HOSTILE) >= str(BLOCKS[kind]).count(repr(HOSTILE))  # some are shown twice


def test_names_and_figures_are_escaped():
    figure = Figure(HOSTILE, HOSTILE, HOSTILE, HOSTILE, [go.Figure()], {HOSTILE: [HOSTILE]})
    page = document(HOSTILE, Facts({}), [PageSection(HOSTILE, HOSTILE, figures=[figure])], HOSTILE)
    data = re.search(r'id="figures">(.*)</script>', page).group(1)
    found = Elements(page[: page.index("<script type")])
    assert not found.names & {"img", "src", "onerror", "x"} and "<" not in data and HOSTILE in found.texts
    assert json.loads(data)["figures"][0]["name"] == HOSTILE


def test_only_the_figures_and_the_bundle_are_not_escaped():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "report").rglob("*.*") if path.suffix != ".pyc"]
    assert sorted(re.findall(r"\{\{ (\w+) \| safe \}\}", "".join(texts))) == ["figures", "plotly"]
    assert sum(len(re.findall(r"\bsafe\b|\bMarkup\b|autoescape (?:false|off)", text)) for text in texts) == 2


def test_a_template_cannot_name_what_is_not_there():
    with pytest.raises(UndefinedError):
        TEMPLATES.from_string("{{ missing }}").render()
