"""The sections on tuning, classes and next steps have the run's numbers and existing commands."""

import csv
import io
import re
import shlex
import shutil
from html import unescape
from urllib.parse import unquote

import numpy as np
import pytest

from personax.cli import app
from tests.report.fake_runs import edit_results, write_full, write_minimal, write_run
from tests.report.test_report import FULL, HOSTILE, figures_of, page_of, plain

TRIAL = {"options": {"lr": 0.1, "objective.strength": 1.0}, "score": 0.8, "of_seeds": [0.7, 0.8, 0.9], "loss": 0.5}
TUNED = {
    "algorithm": "pFedMe",
    "search": "random",
    "num_combinations": 9,
    "metric": "accuracy",
    "words": "the personal model",
    "before": {"lr": 0.3, "objective.strength": 1.0},
    "chosen": {"lr": 0.01, "objective.strength": 1.0},
    "trials": [
        TRIAL,
        TRIAL | {"options": {"lr": 0.01, "objective.strength": 1.0}, "score": 0.91},
        TRIAL | {"options": {"lr": 0.3, "objective.strength": 1.0}, "score": None, "of_seeds": []},
    ],
    "warnings": ["lr = 0.01 is the smallest value tried."],
}
TUNING = {"share": 0.2, "seed": 7, "seeds": [0, 1, 2], "algorithms": [TUNED]}


def section_of(page, anchor):
    return page.split(f"<section id='{anchor}'>")[1].split("</section>")[0]


def tables_of(section):
    """The rows of each table of a section, as text."""
    rows = lambda table: [[plain(cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)] for row in table]
    return [rows(re.findall(r"<tr.*?>(.*?)</tr>", table)) for table in section.split("<table>")[1:]]


def csvs_of(section):
    return [list(csv.reader(io.StringIO(unquote(link)))) for link in re.findall(r"utf-8,(.*?)'", section)]


@pytest.fixture
def tuned(tmp_path):
    folder = write_full(tmp_path)
    edit_results(folder, lambda run: run.update(tuning=TUNING))
    return folder


def test_the_tuning_section_has_every_trial(tuned):
    section = section_of(page_of(tuned), "tuning")
    choices, trials = tables_of(section)[:2]
    assert choices[1][1:] == [
        "lr = 0.01, objective.strength = 1",
        "91.0 %",
        "lr = 0.3, objective.strength = 1",
        "diverged",
        "3 of 9, random",
    ]
    assert [row[0] for row in trials] == ["lr", "0.1", "0.01 chosen", "0.3"]
    assert [row[-1] for row in trials[1:]] == ["80.0 %", "91.0 %", "diverged"]
    for words in ("left out 20 %", "split with seed 7", "seeds 0, 1, 2", "lr = 0.01 is the smallest value"):
        assert words in section
    assert [row[3:] for row in csvs_of(section)[0][1:]] == [
        ["0.8", "0.7 0.8 0.9", "False"],
        ["0.91", "0.7 0.8 0.9", "True"],
        ["", "", "False"],
    ]


def test_the_tuning_figure_marks_what_was_chosen(tuned):
    page = page_of(tuned)
    (view,) = figures_of(page)["tuning-0"]  # the strength was not varied
    tried, chosen = view["data"]
    assert (tried["x"], tried["y"]) == ([0.1, 0.01], [80, 91]) and view["layout"]["xaxis"]["type"] == "log"
    assert (chosen["name"], chosen["x"], chosen["y"]) == ("chosen", [0.01], [91])


def test_a_run_that_was_not_tuned_has_no_such_section(tmp_path):
    page = page_of(write_minimal(tmp_path))
    assert "<section id='tuning'>" not in page and "compare" in section_of(page, "next") and "--tune" in page


def with_classes(folder, names, shares):
    """Give each score recalls: `shares` are [classes][seeds]."""

    def edit(run):
        run["federation"]["schema"]["classes"] = names
        counts = list(range(10, 10 + len(names)))
        for algorithm in run["algorithms"]:
            for score in algorithm["scores"]:
                score["classes"] = {"num_samples": counts, "recall": shares, "precision": shares[::-1]}

    edit_results(folder, edit)


def test_classes_have_the_means_over_the_seeds_that_are_left(tmp_path):
    nan = float("nan")
    folder = write_minimal(tmp_path)
    with_classes(folder, ["cat", "dog", "newt"], [[0.25, 0.75, nan], [1.0, 1.0, nan], [nan, nan, nan]])
    page = page_of(folder)
    section = section_of(page, "classes")
    assert tables_of(section)[0] == [
        ["Class", "test samples", "FedAvg"],
        ["cat", "10", "50.0"],
        ["dog", "11", "100.0"],
        ["newt", "12", "–"],
    ]
    assert "The class with the lowest recall is cat for FedAvg (50.0 %)." in section
    assert csvs_of(section)[0][1:] == [
        ["smallest", "FedAvg", "cat", "10", "0.5", ""],
        ["smallest", "FedAvg", "dog", "11", "1.0", "1.0"],
        ["smallest", "FedAvg", "newt", "12", "", "0.5"],
    ]
    recall, _precision = figures_of(page)["classes-0"]
    assert recall["data"][0]["y"] == [50, 100, None] and recall["layout"]["xaxis"]["ticktext"] == ["cat", "dog", "newt"]
    assert "50 at cat" in section


def test_many_classes_are_folded(tmp_path):
    folder = write_full(tmp_path)
    with_classes(folder, [f"c{i}" for i in range(62)], np.linspace(0.5, 1, 186).reshape(62, 3).tolist())
    section = section_of(page_of(folder), "classes")
    assert "<details><summary>All 62 classes</summary>" in section and len(tables_of(section)[0]) == 63


def test_names_of_classes_and_options_are_text(tuned):
    with_classes(tuned, [HOSTILE, "b"], [[0.5], [0.6]])

    def rename(run):
        one = run["tuning"]["algorithms"][0]
        one["warnings"], one["words"], one["trials"][0]["options"] = [HOSTILE], HOSTILE, {HOSTILE: HOSTILE}

    edit_results(tuned, rename)
    page = page_of(tuned)
    for anchor in ("classes", "tuning"):
        section = section_of(page, anchor)
        assert "<script" not in section and "<img" not in section and "onerror" in section


def commands_of(page):
    section = section_of(page, "next")
    return [shlex.split(unescape(code)) for code in re.findall(r"<code>(.*?)</code>", section)], plain(section)


def test_next_steps_are_commands_that_exist(tmp_path):
    known = {command.name for command in app.registered_commands}
    folder = write_full(tmp_path / "my run")
    commands, _ = commands_of(page_of(folder))
    assert commands and {name for name, *_ in commands} == {"personax"}
    assert {command for _, command, *_ in commands} <= known
    assert ["personax", "personalize", str(folder), "--data", "NEW.csv"] in commands


def test_next_steps_follow_from_the_numbers(tmp_path):
    folder = write_full(tmp_path / "run", seeds=(5,))
    rising = lambda run: [
        evaluation["mean"].update(accuracy=[0.1 + 0.005 * evaluation["round"]])
        for evaluation in run["algorithms"][4]["scores"][0]["evaluations"]
    ]
    edit_results(folder, rising)
    commands, words = commands_of(page_of(folder))
    assert ["personax", "compare", str(folder / "config.toml"), "--set", "seeds=5"] in commands
    assert "A single seed has no interval" in words
    assert re.search(r"APFL[^.]* still improved in the last quarter", words)
    flat = lambda run: [
        evaluation["mean"].update(accuracy=[0.5])
        for algorithm in run["algorithms"]
        for score in algorithm["scores"]
        for evaluation in score["evaluations"]
    ]
    edit_results(folder, flat)
    diverged = {"seed": 5, "round": 3, "event": 20, "client": "client 2", "stage": "local steps"}
    edit_results(folder, lambda run: run["algorithms"][3].update(divergences=[diverged]))
    commands, words = commands_of(page_of(folder))
    assert "still improved" not in words and ["personax", "resume", str(folder), "--fresh", "pFedMe"] in commands


def test_rerunning_a_live_run_is_not_suggested(tmp_path):
    folder = write_run(tmp_path, "live", FULL[1:2], (0,))
    (folder / "live.json").write_text("{}")
    commands, _ = commands_of(page_of(folder))
    assert {command for _, command, *_ in commands} == {"personalize", "report", "cite"}
    shutil.rmtree(folder)
