"""Reproductions: the papers' numbers as printed, cells that resume, claims that intervals decide."""

import dataclasses
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import personax as px
from personax.report import write_reproduction
from personax.reproduce import EXPERIMENTS, fallah, gmeta, markdown
from personax.reproduce.experiment import Cell, Claim, Experiment
from personax.reproduce.outcome import REPRODUCTION, CellRecord, ReadingRecord
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
    cells = (
        Cell("row", "FedAvg", "made", px.fedavg(0.1, **local), readings, (50.0, 0.5), every=1),
        Cell("row", "searched", "made", rates, readings),
    )
    made = Experiment(
        name="tiny",
        source="nowhere",
        title="a test",
        federations={"made": make},
        task=px.classification(px.logistic_regression(10)),
        num_rounds=num_rounds,
        cohort_size=2,
        num_seeds=2,
        cells=cells,
        claims=(Claim("one beats the other", "nowhere", "FedAvg", "searched", ("row",)),),
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
    cell, federation = experiment.cells[0], experiment.federations["made"]()
    keys = jax.numpy.stack([jax.random.key(seed) for seed in (0, 1)])
    schedules = [px.rounds(4, 3, 2, key=key) for key in keys]
    result = px.simulate(cell.algorithm, experiment.task, federation, schedules, key=keys)
    for name, reading in zip(cell.protocols, record.cells[0].readings, strict=True):
        found = px.evaluate(cell.algorithm, experiment.task, federation, result, cell.protocols[name], key=keys)
        np.testing.assert_allclose(reading.of_seeds, 100 * found.mean("accuracy"), rtol=1e-6)
        assert reading.flag == cell.protocols[name].flag
    curve = record.cells[0].curve
    assert curve.rounds == [0, 1, 2, 3] and curve.of_seeds[-1] == record.cells[0].readings[0].of_seeds
    assert curve.seconds == sorted(curve.seconds) and record.cells[1].curve is None


def test_a_search_passes_over_what_diverges_and_looks_at_validation_data_alone(done):
    folder, record = done
    assert record.cells[1].chosen in ("0.05", "0.2")
    changed = tiny()
    make = changed.federations["made"]
    upset = lambda: dataclasses.replace(make(), test_y=(make().test_y + 1) % 10)
    other = reproduce(dataclasses.replace(changed, federations={"made": upset}), folder / "other")
    assert other.cells[1].chosen == record.cells[1].chosen
    assert other.cells[1].readings[0].of_seeds != record.cells[1].readings[0].of_seeds


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
    for words in ("50.00 ± 0.50", "one beats the other", "adapted on the data that is scored", "None."):
        assert words in text
    page = markdown.page([record])
    assert "| FedAvg | 50.00 ± 0.50 |" in page and "(!)" in page and "`personax reproduce tiny`" in page


def cell(column, values, row="row"):
    reading = ReadingRecord("only", "", "", float(np.mean(values)), None, None, list(values))
    return CellRecord(row, column, None, None, [reading], {}, "", 0.0)


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
    assert _judged(Claim("", "", "a", "b", rows), cells, 10).verdict == verdict


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_complete(name, quick):
    experiment = EXPERIMENTS[name](quick)
    places = [(cell.row, cell.column) for cell in experiment.cells]
    assert experiment.name == name and len(set(places)) == len(places) and experiment.choices
    for claim in experiment.claims:
        assert all((row, side) in places for row in claim.rows for side in (claim.better, claim.worse)), claim.words
    assert experiment.quick == quick and {cell.data for cell in experiment.cells} <= set(experiment.federations)


def test_the_papers_settings():
    """Fallah section 5 and gMeta section 5, number by number."""
    table = EXPERIMENTS["fallah-table1"](False)
    assert (table.num_rounds, table.cohort_size, fallah.NUM_CLIENTS) == (1000, 0.2 * 50, 50)
    numbers = [cell.paper for cell in table.cells if cell.paper is not None]
    assert len(numbers) == 18 and (numbers[0], numbers[-1]) == ((75.96, 0.02), (71.25, 0.05))
    steps = [cell.algorithm.local.num_steps for cell in table.cells[::4]]
    rates = [float(cell.algorithm.objective.adapt_lr) for cell in table.cells[2::4]]
    assert steps == [10, 4, 10, 4, 4, 4] and rates == [0.01, 0.01, 0.001, 0.001, 0.01, 0.01]
    assert all(cell.algorithm.local.lr == 0.001 and cell.algorithm.local.batch_size == 40 for cell in table.cells)
    figure = EXPERIMENTS["gmeta-figure1"](False)
    assert (gmeta.NUM_CLIENTS, gmeta.NUM_EACH, gmeta.CONCENTRATION) == (50, 1000, 0.01)
    three = next(one.algorithm for one in figure.cells if one.column == gmeta.GMETA)
    assert (three.objective.num_adapt_steps, three.objective.adapt_lr, three.local.num_steps) == (3, 0.01, 4)


def test_the_page_of_the_docs_is_made_from_the_committed_results():
    records = [REPRODUCTION.validate_json(path.read_bytes()) for path in RESULTS]
    assert {record.name for record in records} == set(EXPERIMENTS) and not any(record.quick for record in records)
    assert (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8") == markdown.page(records)
    for record in records:
        stated = {(cell.row, cell.column): cell.paper for cell in EXPERIMENTS[record.name](False).cells}
        for made in record.cells:
            assert (made.paper is None) == (stated[made.row, made.column] is None)
        assert re.fullmatch(rf"personax reproduce {record.name}", record.command) and record.machine["device"]
