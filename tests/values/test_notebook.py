"""Short reprs, tables in HTML, and data frames: what a notebook shows."""

import re
import sys

import jax
import numpy as np
import pytest

import personax as px
from personax.values import NotInstalled, to_dict
from personax.values.notebook import html_table
from tests import closed_forms
from tests.closed_forms import TASK
from tests.recipes import RECIPES

KEYS = jax.random.split(jax.random.key(0), 2)
FED = px.Federation.from_clients(closed_forms.clients(seed=0), test=closed_forms.clients(seed=1), names=list("ab<c"))
ALGORITHM = px.per_fedavg(adapt_lr=0.1, lr=0.1, num_steps=2, batch_size=4)


@pytest.fixture(scope="module")
def run():
    schedules = [px.rounds(4, 3, 2, key=key) for key in KEYS]
    return px.simulate(ALGORITHM, TASK, FED, schedules, key=KEYS)


def scored(run, model):
    return px.evaluate(ALGORITHM, TASK, FED, run, px.Scoring(model, lr=0.1), key=KEYS)


@pytest.fixture(scope="module")
def comparison(run):
    return px.Comparison({"adapted & co": scored(run, "adapted"), "FedAvg": scored(run, "global")}, None, "FedAvg")


def test_reprs_are_one_short_line(run, comparison):
    delays = px.delays.persafl_delays(4, key=KEYS[0])
    arrivals = px.arrivals(4, 30, delays=delays, key=KEYS[0])
    values = (FED, run, scored(run, "global"), comparison, run.snapshot.schedules[0], arrivals, ALGORITHM)
    for item in values:
        assert len(repr(item)) < 200 and "\n" not in repr(item) and "array(" not in repr(item)
    assert repr(run) == "<Result: events 6 of 6, clients 4, seeds 2, parameters 3, evaluations 0>"
    assert repr(run.snapshot.schedules[0]) == "<Schedule: rounds 3, cohort 2 of 4 clients>"
    assert repr(arrivals).startswith("<Schedule: arrivals 30 of 4 clients, staleness ")
    mean = scored(run, "global").mean("loss").mean()
    found = re.search(r"loss ([\d.]+) ±", repr(scored(run, "global")))
    assert found is not None and float(found[1]) == pytest.approx(mean, rel=1e-3)
    assert "adapted & co" in repr(comparison)


@pytest.mark.parametrize("name", RECIPES)
def test_the_repr_of_a_recipe_makes_it_again(name):
    algorithm = RECIPES[name](1.0)
    made = {type(one).__name__: type(one) for one in values_in(algorithm)}
    assert to_dict(eval(repr(algorithm), made)) == to_dict(algorithm)
    assert len(repr(algorithm)) <= len(str(algorithm))


def values_in(item):
    """A value and all values in it."""
    yield item
    for one in getattr(item, "__dict__", {}).values():
        for inner in one if isinstance(one, tuple) else (one,):
            if hasattr(inner, "__dataclass_fields__"):
                yield from values_in(inner)


def test_html_escapes_what_it_shows(run, comparison):
    for item in (FED, run, scored(run, "global"), comparison, run.snapshot.schedules[0], ALGORITHM):
        html = item._repr_html_()
        assert html.count("<table>") == html.count("</table>") == 1
    assert "adapted &amp; co" in comparison._repr_html_() and "adapted & co" not in comparison._repr_html_()
    assert "objective.adapt_lr" in ALGORITHM._repr_html_()
    assert "<script>" not in html_table("<script>", [("<script>",)], ["<script>"], ["<script>"])


def test_tables_are_data_frames(run, comparison):
    table = comparison.to_pandas()
    row = comparison.rows("loss")[0]
    assert table.score.tolist() == ["adapted & co", "FedAvg"]
    assert (table["mean"][0], table.mean_low[0], table.mean_high[0]) == (row.mean.mean, row.mean.low, row.mean.high)
    assert table.over_global[0] == row.over_global.mean and table.num_seeds.tolist() == [2, 2]
    assert table.over_local.isna().all()
    clients = scored(run, "global").to_pandas()
    assert clients.groupby("seed").loss.mean().to_numpy() == pytest.approx(scored(run, "global").mean("loss"))
    assert clients.client.tolist() == [0, 1, 2, 3] * 2
    schedule = run.snapshot.schedules[0]
    events = schedule.to_pandas()
    np.testing.assert_array_equal(events.client, schedule.client)
    np.testing.assert_array_equal(events.staleness, schedule.staleness())


def test_without_pandas_an_error_has_the_command_that_installs_it(comparison, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NotInstalled, match=r'`to_pandas` needs pandas, .* Run `pip install "personax\[pandas\]"`'):
        comparison.to_pandas()
