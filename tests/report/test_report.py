"""The report shows the numbers of the run, escapes hostile names, and needs no network."""

import csv
import io
import json
import os
import re
import shutil
from html import unescape
from html.parser import HTMLParser
from importlib.metadata import version
from urllib.parse import unquote

import jsonschema
import numpy as np
import pyarrow.parquet as pq
import pytest

from personax.experiment.records import RUN, read_results
from personax.report import write_report
from tests.report.fake_runs import FULL, edit_results, write_full, write_minimal, write_regression, write_run

HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
T_OF_2 = 4.302652729911275  # the 97.5 % quantile of Student's t with 2 degrees of freedom, from a table


def page_of(*folders):
    name = "report.html" if len(folders) == 1 else "reports.html"
    return write_report(folders, folders[0] / name).read_text()


def words_of(page):
    """The page before its scripts."""
    return page[: page.index('<script type="application/json"')]


def plain(html):
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", html))).strip()


def rows_of(page, table=0):
    """The class and the cells, as text, of each row of a table's body."""
    body = words_of(page).split("<table>")[1 + table].split("</table>")[0].split("</thead>")[1]
    rows = re.findall(r"<tr(?: class='(.*?)')?>(.*?)</tr>", body)
    return [(kind, [plain(cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)]) for kind, row in rows]


def verdicts_of(page):
    return [plain(text) for text in re.findall(r"<p class='verdict'>(.*?)</p>", page)]


def figures_of(page):
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    return {figure["name"]: figure["views"] for figure in json.loads(found.group(1))["figures"]}


def lines_of(view):
    return {unescape(trace["name"]): trace for trace in view["data"] if "name" in trace}


def row_of(folder, score, metric="accuracy"):
    return next(row for row in read_results(folder).table if (row.score, row.metric) == (score, metric))


def numbers_of(folder, score, column="accuracy"):
    """One score's numbers, [seeds, clients]."""
    rows = [row for row in pq.read_table(folder / "clients.parquet").to_pylist() if row["score"] == score]
    return np.array(
        [[row[column] for row in rows if row["seed"] == seed] for seed in sorted({r["seed"] for r in rows})]
    )


@pytest.mark.parametrize("kind", ["full", "minimal", "regression"])
def test_the_folders_that_tests_read_are_what_a_run_writes(kind, request):
    folder = request.getfixturevalue(kind)
    jsonschema.validate(json.loads((folder / "results.json").read_text()), RUN.json_schema())
    run, table = read_results(folder), pq.read_table(folder / "clients.parquet")
    num_scores = sum(len(algorithm.scores) for algorithm in run.algorithms)
    assert len(table) == num_scores * len(run.seeds) * run.federation.num_clients
    assert {"algorithm", "score", "seed", "client", "name", "num_samples", "personal_number", *run.metrics} == {
        *table.column_names
    }


def test_every_number_of_the_table_is_the_runs(full, page):
    run = read_results(full)
    minus = lambda text: text.replace("-", "−")
    percent = lambda *numbers: " ± ".join(f"{100 * number:.1f}" for number in numbers)
    wanted = [row for row in run.table if row.metric == "accuracy"]
    assert len(wanted) == len(rows_of(page)) == 9
    for row, (_, cells) in zip(wanted, rows_of(page), strict=True):
        assert cells[0].startswith(row.score)
        assert cells[1] == percent(row.mean.mean, row.mean.half)
        assert cells[2:5] == [percent(number) for number in (row.std, row.worst_decile, row.best_decile)]
        for at, role, itself in ((5, "local", "local training"), (6, "global", "FedAvg")):
            change, better = getattr(row, f"over_{role}"), getattr(row, f"better_than_{role}")
            shown = [cells[at].split(" ▲")[0].split(" ▼")[0], cells[at + 2]]
            gain = f"{'+' if change.mean > 0 else ''}{percent(change.mean, change.half)}"
            assert shown == (["–", "–"] if row.score == itself else [minus(gain), f"{100 * better:.0f} %"])
        score = next(s for algorithm in run.algorithms for s in algorithm.scores if s.name == row.score)
        assert cells[9].startswith(f"{percent(score.best['accuracy'].mean.mean)} round")


def test_the_table_marks_baselines_the_best_score_and_warnings(page):
    rows = {cells[0]: kind for kind, cells in rows_of(page)}
    assert [name for name, kind in rows.items() if "baseline" in kind] == [
        "local training baseline",
        "FedAvg baseline: the global model",
    ]
    assert [name for name, kind in rows.items() if "best" in kind] == ["APFL highest mean"]
    flagged = [name for name in rows if "adapted on the scored data" in name]
    assert flagged == ["Per-FedAvg, paper's step ⚠ adapted on the scored data"]
    changes = {cells[0].split(" ")[0]: cells[5:7] for _, cells in rows_of(page)}
    assert "▼ worse" in changes["local"][1] and "▲ better" in changes["APFL"][0] and "▲ better" in changes["APFL"][1]


def test_the_verdict_claims_no_more_than_the_intervals_support(full, page, tmp_path):
    said, row = verdicts_of(page)[0], row_of(full, "APFL")
    mean = f"{100 * row.mean.mean:.1f} ± {100 * row.mean.half:.1f} %"
    assert said.startswith(f"APFL has the highest mean accuracy, {mean}. Its 95 % interval lies above that of local")
    assert said.endswith("overlaps that of the runner-up, Per-FedAvg (HF), so their order may be due to chance.")
    shutil.copytree(full, tmp_path / "run")

    def blur(run):
        row = next(row for row in run["table"] if row["score"] == "APFL" and row["metric"] == "accuracy")
        row["mean"] |= {"low": 0.5, "high": 1.2}
        row["over_local"] |= {"low": -0.1, "high": 0.4}

    edit_results(tmp_path / "run", blur)
    said = verdicts_of(page_of(tmp_path / "run"))[0]
    over = f"+{100 * row.over_local.mean:.1f} ± {100 * (0.4 - row.over_local.mean):.1f}"
    assert f"overlaps that of local training (paired difference {over} points, which includes 0)" in said
    over = f"+{100 * row.over_global.mean:.1f} ± {100 * row.over_global.half:.1f}"
    assert f"overlaps that of the global model (paired difference {over} points, which excludes 0)" in said


def test_scores_of_other_clients_are_not_ranked_nor_paired(full, tmp_path):
    shutil.copytree(full, tmp_path / "run")

    def hold_out(run):
        run["algorithms"][4]["scores"][0]["scoring"]["clients"] = "held_out"

    edit_results(tmp_path / "run", hold_out)
    page = page_of(tmp_path / "run")
    assert verdicts_of(page)[0].startswith("Per-FedAvg (HF) has the highest")
    assert "APFL" not in lines_of(figures_of(page)["changes"][0])


def test_one_seed_has_no_verdict_and_one_score_needs_none(minimal, tmp_path):
    assert verdicts_of(page_of(minimal)) == []
    (said,) = verdicts_of(page_of(write_full(tmp_path, seeds=(5,))))
    assert said == "With one seed there are no intervals, so the order of the scores is not a finding."
    assert "±" not in "".join(cells[1] for _, cells in rows_of(page_of(tmp_path)))


def test_a_lower_error_is_better(regression):
    page = page_of(regression)
    (said,), rows = verdicts_of(page), {cells[0].split(" ")[0]: (kind, cells) for kind, cells in rows_of(page)}
    row = row_of(regression, "APFL", "error")
    mean = f"{row.mean.mean:.3f} ± {row.mean.half:.3f}"  # two digits of the interval
    assert said.startswith(f"APFL has the lowest mean error, {mean}. Its 95 % interval lies below that of local")
    assert rows["APFL"][0] == "best" and row.over_global.is_below(0)
    assert rows["APFL"][1][6] == f"−{-row.over_global.mean:.3f} ± {row.over_global.half:.3f} ▲ better"
    assert rows["FedAvg"][1][5].startswith("+") and rows["FedAvg"][1][5].endswith("▼ worse")
    single = figures_of(page)["changes"][3]["data"]  # error, against the global model, APFL
    assert [trace["name"] for trace in single] == ["better off (100 %)"] and max(single[0]["y"]) < 0


def test_bands_are_students_intervals(full, page):
    score = read_results(full).algorithms[0].scores[0]
    band, line = figures_of(page)["curves"][0]["data"][:2]
    means = np.array([evaluation.mean["accuracy"] for evaluation in score.evaluations])
    half = T_OF_2 * means.std(axis=1, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(line["y"], 100 * means.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(band["y"][: len(half)], 100 * (means.mean(axis=1) - half), rtol=1e-5)
    np.testing.assert_allclose(band["y"][len(half) :][::-1], 100 * (means.mean(axis=1) + half), rtol=1e-5)
    axes = [lines_of(view)["local training"]["x"] for view in figures_of(page)["curves"][:3]]
    rounds, times, seconds = zip(*((e.round, np.mean(e.time), e.seconds) for e in score.evaluations), strict=True)
    np.testing.assert_allclose(axes, [rounds, times, seconds], rtol=1e-5)


def test_clients_are_sorted_and_paired(full, page):
    mine, other = numbers_of(full, "APFL"), numbers_of(full, "FedAvg")
    found = figures_of(page)
    np.testing.assert_allclose(lines_of(found["clients"][0])["APFL"]["y"], 100 * np.sort(mine.mean(axis=0)), rtol=1e-5)
    paired = lines_of(found["changes"][0])["APFL"]["y"]  # accuracy, against the global model, all scores
    np.testing.assert_allclose(paired, 100 * np.sort((mine - other).mean(axis=0)), rtol=1e-5, atol=1e-4)
    assert "FedAvg" not in lines_of(found["changes"][0])


def test_a_score_looks_the_same_in_every_figure_and_like_no_other(page):
    found = figures_of(page)
    looks = {name: line["line"] for name, line in lines_of(found["curves"][0]).items()}
    for figure in ("clients", "changes", "newcomers"):
        assert all(line["line"] == looks[name] for name, line in lines_of(found[figure][0]).items())
    assert len({(line["color"], line["dash"]) for line in looks.values()}) == 9
    assert [name for name, line in looks.items() if line["dash"] != "solid"] == ["local training", "FedAvg"]


def test_what_a_run_has_is_drawn_and_nothing_else(page, minimal, regression):
    always = {"curves", "clients"}
    assert set(figures_of(page)) == always | {"changes", "mix", "mix-curve", "staleness", "active", "newcomers"}
    assert set(figures_of(page_of(minimal))) == always
    assert set(figures_of(page_of(regression))) == always | {"changes", "mix", "mix-curve"}
    for name in ("mix", "staleness"):
        for bars in lines_of(figures_of(page)[name][0]).values():
            assert sum(bars["y"]) == pytest.approx(100, abs=1e-2)
    for told in (
        "62 classes: 0: 4.1%",
        "the shared model, unchanged",
        "16.5 s",
        "1.24 GB",
        "num_clients = 120",
        "dinh2020",
    ):
        assert told in words_of(page)
    for told in ("5 March 2026, 14:07 UTC", "NVIDIA H200", version("personax")):
        assert told in words_of(page).split("<main>")[0]


def test_a_long_tail_of_staleness_is_shown_in_ranges(full, tmp_path):
    counts = np.arange(1, 301)
    late = {"staleness": list(range(300)), "count": counts.tolist()}
    shutil.copytree(full, tmp_path / "run")
    edit_results(tmp_path / "run", lambda run: [a.update(staleness=late) for a in run["algorithms"] if a["staleness"]])
    (bars,) = {json.dumps(trace["y"]) for trace in figures_of(page_of(tmp_path / "run"))["staleness"][0]["data"]}
    width = 299 // 40 + 1
    sums = [counts[at : at + width].sum() for at in range(0, 300, width)]
    np.testing.assert_allclose(json.loads(bars), 100 * np.array(sums) / counts.sum(), rtol=1e-5)
    (active,) = figures_of(page_of(full))["active"][0]["data"]  # both share one schedule
    assert active["name"] == "PersA-FL-MAML and 1 more"


def test_many_clients_are_thinned_to_what_can_be_drawn(tmp_path):
    folder = write_minimal(tmp_path, num_clients=5000)
    line = figures_of(page_of(folder))["clients"][0]["data"][0]
    numbers = np.sort(numbers_of(folder, "FedAvg").mean(axis=0))
    assert len(line["y"]) == 200 and line["x"][-1] == 100
    np.testing.assert_allclose([line["y"][0], line["y"][-1]], 100 * numbers[[0, -1]], rtol=1e-5)


def test_numbers_that_are_not_finite_are_labeled(tmp_path):
    folder = write_full(tmp_path)

    def diverge(run):
        for row in run["table"]:
            if row["score"] == "APFL":
                row |= {"mean": {"mean": float("nan"), "low": None, "high": None, "num_seeds": 3}, "std": float("inf")}
        for evaluation in run["algorithms"][4]["scores"][0]["evaluations"][3:]:
            evaluation["mean"]["accuracy"] = [float("nan")] * 3

    edit_results(folder, diverge)
    page = page_of(folder)
    diverged = next(cells for _, cells in rows_of(page) if cells[0] == "APFL")
    assert diverged[1:3] == ["not finite", "not finite"]
    assert verdicts_of(page)[0].startswith("Per-FedAvg (HF) has the highest")
    assert lines_of(figures_of(page)["curves"][0])["APFL"]["y"][3:] == [None] * 6


def test_separate_runs_have_unique_labels_and_are_not_paired(full, regression, minimal, tmp_path):
    page = page_of(full, minimal, regression)
    names = [cells[0] for table in (1, 2) for _, cells in rows_of(page, table)]
    for told in ("femnist, 62 classes: FedAvg", "smallest: FedAvg", "regression: FedAvg", "pFedMe", "local"):
        assert any(name.split(" baseline")[0] == told for name in names), told
    alone = next(cells for _, cells in rows_of(page, 1) if cells[0] == "smallest: FedAvg")
    assert alone[5:9] == ["–"] * 4 and "The runs are separate" in words_of(page) and len(verdicts_of(page)) == 2
    assert "smallest: FedAvg" not in {n for view in figures_of(page)["changes"] for n in lines_of(view)}
    twin = write_regression(tmp_path / "again")
    assert "regression (again): APFL" in words_of(page_of(twin, regression))


def test_names_are_escaped_everywhere(hostile):
    page = page_of(hostile)
    words, data = words_of(page), re.search(r'id="figures">(.*)</script>\n<script>/', page).group(1)
    assert "<script" not in words and "<img" not in words and "onerror" in words
    assert "<" not in data and "alert(1)" in data
    for view in (view for views in figures_of(page).values() for view in views):
        assert "<" not in view["layout"]["yaxis"]["title"]["text"] + view["layout"]["xaxis"]["title"]["text"]
    for trace in (trace for views in figures_of(page).values() for view in views for trace in view["data"]):
        assert "<" not in trace.get("name", "") and not any("<" in told for told in trace.get("customdata", []))


class Links(HTMLParser):
    """Collect every attribute that could fetch something."""

    found = ()

    def handle_starttag(self, tag, attrs):
        fetching = ("src", "href", "action", "data", "srcset", "poster", "background")
        self.found = (*self.found, *(value for name, value in attrs if name in fetching))


def test_everything_is_in_the_file(full, page):
    links = Links()
    links.feed(page)
    assert links.found and all(link.startswith(("#", "data:")) for link in links.found)
    own = page.replace("http://www.w3.org/2000/svg", "")  # a name that nothing fetches
    assert not re.search(r"https?:|//cdn|@import", own) and re.findall(r"url\((.*?)\)", own) == ["#${clip}"]
    assert "default-src 'none'" in own and "unsafe-inline" not in re.search(r"script-src ([^;]*)", own).group(1)
    assert len(page.encode()) < 1_500_000


def test_many_scores_and_clients_fit_a_megabyte_and_a_half(tmp_path):
    entries = tuple(
        entry._replace(score=f"{entry.score} {i}", algorithm=f"{entry.algorithm} {i}")
        for i in range(3)
        for entry in FULL
    )
    names = {"local_baseline": entries[0].score, "global_baseline": entries[1].score}
    folder = write_run(tmp_path, "large", entries, (0, 1, 2, 3, 4), num_clients=1000, num_held_out=9, **names)
    assert len(page_of(folder).encode()) < 1_500_000


@pytest.mark.parametrize(
    "damage, told",
    [
        (lambda f: shutil.rmtree(f), r"No results.json in .*\. Give the folder of a finished run"),
        (
            lambda f: (f / "results.json").write_text('{"name": 3'),
            "Invalid results in .*results.json.*Rerun",
        ),
        (lambda f: (f / "clients.parquet").unlink(), "File not found: .*clients.parquet. .* personax resume"),
        (lambda f: (f / "config.toml").unlink(), "File not found: .*config.toml. .* personax resume"),
        (lambda f: (f / "config.toml").write_bytes(b"\xff\xfe"), "config.toml is not UTF-8 text.* Rerun"),
        (lambda f: (f / "clients.parquet").write_bytes(b"PAR1 cut"), "Cannot read .*clients.parquet: .* rerun"),
        (lambda f: keep(f, "accuracy"), "Missing column 'accuracy' in .*clients.parquet. Rerun"),
        (lambda f: keep(f, rows=0), "No rows for score 'FedAvg' of algorithm 'FedAvg'.*rerun"),
    ],
)
def test_errors_name_the_file_and_the_remedy(damage, told, tmp_path):
    folder = write_minimal(tmp_path / "run")
    damage(folder)
    with pytest.raises(ValueError, match=told):
        write_report([folder], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def keep(folder, without="", rows=None):
    table = pq.read_table(folder / "clients.parquet").slice(0, rows)
    pq.write_table(table.drop_columns([without] if without else []), folder / "clients.parquet")


def test_no_run_or_a_repeated_run_is_an_error(minimal, tmp_path):
    with pytest.raises(ValueError, match="No run folder given"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ValueError, match="given twice"):
        write_report([minimal, minimal / "." / ""], tmp_path / "report.html")


def test_a_report_is_written_atomically(minimal, tmp_path, monkeypatch):
    path = write_report([minimal], tmp_path / "new" / "report.html")
    whole = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report([minimal], path)
    assert path.read_bytes() == whole and [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_the_csv_of_the_results_has_all_digits(full, page):
    link = re.search(r"href='data:text/csv;charset=utf-8,([^']*)' download='accuracy-at-the-end", page).group(1)
    rows = list(csv.DictReader(io.StringIO(unquote(link))))
    wanted = [row for row in read_results(full).table if row.metric == "accuracy"]
    assert len(rows) == len(wanted) and {row["run"] for row in rows} == {"femnist, 62 classes"}
    for row, one in zip(rows, wanted, strict=True):
        assert row["score"] == one.score and float(row["mean"]) == one.mean.mean
        assert float(row["mean_low"]) == one.mean.low and float(row["std"]) == one.std
        assert row["over_local"] == ("" if one.over_local is None else str(one.over_local.mean))
    assert page.count("data:text/csv") == words_of(page).count("<table>")
