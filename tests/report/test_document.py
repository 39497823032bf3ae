"""Pages are rendered from values, and every text in every block is escaped."""

import base64
import csv
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import plotly.graph_objects as go
import pytest
from jinja2 import UndefinedError

from personax.report.alternatives import sentence
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


def test_only_the_figures_and_the_script_are_not_escaped():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "report").rglob("*.*") if path.suffix != ".pyc"]
    assert sorted(re.findall(r"\{\{ (\w+) \| safe \}\}", "".join(texts))) == ["figures", "script"]
    assert sum(len(re.findall(r"\bsafe\b|\bMarkup\b|autoescape (?:false|off)", text)) for text in texts) == 2


def test_a_table_carries_itself_as_csv():
    rows = [Row(TableCell("=cmd()", small=["a, b"]), [TableCell("-1"), TableCell('say "x"', flag="careful")])]
    page = document("name", Table("Two: columns", [TableCell(h) for h in ("", "n", "t")], [Group(rows)]), [], "source")
    link = re.search(r"href='data:text/csv;charset=utf-8,([^']*)' download='two-columns.csv'", page).group(1)
    found = list(csv.reader(io.StringIO(unquote(link))))
    assert found == [["", "n", "t"], ["'=cmd(); a, b", "'-1", 'say "x"; careful']]  # a spreadsheet runs neither
    grouped = Table("t", [TableCell("h")], [Group([Row(TableCell("a"), [])], TableCell("run 1"))])
    assert unquote(grouped.csv).endswith("utf-8,,h\r\nrun 1,a\r\n")


def test_every_figure_has_its_numbers_as_text():
    line = go.Scatter(x=[0, 1, 2, 3], y=[4.0, -1.0, None, 2.5], name="a &lt; b")
    band = go.Scatter(x=[0, 1], y=[9, 9], hoverinfo="skip")
    bars = go.Bar(x=[1, 2], y=[30, 70], name="bars")
    layout = {"xaxis": {"title": {"text": "round"}}, "yaxis": {"title": {"text": "loss"}}}
    figure = Figure("f", "Title", "Words.", "A line and bars.", [go.Figure([line, band, bars], layout)])
    page = document("name", Facts({}), [PageSection("s", "Section", figures=[figure])], "source")
    words = page[page.index("<figure>") : page.index("</figure>")]
    alt = "A line and bars. The highest value is 70 at 2 (bars)."
    assert f"role='img' aria-label='{alt}'" in words
    table = re.search(r"<details class='numbers' id='numbers-f'>(.*)</details>", words, re.DOTALL).group(1)
    cells = [re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[dh].*?</t[dh]>", table)]
    assert cells[:5] == ["", "first", "lowest", "highest", "last"] and "loss, against round" in table
    assert cells[5:10] == ["a &lt; b", "4 at 0", "−1 at 1", "4 at 0", "2.5 at 3"]
    assert cells[10:] == ["bars", "30 at 1", "30 at 1", "70 at 2", "70 at 2"]


def test_the_alternative_text_names_the_last_values():
    lines = [go.Scatter(x=[0, 9], y=[1, end], name=name) for name, end in (("A", 3.0), ("B", -0.5))]
    assert sentence(go.Figure(lines)) == "At the end, the highest is A (3) and the lowest B (−0.5)."
    assert sentence(go.Figure(lines[:1])) == "The last value is 3 at 9."
    assert sentence(go.Figure()) == ""


def test_a_page_runs_only_its_own_script():
    page = document("name", Facts({}), [], "source")
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'content="(default-src.*?)"', page, re.DOTALL).group(1)
    assert re.search("script-src ([^;]*)", policy).group(1) == f"'sha256-{digest}'"
    assert "connect-src" not in policy and "connect-src 'self'" in document("name", Facts({}), [], "source", follow=1)


def test_undefined_names_in_templates_are_errors():
    with pytest.raises(UndefinedError):
        TEMPLATES.from_string("{{ missing }}").render()
