"""A browser draws the report offline on phones and desktops, and its figures respond to mouse and keys."""

import csv
import io
from html import unescape
from xml.etree import ElementTree

import numpy as np
import pytest

from personax.experiment.records import read_results
from personax.report import write_report
from tests.report.browser import CHROMIUM, PLOTS, WIDTH, Browser
from tests.report.test_report import HOSTILE, figures_of, page_of, row_of

GAPS = """p => {
  const at = name => p.querySelector(name).getBoundingClientRect(), box = p.getBoundingClientRect();
  const legend = at('.legend');
  return [legend.top - at('.xtitle').bottom, box.bottom - legend.bottom, box.right - legend.right];
}"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.mark.xdist_group("chromium")
@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_every_figure_is_drawn_without_a_network(browser, full, page, width, scheme):
    browser.open(full / "report.html", width, scheme)
    assert browser.ask(f"{PLOTS}.map(p => p.id)") == [f"plot-{name}" for name in figures_of(page)]
    marks = "p => p.querySelectorAll('.line, .bar').length"
    assert min(browser.ask(f"{PLOTS}.map({marks})")) > 0
    assert browser.ask(WIDTH) <= width
    assert max(browser.ask(f"{PLOTS}.map(p => p.querySelector('.stage > svg').getBoundingClientRect().right)")) <= width
    scrolls = "t => getComputedStyle(t.parentElement).overflowX === 'auto' && t.parentElement.clientWidth < innerWidth"
    assert browser.ask(f"[...document.querySelectorAll('table')].every({scrolls})")
    fits = browser.ask("[...document.querySelectorAll('.scroll')].every(box => box.scrollWidth <= box.clientWidth)")
    assert fits == (width == 1280)
    assert np.min(browser.ask(f"{PLOTS}.map({GAPS})")) >= -1  # the legend is below the axis and inside the figure
    inside = "p => Number(p.querySelector('clipPath rect').getAttribute('height'))"
    assert min(browser.ask(f"{PLOTS}.map({inside})")) > 230  # and takes nothing from the plot
    assert browser.complaints() == []


@pytest.mark.xdist_group("chromium")
def test_every_choice_draws_its_view(browser, full, page):
    browser.open(full / "report.html", 1280)
    walk = """(async () => {
      const empty = [];
      const visit = async (plot, selectors, at) => {
        if (at < selectors.length) {
          for (const option of selectors[at].options) { option.selected = true; await visit(plot, selectors, at + 1); }
        } else if (at) {
          selectors[0].dispatchEvent(new Event('change'));
          await new Promise(requestAnimationFrame);
          const right = plot.querySelector('.ytitle').textContent.includes(selectors[0].value);
          if (!right || !plot.querySelector('.trace')) empty.push(selectors.map(selector => selector.value).join(', '));
        }
      };
      for (const plot of document.querySelectorAll('.plot'))
        await visit(plot, [...plot.parentElement.querySelectorAll('select')], 0);
      return empty;
    })()"""
    itself = ("the global model, FedAvg", "local training, local training")
    assert browser.ask(walk) == [f"{metric}, {choice}" for metric in ("accuracy", "loss") for choice in itself]
    assert browser.complaints() == []


@pytest.mark.xdist_group("chromium")
def test_a_dark_page_has_its_own_colors(browser, full, page):
    line = "document.querySelector('#plot-curves [data-trace=APFL] .line').getAttribute('stroke')"
    text = "getComputedStyle(document.querySelector('.xtitle')).fill"
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.open(full / "report.html", 1280)
    seen = []
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.ask("new Promise(done => setTimeout(done, 300))")
        seen.append([browser.ask(color) for color in (line, text, ground)])
    assert all(light != dark for light, dark in zip(*seen, strict=True))


@pytest.mark.xdist_group("chromium")
def test_the_wide_table_has_a_hint_only_on_a_phone(browser, full):
    hint = "getComputedStyle(document.querySelector('#results .hint')).display"
    page_of(full)
    for width, shown in ((420, "block"), (1280, "none")):
        browser.open(full / "report.html", width)
        browser.ask("new Promise(done => setTimeout(done, 100))")
        assert browser.ask(hint) == shown
        assert browser.ask(WIDTH) <= width


CENTER = """(() => {
  const box = document.querySelector('#plot-curves .stage > svg').getBoundingClientRect();
  window.scrollTo(0, box.top + window.scrollY - 100);
  const now = document.querySelector('#plot-curves .stage > svg').getBoundingClientRect();
  return [now.left, now.top, now.width, now.height];
})()"""
TICKS = "[...document.querySelectorAll('#plot-curves .stage > svg > text')].map(t => t.textContent).join()"


def drag(browser, x1, y1, x2, y2):
    for kind, x, y in (
        ("mouseMoved", x1, y1),
        ("mousePressed", x1, y1),
        ("mouseMoved", x2, y2),
        ("mouseReleased", x2, y2),
    ):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)


@pytest.mark.xdist_group("chromium")
def test_a_figure_can_be_zoomed_hovered_and_searched_by_keys(browser, full, page):
    browser.open(full / "report.html", 1280)
    left, top, width, height = browser.ask(CENTER)
    opened = browser.ask(TICKS)
    drag(browser, left + 0.5 * width, top + 0.2 * height, left + 0.8 * width, top + 0.6 * height)
    zoomed = browser.ask(TICKS)
    button = "[...document.querySelectorAll('#curves .tools button')].find(b => b.textContent === '{}')"
    browser.ask(f"{button.format('Show all')}.click()")
    whole = browser.ask(TICKS)
    browser.ask(f"{button.format('Zoom back')}.click()")
    assert len({opened, zoomed, whole}) == 3 and browser.ask(TICKS) == opened
    mark = "document.querySelector('#plot-curves [data-trace=APFL] .mark:last-of-type').getBoundingClientRect()"
    x, y = browser.ask(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({mark})")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = "document.querySelector('#plot-curves .tip').textContent"
    row = row_of(full, "APFL").mean
    assert browser.ask(tip) == f"APFL{100 * row.mean:.1f} ± {100 * row.half:.1f} % at 150"
    browser.ask("document.querySelector('#plot-curves .stage > svg').focus()")
    key = lambda name: browser.call("Input.dispatchKeyEvent", type="keyDown", key=name)
    key("ArrowLeft")
    assert browser.ask(tip).startswith("APFL") and browser.ask(tip).endswith("at 120")
    key("Escape")
    assert browser.ask(tip) == ""
    browser.ask("document.querySelector('#plot-curves .legend button').click()")
    assert browser.ask("document.querySelectorAll('#plot-curves [data-trace=\"local training\"]').length") == 0
    assert browser.complaints() == []


@pytest.mark.xdist_group("chromium")
def test_the_numbers_below_a_figure_are_those_of_the_view(browser, full, page):
    browser.open(full / "report.html", 1280)
    choose = """(axis => {
      const select = document.querySelectorAll('select[data-figure=curves]')[1];
      select.value = axis;
      select.dispatchEvent(new Event('change'));
      const table = document.querySelector('#numbers-curves table');
      return [table.caption.textContent.trim(), table.tBodies[0].rows[0].cells[4].textContent];
    })"""
    last = read_results(full).algorithms[0].scores[0].evaluations[-1]
    caption, cell = browser.ask(f"{choose}('seconds')")
    assert caption == "mean accuracy, %, against wall-clock seconds" and cell.endswith(f"at {last.seconds:.4g}")
    caption, cell = browser.ask(f"{choose}('rounds')")
    assert caption == "mean accuracy, %, against round" and cell.endswith("at 150")


KEPT = """(async text => {
  let kept;
  URL.createObjectURL = blob => { kept = blob; return 'data:,'; };
  [...document.querySelectorAll('#clients .tools button')].find(b => b.textContent === text).click();
  return await kept.text();
})"""


@pytest.mark.xdist_group("chromium")
def test_a_figure_and_its_numbers_can_be_saved(browser, full, page):
    browser.open(full / "report.html", 1280)
    rows = list(csv.reader(io.StringIO(browser.ask(f"{KEPT}('CSV')"))))
    lines = figures_of(page)["clients"][0]["data"]
    assert rows[0] == ["line", "share of clients, %", "accuracy, %", "note"]
    assert [row[:1] + row[3:] for row in rows[1:]] == [[unescape(d["name"]), n] for d in lines for n in d["customdata"]]
    np.testing.assert_allclose([float(row[2]) for row in rows[1:]], [y for d in lines for y in d["y"]])
    drawing = ElementTree.fromstring(browser.ask(f"{KEPT}('SVG')"))
    texts = [node.text for node in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"APFL", "share of clients, %", "accuracy, %"} <= set(texts)
    assert not [node for node in drawing.iter() if "href" in " ".join(node.attrib) or node.tag.endswith("script")]


@pytest.mark.xdist_group("chromium")
def test_attacks_in_names_do_nothing(browser, hostile):
    page_of(hostile)
    browser.open(hostile / "report.html", 390)
    assert browser.ask("document.querySelectorAll('header img, header script, main img, main script').length") == 0
    assert browser.ask("document.querySelector('h1').textContent") == f"run {HOSTILE}"
    assert browser.ask("document.querySelector('.legendtext').textContent").startswith("local training <script>")
    assert browser.ask(WIDTH) == 390
    assert browser.complaints() == []


@pytest.mark.xdist_group("chromium")
def test_several_runs_fit_a_phone(browser, full, minimal, regression, tmp_path):
    browser.open(write_report([full, minimal, regression], tmp_path / "report.html"), 390)
    assert browser.ask(WIDTH) == 390
    assert browser.complaints() == []
