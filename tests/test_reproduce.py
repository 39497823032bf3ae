"""Reproductions: the papers' numbers as printed, cells that resume, claims that intervals decide."""

import dataclasses
import re
import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import personax as px
from personax.report import write_reproduction
from personax.reproduce import EXPERIMENTS, gmeta, markdown
from personax.reproduce.experiment import Cell, Claim, Contrast, Experiment, Training, beats
from personax.reproduce.outcome import REPRODUCTION, CellRecord, CurveRecord, ReadingRecord
from personax.reproduce.run import _judged, reproduce

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))


def tiny(num_rounds=3, **changes):
    """Two algorithms on a small synthetic federation."""
    make = lambda: px.datasets.synthetic(0.5, 0.5, num_clients=4, num_samples=20, num_features=3, key=jax.random.key(0))
    local = {"num_steps": 2, "batch_size": 5}
    readings = {"training": px.Protocol(lr=0.1), "test": px.fallah_protocol(0.1, batch_size=5)}
    rates = {
        "0.05": px.fedavg(0.05, **local),
        "0.2": px.fedavg(0.2, **local),
        "huge": px.fedavg(1.7e308, num_steps=30, batch_size=5),
    }
    task = px.classification(px.logistic_regression(10))
    schedule = partial(px.rounds, 4, num_rounds, 2)
    loss = {"training": px.Protocol("global", score_on="training")}
    first = (Cell("row", "FedAvg", readings, (50.0, 0.5)), Cell("loss", "FedAvg", loss, metric="train_loss"))
    trainings = (
        Training("made", task, px.fedavg(0.1, **local), schedule, first, every=1),
        Training("made", task, rates, schedule, (Cell("row", "searched", readings),)),
    )
    made = Experiment(
        name="tiny",
        source="nowhere",
        title="a test",
        federations={"made": make},
        length=f"{num_rounds} rounds",
        trainings=trainings,
        num_seeds=2,
        claims=(Claim("one beats the other", "nowhere", beats("FedAvg", "searched", ("row",))),),
        choices=("None.",),
    )
    return dataclasses.replace(made, **changes)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, reproduce(tiny(), folder, command="personax reproduce tiny")


pytestmark = pytest.mark.xdist_group("reproduce")


def test_a_cell_is_what_the_library_gives(done):
    experiment, (_, record) = tiny(), done
    training, federation = experiment.trainings[0], experiment.federations["made"]()
    algorithm, task = training.algorithm, training.task
    keys = jax.numpy.stack([jax.random.key(seed) for seed in (0, 1)])
    schedules = [px.rounds(4, 3, 2, key=key) for key in keys]
    result = px.simulate(algorithm, task, federation, schedules, key=keys)
    for cell, made in zip(training.cells, record.cells[:2], strict=True):
        scale = 1 if cell.metric == "train_loss" else 100
        for name, reading in zip(cell.protocols, made.readings, strict=True):
            found = px.evaluate(algorithm, task, federation, result, cell.protocols[name], key=keys)
            np.testing.assert_allclose(reading.of_seeds, scale * found.mean(cell.metric), rtol=1e-6)
            assert reading.flag == cell.protocols[name].flag
        curve = made.curve
        assert curve.rounds == [0, 1, 2, 3] and curve.of_seeds[-1] == made.readings[0].of_seeds
        assert curve.seconds == sorted(curve.seconds) and curve.times == []
    assert record.cells[2].curve is None


def test_a_search_passes_over_what_diverges_and_looks_at_validation_data_alone(done):
    folder, record = done
    assert record.cells[2].chosen in ("0.05", "0.2")
    changed = tiny()
    make = changed.federations["made"]
    upset = lambda: dataclasses.replace(make(), test_y=(make().test_y + 1) % 10)
    other = reproduce(dataclasses.replace(changed, federations={"made": upset}), folder / "other")
    assert other.cells[2].chosen == record.cells[2].chosen
    assert other.cells[2].readings[0].of_seeds != record.cells[2].readings[0].of_seeds


def test_cells_that_have_ended_are_kept_unless_the_experiment_changed(done, tmp_path):
    record, seen = done[1], []
    folder = shutil.copytree(done[0], tmp_path / "again")
    again = reproduce(tiny(), folder, told=seen.append)
    assert again.cells == record.cells and len(seen) == 2  # to the seconds that the cells took
    longer = reproduce(tiny(num_rounds=4), folder)
    assert longer.cells[0].readings != record.cells[0].readings


def test_the_record_is_read_back_and_shown(done, tmp_path):
    folder, record = done
    assert REPRODUCTION.validate_json((folder / "results.json").read_bytes()) == record
    text = write_reproduction(record, tmp_path / "page.html").read_text(encoding="utf-8")
    for words in (
        "50.00 ±&nbsp;0.50",
        "train_loss",
        "one beats the other",
        "adapted on the data that is scored",
        "None.",
    ):
        assert words in text
    page = markdown.page([record])
    assert "| FedAvg | 50.00 ± 0.50 |" in page and "(!)" in page and "`personax reproduce tiny`" in page


def cell(column, values, row="row", metric="accuracy", curve=None):
    reading = ReadingRecord("only", "", "", float(np.mean(values)), None, None, list(values))
    return CellRecord(row, column, metric, None, None, [reading], {}, "", 0.0, curve)


def judged(claim, cells):
    return _judged(claim, {(one.row, one.column): one for one in cells})


@pytest.mark.parametrize(
    "differences, verdict",
    [
        ([[1.0, 1.1, 0.9]], "holds"),
        ([[-1.0, -1.1, -0.9]], "does not hold"),
        ([[1.0, -1.0, 0.5]], "undecided"),
        ([[1.0, 1.1, 0.9], [1.0, -1.0, 0.5]], "holds in part"),
        ([[1.0, 1.1, 0.9], [-1.0, -1.1, -0.9]], "holds in part"),
        ([[-1.0, -1.1, -0.9], [1.0, -1.0, 0.5]], "does not hold"),
        ([[1.0]], "undecided"),
    ],
)
def test_a_claim_is_judged_by_paired_intervals(differences, verdict):
    base = np.arange(3.0) * 10  # seeds that differ much more than the columns do
    cells = []
    for i, of_seeds in enumerate(differences):
        start = base[: len(of_seeds)]
        cells += [cell("a", start + of_seeds, f"row {i}"), cell("b", start, f"row {i}")]
    rows = tuple(f"row {i}" for i in range(len(differences)))
    assert judged(Claim("", "", beats("a", "b", rows)), cells).verdict == verdict


def test_of_losses_less_is_better_and_sums_of_cells_are_compared():
    cells = [cell("a", [1.0, 1.1], metric="loss"), cell("b", [2.0, 2.1], metric="loss")]
    assert judged(Claim("", "", beats("a", "b", ("row",))), cells).verdict == "holds"
    gap = Contrast("gap", (("row", "b"), ("row", "b")), (("row", "a"),))
    found = judged(Claim("", "", (gap,)), cells).contrasts[0]
    assert found.name == "gap" and found.difference == pytest.approx(1.05 - 4.1)


def test_a_claim_may_be_about_the_way_or_about_wavering():
    points = [[0.0, 0.0], [9.0, 9.1], [1.0, 1.0], [3.0, 3.1]]
    steady = [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    curve = lambda values, times: CurveRecord([0, 1, 2, 9], [0.0, 0.1, 0.2, 0.3], times, values)
    cells = [
        cell("a", points[-1], curve=curve(points, [0.0, 2.0, 9.0, 10.0])),
        cell("b", steady[-1], curve=curve(steady, [0.0, 2.0, 9.0, 10.0])),
    ]
    at = lambda share, cells=cells: judged(Claim("", "", beats("a", "b", ("row",)), at=share), cells)
    assert at(1.0).contrasts[0].difference == pytest.approx(1.05)
    assert at(0.2).contrasts[0].difference == pytest.approx(8.05)  # by virtual time
    untimed = [dataclasses.replace(one, curve=dataclasses.replace(one.curve, times=[])) for one in cells]
    assert at(0.2, untimed).contrasts[0].difference == pytest.approx(-1.0)  # by rounds
    wavering = judged(Claim("", "", beats("b", "a", ("row",)), of="wavering"), cells).contrasts[0]
    assert wavering.difference == pytest.approx(1.025) and wavering.verdict == "holds"


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_complete(name, quick):
    experiment = EXPERIMENTS[name](quick)
    places = [(cell.row, cell.column) for cell in experiment.cells]
    assert experiment.name == name and len(set(places)) == len(places) and experiment.choices
    for claim in experiment.claims:
        assert all({*one.better, *one.worse} <= set(places) for one in claim.contrasts), claim.words
    assert experiment.quick == quick and {one.data for one in experiment.trainings} <= set(experiment.federations)


def test_the_papers_settings():
    """Fallah section 5 and gMeta section 5, number by number."""
    table = EXPERIMENTS["fallah-table1"](False)
    schedule = table.trainings[0].schedule(key=jax.random.key(0))
    assert (schedule.num_clients, schedule.num_events, schedule.round_ends.sum()) == (50, 0.2 * 50 * 1000, 1000)
    numbers = [cell.paper for cell in table.cells if cell.paper is not None]
    assert len(numbers) == 18 and (numbers[0], numbers[-1]) == ((75.96, 0.02), (71.25, 0.05))
    algorithms = [one.algorithm for one in table.trainings]
    steps = [one.local.num_steps for one in algorithms[::4]]
    rates = [float(one.objective.adapt_lr) for one in algorithms[2::4]]
    assert steps == [10, 4, 10, 4, 4, 4] and rates == [0.01, 0.01, 0.001, 0.001, 0.01, 0.01]
    assert all(one.local.lr == 0.001 and one.local.batch_size == 40 for one in algorithms)
    figure = EXPERIMENTS["gmeta-figure1"](False)
    assert (gmeta.NUM_CLIENTS, gmeta.NUM_EACH, gmeta.CONCENTRATION) == (50, 1000, 0.01)
    three = next(one.algorithm for one in figure.trainings if one.cells[0].column == gmeta.GMETA)
    assert (three.objective.num_adapt_steps, three.objective.adapt_lr, three.local.num_steps) == (3, 0.01, 4)


def test_the_page_of_the_docs_is_made_from_the_committed_results():
    records = [REPRODUCTION.validate_json(path.read_bytes()) for path in RESULTS]
    assert {record.name for record in records} <= set(EXPERIMENTS) and not any(record.quick for record in records)
    assert (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8") == markdown.page(records)
    for record in records:
        stated = {(cell.row, cell.column): cell.paper for cell in EXPERIMENTS[record.name](False).cells}
        for made in record.cells:
            assert (made.paper is None) == (stated[made.row, made.column] is None)
        assert re.fullmatch(rf"personax reproduce {record.name}", record.command) and record.machine["device"]
