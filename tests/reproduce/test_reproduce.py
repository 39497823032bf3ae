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
from personax.data.datasets import stand_in
from personax.evaluation.scores import interval
from personax.evaluation.validation import validation_of
from personax.report import write_reproduction
from personax.report.papers import section
from personax.reproduce import EXPERIMENTS, persafl
from personax.reproduce.apfl import figures
from personax.reproduce.choices import TEXTS
from personax.reproduce.experiment import (
    MAIN,
    Cell,
    Claim,
    Contrast,
    Experiment,
    PaperTraining,
    Reading,
    baselines,
    beats,
)
from personax.reproduce.judging import judge
from personax.reproduce.measures import ActiveShare
from personax.reproduce.outcome import REPRODUCTION, CellRecord, CurveRecord, ScoringRecord
from personax.reproduce.papers import FINDINGS
from personax.reproduce.rejudge import rejudged
from personax.reproduce.run import is_reproduced, name_of, reproduce, reproduce_part

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))


def tiny(num_rounds=3, **changes):
    """Two algorithms on a small synthetic federation."""
    make = lambda: px.datasets.synthetic(0.5, 0.5, num_clients=4, num_samples=20, num_features=3, key=jax.random.key(0))
    local = {"num_steps": 2, "batch_size": 5}
    readings = {"training": px.Scoring(lr=0.1), "test": px.fallah_scoring(0.1, batch_size=5)}
    rates = {
        "0.05": px.fedavg(lr=0.05, **local),
        "0.2": px.fedavg(lr=0.2, **local),
        "huge": px.fedavg(lr=1.7e308, num_steps=30, batch_size=5),
    }
    task = px.classification(px.logistic_regression(10))
    schedule = partial(px.rounds, 4, num_rounds, 2)
    loss = {"training": px.Scoring("global", score_on="training")}
    first = (Cell("row", "FedAvg", readings, (50.0, 0.5)), Cell("loss", "FedAvg", loss, metric="train_loss"))
    trainings = (
        PaperTraining("made", task, px.fedavg(lr=0.1, **local), schedule, first, every=1),
        PaperTraining("made", task, rates, schedule, (Cell("row", "searched", readings),)),
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


def test_trainings_of_separate_jobs_give_the_same_cells(tmp_path):
    experiment = tiny()
    names = [name_of(training) for training in experiment.trainings]
    reproduce_part(experiment, tmp_path / "jobs", names[1])
    assert not is_reproduced(experiment, tmp_path / "jobs")
    parts = []
    reproduce_part(experiment, tmp_path / "jobs", names[0], progress=lambda *done: parts.append(done))
    assert parts == [(done, 3) for done in range(4)]  # a part per round
    assert is_reproduced(experiment, tmp_path / "jobs")
    for other, num_seeds in ((experiment, 1), (tiny(num_rounds=4), None)):  # the files are not theirs
        assert not is_reproduced(other, tmp_path / "jobs", num_seeds)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "jobs" / "trainings").iterdir()}
    apart, together = (reproduce(experiment, tmp_path / name) for name in ("jobs", "loop"))
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # nothing was trained again
    scores = lambda record: [[one.of_seeds for one in cell.scorings] for cell in record.cells]
    assert scores(apart) == scores(together)


def test_a_cell_is_what_the_library_gives(done):
    experiment, (_, record) = tiny(), done
    training, federation = experiment.trainings[0], experiment.federations["made"]()
    algorithm, task = training.algorithm, training.task
    keys = jax.numpy.stack([jax.random.key(seed) for seed in (0, 1)])
    schedules = [px.rounds(4, 3, 2, key=key) for key in keys]
    result = px.simulate(algorithm, task, federation, schedules, key=keys)
    for cell, made in zip(training.cells, record.cells[:2], strict=True):
        scale = 1 if cell.metric == "train_loss" else 100
        for name, reading in zip(cell.scorings, made.scorings, strict=True):
            found = px.evaluate(algorithm, task, federation, result, cell.scorings[name], key=keys)
            np.testing.assert_allclose(reading.of_seeds, scale * found.mean(cell.metric), rtol=1e-6)
            assert reading.flag == cell.scorings[name].flag
        curve = made.curve
        assert curve.rounds == [0, 1, 2, 3] and curve.of_seeds[-1] == made.scorings[0].of_seeds
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
    assert other.cells[2].scorings[0].of_seeds != record.cells[2].scorings[0].of_seeds


def test_a_training_that_diverges_leaves_its_updates_out_and_says_so(tmp_path):
    base = tiny()
    huge = dataclasses.replace(base.trainings[0], algorithm=base.trainings[1].algorithm["huge"])
    record = reproduce(dataclasses.replace(base, trainings=(huge,), claims=()), tmp_path)
    left_out = "12 of 12 updates were not finite and were left out"
    assert [one.flag.split("; ")[-1] for one in record.cells[0].scorings] == [left_out, left_out]
    assert np.ptp(record.cells[0].curve.of_seeds, axis=0) == pytest.approx(0)  # the first model throughout
    assert record.cells[0].diverged == "12 of 12 updates of FedAvg were not finite"
    assert REPRODUCTION.validate_json((tmp_path / "results.json").read_bytes()) == record


def test_numbers_that_are_not_finite_are_kept_and_shown_and_have_their_own_verdict(tmp_path):
    base = tiny()
    far = {"far": px.Scoring("adapted", 30, 1.7e308, 5)}
    cells = (base.trainings[0].cells[0], Cell("loss", "near", {"near": px.Scoring()}, metric="loss"))
    training = dataclasses.replace(
        base.trainings[0], cells=(*cells, Cell("loss", "far", far, metric="loss")), every=None
    )
    claims = (Claim("near beats far", "nowhere", beats("near", "far", ("loss",))),)
    record = reproduce(dataclasses.replace(base, trainings=(training,), claims=claims), tmp_path)
    read = REPRODUCTION.validate_json((tmp_path / "results.json").read_bytes())
    assert np.isnan(record.cells[2].scorings[0].ours.mean) and np.isnan(read.cells[2].scorings[0].of_seeds).all()
    assert read.claims[0].verdict == "not finite" and read.claims[0].judged[0].contrasts[0].difference.low is None
    pages = section(read), write_reproduction(record, tmp_path / "report.html").read_text(encoding="utf-8")
    assert all("not finite" in page for page in pages) and "nan" not in pages[0]


@pytest.mark.slow
def test_a_search_may_be_shorter_and_of_one_seed(tmp_path):
    base = tiny(num_rounds=40)
    local = {"num_steps": 2, "batch_size": 5}
    training = dataclasses.replace(
        base.trainings[1], algorithm={str(lr): px.fedavg(lr=lr, **local) for lr in (0.05, 1.0)}
    )
    chosen = {}
    for name, search in {"whole": None, "short": partial(px.rounds, 4, 2, 1)}.items():
        one = dataclasses.replace(training, search=search)
        record = reproduce(dataclasses.replace(base, trainings=(one,), claims=()), tmp_path)  # another fingerprint
        chosen[name] = record.cells[0].chosen
        assert len(record.cells[0].scorings[0].of_seeds) == 2
    held = validation_of(base.federations["made"](), jax.random.key(0))
    reading = training.cells[0].scorings["training"]  # the other one adapts on what it scores
    for name, num_rounds, cohort, num_seeds in (("whole", 40, 2, 2), ("short", 2, 1, 1)):
        keys = jax.numpy.stack([jax.random.key(seed) for seed in range(num_seeds)])
        schedules = [px.rounds(4, num_rounds, cohort, key=key) for key in keys]
        score = {}
        for step, algorithm in training.algorithm.items():
            result = px.simulate(algorithm, training.task, held, schedules, key=keys)
            score[step] = px.evaluate(algorithm, training.task, held, result, reading, key=keys).mean("accuracy").mean()
        assert chosen[name] == max(score, key=score.get)
    assert chosen["whole"] != chosen["short"]


def test_cells_that_have_ended_are_kept_unless_the_experiment_changed(done, tmp_path):
    record, seen = done[1], []
    folder = shutil.copytree(done[0], tmp_path / "again")
    again = reproduce(tiny(), folder, notify=seen.append)
    assert again.cells == record.cells and len(seen) == 2  # to the seconds that the cells took
    longer = reproduce(tiny(num_rounds=4), folder)
    assert longer.cells[0].scorings != record.cells[0].scorings


def test_trainings_side_by_side_give_what_they_give_one_after_another(done, tmp_path):
    record = reproduce(tiny(), tmp_path, side_by_side=True)
    for found, made in zip(record.cells, done[1].cells, strict=True):
        assert (found.row, found.column, found.chosen) == (made.row, made.column, made.chosen)
        assert [one.of_seeds for one in found.scorings] == [one.of_seeds for one in made.scorings]


def test_another_network_is_another_training(done, tmp_path):
    folder = shutil.copytree(done[0], tmp_path / "again")
    for task in (
        px.classification(px.mlp((3,), num_outputs=10)),
        px.classification(px.logistic_regression(10), l2=0.1),
        px.classification(px.logistic_regression(10, init="fan_in")),
    ):
        trainings = tuple(dataclasses.replace(one, task=task) for one in tiny().trainings[:1])
        other = reproduce(tiny(trainings=trainings, claims=()), folder)
        assert other.cells[0].scorings != done[1].cells[0].scorings


def test_an_interrupted_reproduction_continues_where_it_stopped(done, tmp_path):
    def stop(cells):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce(tiny(), tmp_path, notify=stop)
    (kept,) = (tmp_path / "trainings").iterdir()  # the second training was not begun
    written = kept.stat().st_mtime_ns
    again = reproduce(tiny(), tmp_path)
    assert kept.stat().st_mtime_ns == written
    assert [cell.scorings for cell in again.cells] == [cell.scorings for cell in done[1].cells]


def test_the_record_is_read_back_and_shown(done, tmp_path):
    folder, record = done
    assert REPRODUCTION.validate_json((folder / "results.json").read_bytes()) == record
    text = write_reproduction(record, tmp_path / "page.html").read_text(encoding="utf-8")
    for words in (
        "50.00 ± 0.50",
        "training loss",
        "data:image/svg+xml;base64,",
        "one beats the other",
        "adapted on the scored data",
        "None.",
    ):
        assert words in text
    page = section(record).replace("\N{NO-BREAK SPACE}", " ")
    assert "| FedAvg | 50.00 ± 0.50 |" in page and "all: adapted on the scored data" in page
    assert "![a test](tiny.svg)" in page and "float32 matrix products" in page


def cell(column, values, row="row", metric="accuracy", curve=None, reading="main", is_baseline=False):
    scoring = ScoringRecord("only", "", "", interval(values), list(values))
    return CellRecord(row, column, reading, metric, None, None, [scoring], {}, "", 0.0, is_baseline, curve)


def judged(claim, cells, readings=(MAIN,)):
    return judge(claim, cells, readings)


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


NEAR, FAR = [1.0, 1.1, 0.9], [-1.0, -1.1, -0.9]
TRIED = Reading("tried", "", "our choice", "only looks for a cause")
CODE = Reading("code", "", "the authors' code")


def in_readings(**differences):
    """A claim over one row for each reading, whose columns differ by this much."""
    start = np.arange(3.0)
    cells = [
        cell(column, start + add, name, reading=name)
        for name, difference in differences.items()
        for column, add in (("a", np.array(difference)), ("b", 0))
    ]
    return Claim("", "", beats("a", "b", tuple(differences))), cells


def test_a_claim_is_judged_in_each_reading_and_excluded_ones_do_not_count():
    found = judged(*in_readings(main=NEAR, tried=FAR), (MAIN, TRIED))
    assert [(one.reading, one.verdict) for one in found.judged] == [("main", "holds"), ("tried", "does not hold")]
    assert found.verdict == "holds" and found.effect.difference.mean == pytest.approx(1.0)
    assert judged(*in_readings(main=NEAR, code=FAR), (MAIN, CODE)).verdict == "holds in part"
    assert judged(*in_readings(main=FAR, code=FAR), (MAIN, CODE)).verdict == "does not hold"


def test_a_claim_is_not_testable_where_no_method_is_above_the_baselines():
    claim = Claim("", "", beats("a", "b", ("row",)))
    cells = [cell("a", [52.0, 53.0]), cell("b", [40.0, 41.0])]
    bars = lambda untrained, guess: [
        cell("untrained", [untrained] * 2, is_baseline=True),
        cell("most frequent class", [guess] * 2, is_baseline=True),
    ]
    assert judged(claim, cells + bars(30.0, 35.0)).verdict == "holds"
    for low in (bars(60.0, 10.0), bars(10.0, 60.0)):
        found = judged(claim, cells + low)
        assert found.verdict == "not testable" and "no method is above both baselines" in found.reason
    better = [cell("c", [70.0, 71.0]), *bars(60.0, 10.0)]  # a third method learns: the order of a and b is one
    assert judged(claim, cells + better).verdict == "holds"
    guess = [cell("c", [70.0, 71.0]), *bars(10.0, 60.0)]
    assert "no compared method is above guessing" in judged(claim, cells + guess).reason
    assert "untrained 60.0, most frequent class 10.0, a 52.5, b 40.5 %" in judged(claim, cells + bars(60, 10)).reason


def test_a_reading_that_cannot_be_tested_does_not_count_beside_one_that_can():
    claim, cells = in_readings(main=FAR, code=NEAR)
    low = cell("most frequent class", [90.0] * 3, "main", is_baseline=True)
    found = judged(claim, [*cells, low], (MAIN, CODE))
    assert found.verdict == "holds" and [one.verdict for one in found.judged] == ["not testable", "holds"]
    assert found.effect.difference.mean == pytest.approx(1.0)


def test_a_claim_that_cannot_be_tested_says_why():
    found = judged(Claim("", "", (), untestable="The data cannot be obtained."), [])
    assert (found.verdict, found.reason, found.effect) == ("not testable", "The data cannot be obtained.", None)


def test_each_way_to_score_is_judged_and_the_first_counts():
    def two(column, first, second):
        one = cell(column, first)
        return dataclasses.replace(
            one, scorings=[*one.scorings, ScoringRecord("own copy", "", "", interval(0), second)]
        )

    cells = [two("a", [1.0, 1.1], [3.0, 3.1]), cell("b", [2.0, 2.0])]  # b has one score, compared with both
    found = judged(Claim("", "", beats("a", "b", ("row",))), cells)
    assert [(one.scoring, one.verdict) for one in found.judged] == [("only", "does not hold"), ("own copy", "holds")]
    assert found.verdict == "does not hold"


def test_a_number_that_is_not_finite_is_a_verdict_and_leaves_the_effect_to_the_others():
    cells = [cell("a", [1.0, np.nan]), cell("b", [0.0, 0.0]), cell("a", [3.0, 3.1], "x"), cell("b", [0.0, 0.0], "x")]
    found = judged(Claim("", "", beats("a", "b", ("row", "x"))), cells)
    assert [one.verdict for one in found.judged[0].contrasts] == ["not finite", "holds"]
    assert found.verdict == "holds in part" and found.effect.num_contrasts == 1
    assert judged(Claim("", "", beats("a", "b", ("row",))), cells).verdict == "not finite"


def test_a_training_that_lost_many_updates_is_not_finite_whatever_its_scores():
    lost = lambda num: dataclasses.replace(cell("b", [0.0, 0.1]), num_left_out=num, num_updates=1000)
    claim = Claim("", "", beats("a", "b", ("row",)))
    found = judged(claim, [cell("a", [1.0, 1.2]), lost(11)])
    assert found.verdict == "not finite" and found.effect is None
    assert found.reason == "11 of 1,000 updates of b were not finite"
    assert judged(claim, [cell("a", [1.0, 1.2]), lost(10)]).verdict == "holds"


def test_an_absurd_loss_is_not_finite():
    cells = [cell("a", [1.0, 1.1], metric="loss"), cell("b", [2.9e16, 2.0], metric="loss")]
    assert judged(Claim("", "", beats("a", "b", ("row",))), cells).verdict == "not finite"


@pytest.mark.parametrize(
    "values, turn, verdict",
    [
        ([89.0, 97.6, 97.7, 97.8], -0.1, "does not hold"),
        ([89.0, 94.3, 94.2, 93.8], 0.4, "holds"),
        ([93.0, 92.0, 90.0, 89.5], -0.5, "does not hold"),
        ([5.0, 3.0, 4.0, 6.0], 2.0, "holds"),
    ],
)
def test_values_that_rise_and_fall_are_not_monotone(values, turn, verdict):
    cells = [cell(f"{at}", np.array([0.0, 7.0]) + one) for at, one in enumerate(values)]
    along = Contrast("", tuple(("row", f"{at}") for at in range(4)), ())
    found = judged(Claim("", "", (along,), of="turn"), cells)
    assert found.verdict == verdict and found.judged[0].contrasts[0].difference.mean == pytest.approx(turn)


@pytest.mark.parametrize(
    "other, verdict", [(1.5, "holds"), (-1.5, "holds"), (9.0, "does not hold"), (2.05, "undecided")]
)
def test_two_values_are_similar_within_a_distance(other, verdict):
    cells = [cell("a", [0.0, 0.2]), cell("b", [other, other])]
    assert judged(Claim("", "", beats("a", "b", ("row",)), within=3.0), cells).verdict == verdict


def test_a_difference_of_means_is_scaled():
    cells = [cell(name, [value, value]) for name, value in (("a", 4.0), ("b", 6.0), ("c", 3.0))]
    gains = Contrast("", (("row", "a"), ("row", "b")), (("row", "c"), ("row", "c")), scale=0.5)
    assert judged(Claim("", "", (gains,)), cells).judged[0].contrasts[0].difference.mean == 2.0


def test_claims_along_curves_have_one_scoring():
    curve = CurveRecord([0, 1], [0.0, 1.0], [], [[0.0, 0.0], [1.0, 1.1]])
    twice = lambda one: dataclasses.replace(
        one, scorings=[*one.scorings, dataclasses.replace(one.scorings[0], name="x")]
    )
    cells = [twice(cell(name, [1.0, 1.1], curve=curve)) for name in "ab"]
    scorings = lambda **how: [
        one.scoring for one in judged(Claim("", "", beats("a", "b", ("row",)), **how), cells).judged
    ]
    assert scorings() == ["only", "x"]
    assert scorings(at=0.5) == scorings(along="seconds") == scorings(of="wavering") == ["only"]


def test_an_effect_is_the_mean_of_the_accuracies():
    cells = [
        cell(column, values, row)
        for row, column, values in (
            ("x", "a", [3.0, 4.0]),
            ("x", "b", [1.0, 1.0]),
            ("y", "a", [1.0, 2.0]),
            ("y", "b", [1.0, 1.0]),
        )
    ]
    cells += [cell("a", [9.0, 9.0], "l", "loss"), cell("b", [1.0, 1.0], "l", "loss")]
    effect = judged(Claim("", "", beats("a", "b", ("l", "x", "y"))), cells).effect
    assert (effect.metric, effect.num_contrasts, effect.least, effect.most) == ("accuracy", 2, 0.5, 2.5)
    assert effect.difference == interval([1.0, 2.0])


def test_a_claim_at_equal_time_compares_at_the_end_of_the_shorter_training():
    long = CurveRecord([0, 1, 2], [0.0, 2.0, 4.0], [], [[0.0, 0.0], [6.0, 6.1], [9.0, 9.1]])
    short = CurveRecord([0, 1, 2], [0.0, 0.5, 1.0], [], [[0.0, 0.0], [2.0, 2.0], [2.0, 2.0]])
    cells = [cell("a", [9.0, 9.1], curve=long), cell("b", [2.0, 2.0], curve=short)]
    claim = Claim("", "", beats("a", "b", ("row",)), along="seconds")
    assert judged(claim, cells).effect.difference.mean == pytest.approx(3.025 - 2)  # after 1 s


def test_the_baselines_are_the_initial_model_and_each_clients_most_frequent_class(tmp_path):
    base = tiny()
    scored = {"training": px.Scoring(lr=0.1)}
    training = dataclasses.replace(base.trainings[0], cells=(*base.trainings[0].cells[:1], *baselines("row", scored)))
    for every in (1, None):
        one = dataclasses.replace(training, every=every)
        record = reproduce(dataclasses.replace(base, trainings=(one,), claims=()), tmp_path)
        untrained, guess = record.cells[1:]
        federation = base.federations["made"]()
        shares = []
        for i in range(federation.num_clients):
            labels = federation.y[federation.offsets[i] : federation.offsets[i + 1]]
            tested = federation.test_y[federation.test_offsets[i] : federation.test_offsets[i + 1]]
            shares.append(np.mean(tested == np.bincount(labels).argmax()))
        assert guess.scorings[0].of_seeds == pytest.approx([100 * np.mean(shares)] * 2)
        assert guess.is_baseline and untrained.is_baseline and untrained.curve is None and untrained.algorithm == {}
        if every:
            assert untrained.scorings[0].of_seeds == record.cells[0].curve.of_seeds[0]


def test_matrix_products_are_in_float32_and_the_record_says_so(tmp_path):
    seen = []
    note = lambda cells: seen.append(jax.config.jax_default_matmul_precision)
    record = reproduce(tiny(trainings=tiny().trainings[:1], claims=()), tmp_path, notify=note)
    assert seen == ["highest"] and record.precision == "float32" and record.schema_version == 3
    assert jax.config.jax_default_matmul_precision is None


def test_of_losses_less_is_better_and_sums_of_cells_are_compared():
    cells = [cell("a", [1.0, 1.1], metric="loss"), cell("b", [2.0, 2.1], metric="loss")]
    assert judged(Claim("", "", beats("a", "b", ("row",))), cells).verdict == "holds"
    gap = Contrast("gap", (("row", "b"), ("row", "b")), (("row", "a"),))
    found = judged(Claim("", "", (gap,)), cells).judged[0].contrasts[0]
    assert found.name == "gap" and found.difference.mean == pytest.approx(1.05 - 4.1)


def test_a_claim_may_be_about_the_way_or_about_wavering():
    points = [[0.0, 0.0], [9.0, 9.1], [1.0, 1.0], [3.0, 3.1]]
    steady = [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    curve = lambda values, times: CurveRecord([0, 1, 2, 9], [0.0, 0.1, 0.2, 0.3], times, values)
    cells = [
        cell("a", points[-1], curve=curve(points, [0.0, 2.0, 9.0, 10.0])),
        cell("b", steady[-1], curve=curve(steady, [0.0, 2.0, 9.0, 10.0])),
    ]
    at = lambda share, cells=cells: judged(Claim("", "", beats("a", "b", ("row",)), at=share), cells)
    assert at(1.0).judged[0].contrasts[0].difference.mean == pytest.approx(1.05)
    assert at(0.2).judged[0].contrasts[0].difference.mean == pytest.approx(8.05)  # by virtual time
    untimed = [dataclasses.replace(one, curve=dataclasses.replace(one.curve, times=[])) for one in cells]
    assert at(0.2, untimed).judged[0].contrasts[0].difference.mean == pytest.approx(-1.0)  # by rounds
    wavering = judged(Claim("", "", beats("b", "a", ("row",)), of="wavering"), cells).judged[0].contrasts[0]
    assert wavering.difference.mean == pytest.approx(1.025) and wavering.verdict == "holds"


def test_a_claim_may_be_about_how_little_the_rows_of_a_column_differ():
    values = {"a": ([1.0, 2.0], [2.0, 3.1], [1.5, 2.0]), "b": ([5.0, 5.0], [1.0, 2.0], [9.0, 8.0])}
    cells = [cell(column, one, f"row {i}") for column, rows in values.items() for i, one in enumerate(rows)]
    places = {column: tuple((f"row {i}", column) for i in range(3)) for column in values}
    found = judged(Claim("", "", (Contrast("", places["a"], places["b"]),), of="spread"), cells).judged[0].contrasts[0]
    assert found.difference.mean == pytest.approx((8.0 - 1.0 + 6.0 - 1.1) / 2)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_complete(name, quick):
    experiment = EXPERIMENTS[name](quick)
    places = [(cell.row, cell.column) for cell in experiment.cells]
    assert experiment.name == name and len(set(places)) == len(places) and experiment.choices
    for claim in experiment.claims:
        assert all({*one.better, *one.worse} <= set(places) for one in claim.contrasts), claim.words
    assert experiment.quick == quick and {one.data for one in experiment.trainings} <= set(experiment.federations)
    makers = {make for one in experiment.trainings for make in (one.schedule, one.search) if make is not None}
    assert quick is False or all(make(key=jax.random.key(0)).num_events for make in makers)


def test_writers_are_asked_for_and_a_stand_in_is_called_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSONAX_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"Folder not found: .* apfl-figure5 needs FEMNIST by writer"):
        figures.femnist_writers(3)
    pool = px.datasets.digits()
    large = np.pad(pool.x, ((0, 0), (10, 10), (10, 10)))
    monkeypatch.setattr(stand_in, "mnist", lambda: dataclasses.replace(pool, x=large))
    px.datasets.write_stand_in(tmp_path / "femnist", 3)
    writers = figures.femnist_writers(3)
    assert writers.origin.startswith("A STAND-IN") and writers.num_clients == 3 and writers.x.shape[1:] == (28, 28)
    assert writers.x.dtype == np.uint8 and writers.y.max() < 10 and writers.test_y is not None
    with pytest.raises(ValueError, match="needs 4 writers, got 3"):
        figures.femnist_writers(4)


def test_delays_of_a_seed_are_its_own_and_as_many():
    make = persafl.delayed_schedules(30, None, 60.0, spread=1.0, of_seed=True)
    one, other = (make(key=jax.random.key(seed)) for seed in (0, 1))
    assert one.num_events == other.num_events and not np.allclose(one.time, other.time)
    narrow = persafl.delayed_schedules(30, None, 60.0, of_seed=True)(key=jax.random.key(0))
    fresh = lambda schedule: np.mean(np.arange(schedule.num_events) - schedule.started_at <= 5)
    assert fresh(one) > 2 * fresh(narrow)


def test_all_algorithms_of_persafl_see_the_same_delays_for_the_same_time():
    waiting, arriving = (persafl.delayed_schedules(30, cohort, 100.0)(key=jax.random.key(7)) for cohort in (10, None))
    for schedule in (waiting, arriving):
        assert schedule.time.max() <= 100 and schedule.time.max() > 70
    other = persafl.delayed_schedules(30, None, 100.0)(key=jax.random.key(8))
    np.testing.assert_array_equal(other.time, arriving.time)
    share = ActiveShare()
    assert 78 < share.of(arriving, 100.0) < 88 and share.of(waiting, 100.0) < 25
    assert share.of(arriving, 0.5) < share.of(arriving, 100.0)  # all begin with a download
    assert ActiveShare(to_the_end=True).of(waiting, 100.0) == pytest.approx(100 / 3)


def test_a_run_of_arrivals_is_followed_along_virtual_time(tmp_path):
    base = tiny()
    same = jax.random.key(0)
    arriving = lambda *, key: px.arrivals(4, 9, delays=px.delays.persafl_delays(4, key=same), key=same)
    cells = (*base.trainings[0].cells[:1], Cell("active", "FedAsync", {"mean": ActiveShare()}, metric="active_share"))
    algorithm = px.fedasync(lr=0.1, num_steps=2, batch_size=5)
    training = dataclasses.replace(base.trainings[0], algorithm=algorithm, schedule=arriving, cells=cells, every=2)
    record = reproduce(dataclasses.replace(base, trainings=(training,), claims=()), tmp_path)
    accuracy, active = record.cells
    assert accuracy.curve.times == active.curve.times == sorted(accuracy.curve.times) and accuracy.curve.rounds[-1] == 9
    schedule = arriving(key=None)
    assert active.scorings[0].of_seeds == [ActiveShare().of(schedule, schedule.time[-1])] * 2
    text = write_reproduction(record, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "virtual time" in text


def test_the_committed_records_are_whole_and_of_the_experiments():
    records = [REPRODUCTION.validate_json(path.read_bytes()) for path in RESULTS]
    assert {record.name for record in records} <= set(EXPERIMENTS) and not any(record.quick for record in records)
    for record in records:
        stated = {(cell.row, cell.column): cell.paper for cell in EXPERIMENTS[record.name](False).cells}
        for made in record.cells:
            assert (made.paper is None) == (stated[made.row, made.column] is None)
        assert re.fullmatch(rf"personax reproduce {record.name}", record.command) and record.machine["device"]


def test_the_committed_records_are_judged_by_the_present_rules():
    """After a change: `python -m personax.reproduce.rejudge docs/results`."""
    for path in RESULTS:
        record = REPRODUCTION.validate_json(path.read_bytes())
        again = rejudged(record, EXPERIMENTS[record.name](False))
        assert REPRODUCTION.dump_json(again) == REPRODUCTION.dump_json(record), record.name


def test_the_count_of_an_earlier_version_is_moved_from_its_flag(done):
    record = done[1]
    flag = "adapted on the scored data; 3 updates were not finite and were left out"
    old = dataclasses.replace(record.cells[0], scorings=[dataclasses.replace(record.cells[0].scorings[0], flag=flag)])
    gone = dataclasses.replace(old, row="of an earlier version")
    found = rejudged(dataclasses.replace(record, cells=[old, gone, *record.cells[1:]]), tiny())
    assert len(found.cells) == len(record.cells)
    assert (found.cells[0].num_left_out, found.cells[0].num_updates) == (3, 12)
    assert found.cells[0].scorings[0].flag.endswith("; 3 of 12 updates were not finite and were left out")


def test_every_text_of_the_data_files_is_used():
    shown = [choice for make in EXPERIMENTS.values() for choice in make(False).choices]
    for paper in TEXTS.values():
        for texts in paper.values():
            for text in [texts] if isinstance(texts, str) else texts:
                assert any(choice.startswith(text.split("{")[0]) for choice in shown), text
    assert not any("{" in choice or "  " in choice for choice in shown)
    assert set(FINDINGS) <= set(EXPERIMENTS)
