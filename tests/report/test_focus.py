"""Tests of the initial zoom of figures, and of time axes that keep short runs visible."""

import json
import re

import numpy as np
import plotly.graph_objects as go
import pytest

from personax.report import write_report
from personax.report.focus import focus, is_logarithmic
from tests.report.fake_runs import edit_results, write_full, write_minimal


def curve(name, end, start=0.1, num=11):
    x = np.arange(num, dtype=float)
    return go.Scatter(name=name, x=x.tolist(), y=(end + (start - end) * np.exp(-x)).tolist())


def test_a_figure_opens_at_the_last_third_of_the_curves():
    curves = [curve("A", 0.90), curve("B", 0.92), curve("C", 0.95)]
    found = focus(curves, "accuracy")
    later = np.concatenate([np.asarray(one.y)[7:] for one in curves])
    assert found.low <= later.min() and found.high >= later.max() and found.outside == []
    assert found.high - found.low < 0.1 * (0.95 - 0.1)


@pytest.mark.parametrize("metric, far", [("accuracy", 0.4), ("loss", 2.4)])
def test_curves_far_behind_are_left_outside_and_named(metric, far):
    curves = [curve("A", 0.90), curve("B", 0.91), curve("C", 0.92), curve("behind", far)]
    found = focus(curves, metric)
    assert found.outside == ["behind"] and found.high < 1 and found.low > 0.8


def test_curves_that_are_ahead_of_the_others_stay_inside():
    found = focus([curve("A", 0.5), curve("B", 0.51), curve("C", 0.52), curve("ahead", 0.7)], "accuracy")
    assert found.outside == [] and found.high > 0.7 and found.low < 0.5


def test_a_single_curve_and_curves_without_a_steep_part_open_whole():
    assert focus([curve("A", 0.9)], "accuracy") is None
    slow = [go.Scatter(name=name, x=[0, 1, 2, 3], y=[0.1, 0.1, rise, 0.9]) for name, rise in (("A", 0.2), ("B", 0.3))]
    assert focus(slow, "accuracy") is None
    assert focus([], "accuracy") is None


def test_curves_of_seeds_that_diverged_do_not_widen_the_range():
    lost = go.Scatter(name="lost", x=[0, 1, 2, 3], y=[0.1, 1e9, None, None])
    curves = [curve("A", 0.90), curve("B", 0.92), lost]
    found = focus(curves, "accuracy")
    assert found.high < 1


@pytest.mark.parametrize("ends, wanted", [([10, 41], True), ([10, 39], False), ([10], False), ([0, 10], False)])
def test_time_is_logarithmic_if_one_run_takes_four_times_as_long(ends, wanted):
    assert is_logarithmic(ends) == wanted


def views_of(folder):
    page = write_report([folder], folder / "report.html").read_text()
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    return page, {figure["name"]: figure["views"] for figure in json.loads(found.group(1))["figures"]}


def test_an_asynchronous_run_is_visible_beside_slow_rounds(tmp_path):
    folder = write_full(tmp_path)

    def slow_rounds(run):
        for algorithm in run["algorithms"]:
            if algorithm["mode"] == "synchronous":
                for score in algorithm["scores"]:
                    for evaluation in score["evaluations"]:
                        evaluation["time"] = [16 * time for time in evaluation["time"]]

    _, before = views_of(folder)
    edit_results(folder, slow_rounds)
    page, after = views_of(folder)
    types = lambda views: [view["layout"]["xaxis"].get("type") for view in views["curves"][:3]]
    assert types(before) == [None, None, None] and types(after) == [None, "log", None]
    assert after["curves"][1]["layout"]["xaxis"]["title"]["text"] == "virtual time, logarithmic"
    assert "The time axis is logarithmic if some runs are much shorter" in page


def test_a_report_names_curves_outside_the_initial_zoom(tmp_path):
    full = write_full(tmp_path / "full")
    page, views = views_of(full)
    low, high = views["curves"][0]["layout"]["yaxis"]["range"]
    ends = [line["y"][-1] for line in views["curves"][0]["data"] if "name" in line]
    assert low < min(ends) and max(ends) < high < 100 and "`Show all` shows the rest" in page
    page, views = views_of(write_minimal(tmp_path / "one"))
    assert "range" not in views["curves"][0]["layout"]["yaxis"] and "`Show all` shows the rest" not in page
