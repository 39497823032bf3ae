"""The pages about the papers are generated, complete and small, and their sentences match the verdicts."""

import dataclasses
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from personax.evaluation.scores import interval
from personax.report import write_reproduction
from personax.report.comparison import effect_shown, reading_groups, tables_of, verdicts_by_reading
from personax.report.document import Facts, PageSection, Picture, document
from personax.report.drawings import figure_of
from personax.report.overview import (
    counted_of,
    effects_shown,
    filled,
    findings_of,
    mark_of,
    outdated,
    over_experiments,
    overview_row,
    overview_rows,
    why_of,
)
from personax.report.papers import cell, number_table, pages, read_records, section, write_pages
from personax.report.svg import Dot, DotPanel, Line, LinePanel, axis, draw
from personax.reproduce import EXPERIMENTS
from personax.reproduce.judging import judge
from personax.reproduce.outcome import (
    CellRecord,
    ClaimRecord,
    CurveRecord,
    EffectRecord,
    JudgedRecord,
    ReadingRecord,
    ScoringRecord,
)
from personax.reproduce.papers import FINDINGS, PAPERS, PaperClaim, paper_of
from tests.sources import ROOT

DOCS = ROOT.parent / "docs"
RECORDS = read_records(DOCS / "results")
BY_NAME = {record.name: record for record in RECORDS}
PAGES = pages(RECORDS)
SVG = "{http://www.w3.org/2000/svg}"
MAIN = ReadingRecord("main", "", "the text", "")


def test_the_committed_pages_are_what_the_command_writes(tmp_path):
    (tmp_path / "reproduction").mkdir()
    (tmp_path / "reproduction" / "gone.svg").write_text("of a record that is gone")
    write_pages(DOCS / "results", tmp_path)
    written = {str(path.relative_to(tmp_path)): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.*")}
    assert written == PAGES
    committed = [DOCS / "reproduction.md", *(DOCS / "reproduction").iterdir()]
    assert {str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in committed} == PAGES


def test_every_link_of_the_pages_leads_somewhere():
    for name, text in PAGES.items():
        for link in re.findall(r"\]\(([^)#]+)", text):
            assert (DOCS / name).parent.joinpath(link).exists(), f"{name}: {link}"


def test_every_claim_is_in_the_overview_once():
    """Claims that no paper makes, and those of readings that do not count, are on the paper's page alone."""
    tests = [test for paper in PAPERS.values() for claim in paper.claims for test in (*claim.tests, *claim.older)]
    assert len(set(tests)) == len(tests)
    stated = {
        f"{record.name}: {claim.words}"
        for record in RECORDS
        if any(not reading.excluded for reading in record.readings) and not EXPERIMENTS[record.name](False).causes_of
        for claim in record.claims
        if claim.place != "ours"
    }
    assert stated <= set(tests), f"missing in papers.toml: {sorted(stated - set(tests))}"
    for key, paper in PAPERS.items():
        assert {paper_of(test) for claim in paper.claims for test in (*claim.tests, *claim.older)} == {key}


def test_the_overview_can_be_read_in_a_minute_and_gives_each_claim_one_sentence():
    text = PAGES["reproduction.md"]
    assert len(text[: text.index("\n## ")].split()) < 330
    for paper in PAPERS.values():
        assert paper.findings and len(paper.summary.split()) <= 40
        for claim in paper.claims:
            assert claim.why.endswith(".") and len(claim.why.split()) <= 45, claim.why
    assert "TODO" not in "".join(PAGES.values())


def test_figures_are_drawn_for_every_record_and_light():
    for name, text in PAGES.items():
        if name.endswith(".svg"):
            assert len(text.encode()) < 60_000, name
            assert ElementTree.fromstring(text).tag == f"{SVG}svg" and "nan" not in text
    shown = {name for name in PAGES if name.endswith(".svg")}
    assert shown == {f"reproduction/{name}.svg" for name in BY_NAME if not EXPERIMENTS[name](False).unavailable}


def pretended(experiment):
    """A record of an experiment with made-up numbers and close seeds: curves of 51 points where it follows them."""
    draws = np.random.default_rng(0)
    cells = []
    for training in experiment.trainings:
        for one in training.cells:
            values = lambda *shape, one=one: (90 if one.metric == "accuracy" else 1) * draws.uniform(0.5, 1, shape)
            found = {name: values(3) for name in one.scorings}
            ways = [ScoringRecord(name, "", "", interval(of), of.tolist()) for name, of in found.items()]
            along = values(51, 1) + np.array([-0.01, 0, 0.01])
            curve = CurveRecord(list(range(51)), np.arange(51.0).tolist(), [], along.tolist())
            paper = (None, None) if one.paper is None else one.paper
            kept = None if training.every is None or one.is_baseline else curve
            place = (one.row, one.column, one.reading, one.metric)
            cells.append(CellRecord(*place, *paper, ways, {}, "", 0.0, one.is_baseline, kept))
    readings = [ReadingRecord(one.name, one.words, one.source, one.excluded) for one in experiment.readings]
    facts = {name: getattr(experiment, name) for name in ("name", "source", "title", "length")}
    claims = [judge(claim, cells, experiment.readings) for claim in experiment.claims]
    return dataclasses.replace(RECORDS[0], **facts, cells=cells, readings=readings, claims=claims)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_can_be_drawn_and_tabulated(name):
    experiment = EXPERIMENTS[name](False)
    record = pretended(experiment)
    drawing, text = figure_of(record), section(record)
    assert len(drawing.encode()) < 60_000 and "nan" not in drawing and ElementTree.fromstring(drawing) is not None
    for one in experiment.cells:
        assert one.column in text.replace("\N{NO-BREAK SPACE}", " ")
    for reading in experiment.readings if len(experiment.readings) > 1 else ():
        assert f"- **{reading.name}**" in text or f"### Reading: {reading.name}" in text
    for claim in experiment.claims:
        assert claim.words in text


def test_a_sentence_is_not_shown_for_another_verdict():
    claim = next(claim for paper in PAPERS.values() for claim in paper.claims if claim.expected == "holds")
    with pytest.raises(ValueError, match="the sentence about it expects 'does not hold'"):
        overview_row(dataclasses.replace(claim, expected="does not hold"), BY_NAME)
    with pytest.raises(ValueError, match="fallah-table1 has no claim 'a dream'"):
        overview_row(PaperClaim("", ["fallah-table1: a dream"], "holds", ""), BY_NAME)


def test_all_texts_that_no_longer_fit_are_named_at_once():
    claims = [PaperClaim(f"{at}", ["fallah-table1: a dream"], "holds", "") for at in "ab"]
    paper = dataclasses.replace(PAPERS["fallah"], claims=claims)
    with pytest.raises(ValueError, match=r"has no claim .*\n.*has no claim"):
        overview_rows({"fallah": paper}, BY_NAME)


def test_an_experiment_without_its_data_is_not_tested_and_its_record_is_not_shown(monkeypatch):
    name = "fallah-appendix"
    closed = dataclasses.replace(EXPERIMENTS[name](False), unavailable="The data cannot be had.")
    monkeypatch.setitem(EXPERIMENTS, name, lambda quick: closed)
    made = pages(RECORDS)
    text = made["reproduction.md"].replace("\N{NO-BREAK SPACE}", " ")
    assert "– not tested |  | The data cannot be had. |" in text
    assert f"reproduction/{name}.svg" not in made and f"({name}.svg)" not in made["reproduction/fallah.md"]


def test_a_claim_whose_experiment_was_not_run_is_not_tested():
    claim = PAPERS["fallah"].claims[0]
    found = overview_row(claim, {})
    assert found.verdict == "not tested" and found.why.startswith("Not run yet: `personax reproduce fallah-")


def test_the_numbers_of_a_text_are_those_of_the_records():
    place = ("fallah-table1", "MNIST, 4 steps, 0.01", "Per-FedAvg (HF)")
    found = next(one for one in BY_NAME[place[0]].cells if (one.row, one.column) == place[1:])
    text = "{{ ours" + str(place) + " }} for {{ paper" + str(place) + " }}"
    assert filled(text, BY_NAME) == f"{found.scorings[0].ours.mean:.1f} for 70.94"
    mean = lambda column: np.mean(
        next(c for c in BY_NAME[place[0]].cells if c.row == place[1] and c.column == column).scorings[0].of_seeds
    )
    gap = mean("FedAvg + update") - mean("Per-FedAvg (HF)")
    text = "{{ lead('MNIST, 4 steps, 0.01', 'FedAvg + update', 'Per-FedAvg (HF)') }}"
    assert filled(text, BY_NAME, place[0]) == f"{gap:.1f}".replace("-", "−")
    other = found.scorings[1]
    text = "{{ here('MNIST, 4 steps, 0.01', 'Per-FedAvg (HF)', '" + other.name + "') }}"
    assert filled(text, BY_NAME, place[0]) == f"{other.ours.mean:.1f}"
    at = "'fallah-appendix', 'CIFAR-10, 4 steps, 0.001', "
    long, short = (curve_of("fallah-appendix", column) for column in ("FedAvg + update", "Per-FedAvg (HF)"))
    text = "{{ ratio(" + at + "'Per-FedAvg (HF)', 'FedAvg + update') }}"
    assert filled(text, BY_NAME) == f"{short.seconds[-1] / short.rounds[-1] / (long.seconds[-1] / long.rounds[-1]):.1f}"
    text = "{{ alongside(" + at + "'FedAvg + update', 'Per-FedAvg (HF)') }}"
    then = np.interp(short.seconds[-1], long.seconds, np.mean(long.of_seeds, axis=1))
    assert filled(text, BY_NAME) == f"{then:.1f}"
    with pytest.raises(ValueError, match="fallah-table1 has no cell"):
        filled("{{ ours('fallah-table1', 'row', 'column') }}", BY_NAME)


def curve_of(name, column):
    return next(one.curve for one in BY_NAME[name].cells if one.column == column)


def test_untestable_experiments_do_not_count_beside_others():
    assert over_experiments(["not testable", "holds"]) == "holds"
    assert over_experiments(["not testable", "not testable"]) == "not testable"
    assert over_experiments(["does not hold", "holds"]) == "holds in part"


def made(row, column, values, paper=None, flag="", metric="accuracy", more=()):
    """A cell as a record has it."""
    scorings = [ScoringRecord("ours", "", flag, interval(values), list(values)), *more]
    half = None if paper is None else 0.5
    return CellRecord(row, column, "main", metric, paper, half, scorings, {}, "", 0.0)


def record_of(*cells):
    return dataclasses.replace(RECORDS[0], name="made", cells=list(cells), readings=[MAIN], claims=[])


def test_a_paper_with_one_number_for_several_settings_has_one_column():
    cells = [made(row, one, [at, at + 2.0], 9.0) for row in ("x", "y") for at, one in enumerate(("a", "b"))]
    (found,) = tables_of(record_of(*cells), [MAIN])
    assert found.heads == ["", "paper", "x", "y"]
    assert found.rows[1] == ["b", "9.00 ± 0.50", "2.00 ± 12.71", "2.00 ± 12.71"]


def test_a_paper_with_a_number_for_each_setting_has_it_beside_ours():
    cells = [made(row, one, [1.0, 1.0], at) for at, row in enumerate("xy", 5) for one in ("a", "b")]
    cells += [made(row, "untold", [1.0, 1.0]) for row in "xy"]
    (found,) = tables_of(record_of(*cells), [MAIN])
    assert found.heads == ["", "a: paper", "ours", "b: paper", "ours", "untold"]
    assert found.rows[1] == ["y", "6.00", "1.00 ± 0.00", "6.00", "1.00 ± 0.00", "1.00 ± 0.00"]


def test_readings_of_one_setting_each_share_a_table():
    other = dataclasses.replace(MAIN, name="other", excluded="far from the paper")
    cells = [made("x", "a", [1.0, 1.0]), dataclasses.replace(made("y", "a", [2.0, 2.0]), reading="other")]
    record = dataclasses.replace(record_of(*cells), readings=[MAIN, other])
    assert reading_groups(record) == [[MAIN, other]]
    (found,) = tables_of(record, [MAIN, other])
    assert found.heads == ["", "x", "y"] and found.rows == [["a", "1.00 ± 0.00", "2.00 ± 0.00"]]
    more = dataclasses.replace(record, cells=[*cells, made("z", "a", [1.0, 1.0])])
    assert reading_groups(more) == [[MAIN], [other]]
    assert "<circle" in figure_of(record) and ">y<" not in figure_of(record)  # what does not count is not drawn


def test_warnings_are_at_the_numbers_unless_all_have_the_same():
    some = record_of(made("x", "a", [1.0, 1.0], flag="lost"), made("x", "b", [1.0, 1.0]))
    (found,) = tables_of(some, [MAIN])
    assert found.rows[0][-1].endswith(" (1)") and found.notes == ["(1) lost"] and "(1)" not in found.rows[1][-1]
    (found,) = tables_of(record_of(made("x", "a", [1.0, 1.0], flag="lost")), [MAIN])
    assert found.notes == ["all: lost"] and "(" not in found.rows[0][-1]
    two = [made("x", name, [1.0, 1.0], flag=flag) for name, flag in (("a", "lost"), ("b", "gone"), ("c", "lost"))]
    (found,) = tables_of(record_of(*two), [MAIN])
    assert [row[-1][-3:] for row in found.rows] == ["(1)", "(2)", "(1)"] and found.notes == ["(1) lost", "(2) gone"]


def test_other_scorings_have_separate_tables():
    other = ScoringRecord("own copy", "", "", interval([4.0, 4.0]), [4.0, 4.0])
    record = record_of(made("x", "a", [1.0, 1.0], more=[other]), made("x", "b", [1.0, 1.0]))
    (first,), (second,) = tables_of(record, [MAIN]), tables_of(record, [MAIN], first=False)
    assert [row[0] for row in first.rows] == ["a", "b"]
    assert second.rows == [["a", "4.00 ± 0.00"]] and second.scoring == "own copy" and "own copy" in second.caption


def test_cells_of_tables_cannot_break_them():
    table = number_table(tables_of_hostile := next(tables_of(record_of(made("x|y", "<b>", [1.0])), [MAIN])))
    assert "\\|" not in tables_of_hostile.caption and "| &lt;b> |" in table and cell("a|b") == "a\\|b"


def test_verdicts_are_shown_for_each_reading_and_way_to_score():
    tried = dataclasses.replace(MAIN, name="tried", excluded="looks for a cause")
    effect = EffectRecord("accuracy", interval([1.0, 3.0]), 1, 2.0, 2.0)
    one = lambda reading, scoring, verdict: JudgedRecord(reading, scoring, verdict, "", effect, [])
    judged = [one("main", "average", "holds"), one("main", "own copy", "undecided"), one("tried", "average", "holds")]
    claim = ClaimRecord("better", "Table 1", "holds", "", effect, judged)
    single = dataclasses.replace(record_of(), claims=[claim])
    assert verdicts_by_reading(single) is None
    several = dataclasses.replace(single, readings=[MAIN, tried])
    assert verdicts_by_reading(several).heads == ["claim", "main", "(tried)"]
    assert verdicts_by_reading(several).rows == [["better", "✔ +2.0 ± 12.7 points", "✔ +2.0 ± 12.7 points"]]
    assert verdicts_by_reading(several, "own copy").rows == [["better", "≈ +2.0 ± 12.7 points", ""]]


def in_reading(reading, verdict, *values, scoring="ours"):
    effect = EffectRecord("accuracy", interval(values), 1, 0.0, 0.0) if values else None
    return JudgedRecord(reading, scoring, verdict, "", effect, [])


def test_effects_of_several_readings_are_shown_by_verdict():
    split = [in_reading("a", "does not hold", -2.0, -2.2), in_reading("b", "does not hold", -4.0, -4.2)]
    assert effects_shown(split) == "−4.1 to −2.1 points over 2 readings"
    split += [in_reading("c", "holds", 3.0, 3.2), in_reading("d", "not testable", 9.0, 9.0)]
    assert effects_shown(split) == "✘ −4.1 to −2.1 points (a; b), ✔ +3.1 ± 1.3 points (c), – (d)"
    assert effects_shown(split[:1]) == "−2.1 ± 1.3 points"
    assert mark_of("holds in part", split) == "◐ depends on the reading"
    assert (
        mark_of("holds in part", split[2:]) == "◐ in part" and mark_of("does not hold", split[:2]) == "✘ does not hold"
    )


def test_readings_that_do_not_count_and_other_scorings_are_not_in_the_effects():
    tried = dataclasses.replace(MAIN, name="tried", excluded="looks for a cause")
    judged = [in_reading("main", "holds", 1.0), in_reading("main", "undecided", 2.0, scoring="other")]
    claim = ClaimRecord("better", "", "holds", "", None, [*judged, in_reading("tried", "holds", 3.0)])
    assert counted_of(claim, dataclasses.replace(record_of(), readings=[MAIN, tried])) == judged[:1]


def test_a_record_that_is_older_than_its_experiment_is_marked():
    experiment, record = EXPERIMENTS["apfl-table2"](False), BY_NAME["apfl-table2"]
    assert outdated(record, experiment) == ""
    without = [one for one in record.cells if not one.is_baseline]
    turned = [dataclasses.replace(one, scorings=one.scorings[::-1]) for one in without]
    old = dataclasses.replace(record, precision="tf32", cells=turned)
    words = outdated(old, experiment)
    assert words.startswith("Old record (TF32, scored with ") and '"average" instead of "own copy"' in words
    assert words.endswith("no baselines)") and f"**{words}.**" in section(old)
    assert "**Old record" not in section(record)


def test_an_older_record_is_shown_and_does_not_count():
    test = "apfl-table1: 0.25 has the best accuracy"
    claim = PaperClaim(
        "best", ["apfl-table1-causes: 0.25 has the best accuracy"], "does not hold", "Why.", older=[test]
    )
    found = overview_row(claim, BY_NAME)
    assert found.verdict == "does not hold" and "Old record (TF32" in found.why and "✔ holds" in found.why
    with pytest.raises(ValueError, match="fallah-tuned is up to date"):
        overview_row(dataclasses.replace(claim, older=["fallah-tuned: HF beats FedAvg"]), BY_NAME)


def test_several_effects_need_labels_and_a_qualifier_is_with_the_verdict():
    tests = ["fallah-appendix: ARUBA beats FO", "fallah-appendix: HF beats ARUBA"]
    with pytest.raises(ValueError, match=r"has 2 tests\. Give a label for each"):
        PaperClaim("", tests, "holds in part", "")
    found = overview_row(PaperClaim("", tests, "holds in part", "", labels=["one", "two"], qualifier="here"), BY_NAME)
    assert re.fullmatch(r"one: \+.* points; two: −.* points", found.effect) and found.mark == "◐ in part, here"


def test_the_page_of_a_run_has_the_findings_and_the_sentences_that_fit_its_verdicts():
    record = BY_NAME["fallah-appendix"]
    claim = record.claims[0]
    assert why_of(record, claim).startswith("On our GPU")
    assert why_of(record, dataclasses.replace(claim, verdict="holds")) == ""
    first = BY_NAME["fallah-table1"]
    alone = findings_of(first, {first.name: first})
    assert 0 < len(alone) < len(FINDINGS[first.name]) == len(findings_of(first, BY_NAME))  # one quotes another record


def test_effects_have_their_unit_and_range():
    points = EffectRecord("accuracy", interval([1.0, 2.0, 3.0]), 1, 2.0, 2.0)
    assert effect_shown(points) == "+2.0 ± 2.5 points"
    losses = EffectRecord("train_loss", interval([-0.1, -0.2]), 2, -0.3, 0.1)
    assert effect_shown(losses) == "−0.150 ± 0.635 in training loss (of 2: −0.300 to +0.100)"
    assert effect_shown(None) == ""


def test_an_axis_has_round_marks_and_room_for_all():
    for log in (False, True):
        found = axis([0.3, 47.0, float("nan")], 100, 0, log)
        places = [found.place(tick) for tick in found.ticks]
        assert places == sorted(places, reverse=True) and len(places) >= 3
        assert 0 < found.place(47.0) < found.place(0.3) < 100
    assert axis([5.0], 0, 10).place(5.0) == pytest.approx(5.0)


def test_lines_are_drawn_where_their_numbers_are():
    line = Line("<a>", [0, 1, 2], [1.0, float("nan"), 3.0], [0.5, float("nan"), 2.5], [1.5, float("nan"), 3.5], 2.0)
    root = ElementTree.fromstring(draw("t", [LinePanel("p", "x", "y", [line])], "words"))
    points = root.find(f".//{SVG}polyline").get("points").split()
    (x0, y0), (x2, y2) = (map(float, point.split(",")) for point in points)
    assert x0 < x2 and y0 > y2  # without the point that is not finite; higher numbers are higher up
    assert len(root.find(f".//{SVG}polygon").get("points").split()) == 4
    assert "<a>" in [one.text for one in root.iter(f"{SVG}text")]


def test_dots_that_cannot_be_drawn_are_written():
    dots = [Dot("a", 1.0, 0.5, 1.5, 2.0), Dot("b", float("nan"), words="not finite")]
    root = ElementTree.fromstring(draw("t", [DotPanel("p", "x", dots)], "words"))
    assert len(root.findall(f".//{SVG}circle")) == 1 and len(root.findall(f".//{SVG}path")) == 2  # the grid, a diamond
    assert "not finite" in [one.text for one in root.iter(f"{SVG}text")]


def test_curves_are_scaled_to_what_comes_after_the_start():
    line = lambda first: Line("a", [0, 1, 2], [first, 5.0, 6.0])
    late = draw("t", [LinePanel("p", "x", "y", [line(-1000.0)], begin=0.5)], "")
    marked = [one.text for one in ElementTree.fromstring(late).iter(f"{SVG}text")]
    assert "5.4" in marked and not any(text and text.startswith("-") for text in marked)


def test_the_page_of_a_run_shows_the_figure_the_tables_and_the_claims(tmp_path):
    record = BY_NAME["fallah-table1"]
    text = write_reproduction(record, tmp_path / "report.html").read_text(encoding="utf-8")
    assert Picture(figure_of(record), "").source in text
    for words in ("Per-FedAvg (FO): paper", "78.00", record.claims[0].words, "Every comparison"):
        assert words in text


def test_a_picture_is_an_image_whose_words_are_escaped():
    hostile = "<img src=x onerror=alert(1)> '\""
    page = document("name", Facts({}), [PageSection("a", "a", [Picture(f"<svg>{hostile}</svg>", hostile)])], "source")
    assert hostile not in page and "data:image/svg+xml;base64," in page


def test_every_finding_belongs_to_an_experiment():
    assert set(FINDINGS) <= set(EXPERIMENTS) and set(PAPERS) == {paper_of(name) for name in EXPERIMENTS}
