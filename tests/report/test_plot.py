"""`px.plot`: views of the report's own figures."""

import numpy as np
import pytest

import personax as px
from personax.evaluation.scores import Evaluation
from personax.report import figures
from personax.report.runs import read_runs, scores_of
from tests.experiment.test_config import refused
from tests.report.fake_runs import write_full, write_minimal


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_full(tmp_path_factory.mktemp("plot") / "run")


@pytest.fixture(scope="module")
def runs(folder):
    return read_runs([folder])


def same(found, view):
    assert found.to_dict()["data"] == view.to_dict()["data"]
    assert found.layout.xaxis.title == view.layout.xaxis.title and found.layout.yaxis.title == view.layout.yaxis.title


def test_each_choice_is_a_view_of_the_report(folder, runs):
    scores = scores_of(runs)
    for metric in ("accuracy", "loss"):
        views = figures.learning_curves(scores, [metric]).views
        for view, against in zip(views, ("rounds", "virtual time", "seconds"), strict=True):
            same(px.plot.curves(folder, metric=metric, against=against), view)
        same(px.plot.clients(folder, metric=metric), figures.distribution(scores, [metric]).views[0])
    same(px.plot.curves(folder), figures.learning_curves(scores, ["accuracy"]).views[0])
    changes = figures.changes(scores, ["accuracy"])
    num = len(changes.choices["score"])
    same(px.plot.gains(folder), changes.views[0])
    same(px.plot.gains(folder, against="local"), changes.views[num])
    at = changes.choices["score"].index("APFL")
    same(px.plot.gains(folder, against="local", score="APFL"), changes.views[num + at])
    (stale,) = (one for one in figures.activity(runs, scores) if one.name == "staleness")
    same(px.plot.staleness(str(folder)), stale.views[0])
    assert px.plot.curves(folder).layout.title.text == "Learning curves"


def evaluation(model, values):
    clients, counts = np.arange(len(values)), np.full(len(values), 5)
    return Evaluation(px.Scoring(model), {"accuracy": np.array(values)}, clients, counts, counts, 10, 1.0)


def test_a_comparison_in_memory_is_drawn_like_a_run():
    found = {"mine": evaluation("adapted", [0.9, 0.7, 0.5]), "all": evaluation("global", [0.5, 0.7, 0.6])}
    comparison = px.Comparison(found, None, "all")
    view = px.plot.clients(comparison)
    lines = {line.name: line for line in view.data}
    assert list(lines) == ["mine", "all"] and list(lines["mine"].y) == [50.0, 70.0, 90.0]
    (gain,) = px.plot.gains(comparison).data
    assert gain.name == "mine" and list(gain.y) == pytest.approx([-10.0, 0.0, 40.0])
    assert list(gain.customdata) == ["client 2", "client 1", "client 0"]
    with refused("Give run folders, or one comparison.", kind=ValueError):
        px.plot.clients(comparison, comparison)


def test_what_cannot_be_drawn(folder, tmp_path):
    alone = write_minimal(tmp_path / "alone")
    for draw, said in (
        (
            lambda: px.plot.curves(folder, metric="acuracy"),
            "`the run` has no metric `acuracy`. Did you mean `accuracy`?",
        ),
        (
            lambda: px.plot.curves(folder, against="hours"),
            "`against` must be one of 'rounds', 'virtual time', 'seconds'",
        ),
        (lambda: px.plot.gains(folder, score="APL"), "Did you mean `APFL`?"),
        (lambda: px.plot.gains(folder, against="all"), "`against` must be one of 'local', 'global', got 'all'."),
        (lambda: px.plot.gains(alone), "No baseline to compare with."),
        (lambda: px.plot.staleness(alone), "No algorithm of these runs is asynchronous"),
        (lambda: px.plot.clients(tmp_path), "results.json"),
        (lambda: px.plot.clients(), "No run folder given."),
    ):
        with refused(said, kind=ValueError):
            draw()
