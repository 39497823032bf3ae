"""Tuning: options are chosen on a part of the clients' training data, whatever their tests and newcomers hold."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

import personax as px
from personax.experiment.build import build, make_schedules, make_training, resolve
from personax.experiment.config import AlgorithmSection, dump, parse
from personax.experiment.folders import Folder
from personax.experiment.records import RUN, TUNING, TrialRecord, TunedAlgorithm, TuningRecord, read_results
from personax.experiment.runs import execute, start
from personax.experiment.tuning import Trial, run_all, tune, validation_of, with_best_options, with_options
from tests.experiment.test_config import refused
from tests.test_contract import assert_close

pytestmark = pytest.mark.xdist_group("small runs")

KEY = jax.random.key(0)
NUM_CLIENTS, NUM_TRAIN, NUM_TEST = 6, 10, 4
LABELS = {"kind": "file", "label": "y"}
HUGE = 1.7e308  # a step size after which nothing is finite


def columns(num, seed):
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(NUM_CLIENTS), num)
    x = rng.normal(size=(len(client), 2)) + client[:, None] % 3
    return x, (x.sum(axis=1) > 2).astype(int), client


def write_data(path, test_seed=1, changed=()):
    """Clients with separate tests; those of `changed` have other training data."""
    (x, y, client), (test_x, test_y, test_client) = columns(NUM_TRAIN, 0), columns(NUM_TEST, test_seed)
    test_y = test_y if test_seed == 1 else 1 - test_y
    mine = np.isin(client, changed)
    np.savez(path, x=x + 7 * mine[:, None], y=np.where(mine, 1 - y, y), client=client)
    with np.load(path) as kept:
        np.savez(path, **kept, test_x=test_x, test_y=test_y, test_client=test_client)
    return path


def config_of(path, tuned, held_out=0, **options):
    entry = {"recipe": "fedavg", "num_steps": 2, "batch_size": 4, "lr": 0.5, **options}
    return resolve(
        parse(
            {
                "seeds": 2,
                "data": {**LABELS, "path": str(path)},
                "split": {"num_held_out": held_out},
                "model": {"kind": "logistic_regression"},
                "schedule": {"num_rounds": 3, "cohort_size": 2},
                "tune": tuned,
                "algorithms": {"A": entry},
            }
        ),
        baselines=False,
    )


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / "data.npz")


def rows_of(x):
    return {tuple(row) for row in np.asarray(x)}


def test_validation_data_is_a_part_of_each_clients_training_data(data):
    federation = build(config_of(data, {}, held_out=2)).federation
    made = validation_of(federation, KEY)
    assert made.num_clients == 4 and made.newcomers is None and made.ids.tolist() == federation.ids.tolist()
    for i in range(4):
        train, kept, all_rows = (
            rows_of(made.client(i)[0]),
            rows_of(made.client_test(i)[0]),
            rows_of(federation.client(i)[0]),
        )
        assert train | kept == all_rows and not train & kept
        assert (len(train), len(kept)) == (8, 2)
        assert not kept & rows_of(federation.test_x) and not kept & rows_of(federation.newcomers.x)


def test_a_trial_is_a_run_on_the_rest_scored_on_the_validation_data(data):
    config = config_of(data, {"lr": [0.02, 1.0]})
    chosen, trials = tune(config)
    plan = build(config)
    federation = validation_of(plan.federation, jax.random.key(config.split.seed))
    for trial in trials:
        algorithm = px.fedavg(lr=trial.options["lr"], num_steps=2, batch_size=4)
        schedules = make_schedules(config, algorithm, NUM_CLIENTS)
        result = px.simulate(algorithm, plan.task, federation, schedules, key=plan.keys)
        found = px.evaluate(algorithm, plan.task, federation, result, px.Scoring("global"), key=plan.keys)
        assert trial.score == np.mean(found.mean("accuracy")) and trial.metric == "accuracy"
    best = max(trials, key=lambda trial: trial.score)
    assert chosen.algorithms["A"].options == {**config.algorithms["A"].options, **best.options}
    assert chosen.tune == {} and resolve(chosen, baselines=False) == chosen


def test_neither_tests_nor_newcomers_have_a_say(tmp_path):
    tuned = {"lr": [0.02, 0.2, 1.0]}
    plain = config_of(write_data(tmp_path / "plain.npz"), tuned, held_out=2)
    new = build(plain).federation.newcomers.ids.tolist()
    others = config_of(write_data(tmp_path / "others.npz", test_seed=2, changed=new), tuned, held_out=2)
    one, other = build(plain).federation, build(others).federation
    assert np.any(one.test_y != other.test_y) and np.any(one.newcomers.x != other.newcomers.x)
    assert tune(plain)[1] == tune(others)[1]
    assert tune(plain)[0].algorithms == tune(others)[0].algorithms


def test_a_score_of_newcomers_is_tuned_on_those_who_train(data):
    scores = {"S": {"model": "global", "clients": "held_out", "score_on": "both"}}
    config = config_of(data, {"lr": [0.1]}, held_out=2, scores=scores)
    plain = config_of(data, {"lr": [0.1]}, held_out=2)
    assert tune(config)[1] == tune(plain)[1]
    assert tune(config)[0].algorithms["A"].scores == scores


def test_options_that_diverge_are_passed_over(data):
    told = []
    config, trials = tune(config_of(data, {"lr": [HUGE, 0.1]}), told.append)
    assert [trial.score is None for trial in trials] == [True, False]
    assert config.algorithms["A"].options["lr"] == 0.1 and told == ["A: lr = 0.1"]


def test_runs_of_a_search_together_are_those_one_by_one(data):
    plan = build(config_of(data, {}))
    local = {"num_steps": 2, "batch_size": 4}
    algorithms = [
        px.fedavg(lr=0.1, **local),
        px.fedavg(lr=HUGE, **local),
        px.scaffold(lr=0.1, **local),
        px.fedavg(lr=0.5, **local),
    ]
    schedules = lambda algorithm: [px.rounds(NUM_CLIENTS, 3, 2, key=key) for key in plan.keys]
    run = partial(run_all, algorithms, plan.task, plan.federation, schedules, plan.keys)
    for one, apart in zip(run(side_by_side=True), run(side_by_side=False), strict=True):
        assert (one is None) == (apart is None)
        if one is not None:
            assert_close((one.params, one.personal), (apart.params, apart.personal))
            assert one.num_events.tolist() == apart.num_events.tolist() == [6, 6]
    assert [one is None for one in run()] == [False, True, False, False]


def test_when_all_options_diverge_an_algorithm_keeps_its_own_unless_that_is_an_error(data):
    config, problem = config_of(data, {"lr": [HUGE, HUGE / 2]}), "`A` diverged with every choice of `[tune]`."
    heard = []
    chosen, trials = tune(config, heard.append)
    assert chosen.algorithms == config.algorithms and [trial.score for trial in trials] == [None, None]
    assert heard == [f"{problem} Add smaller step sizes. It keeps its own options."]
    with refused(f"{problem} Add smaller step sizes."):
        tune(dataclasses.replace(config, on_nonfinite="raise"))


def test_every_combination_is_tried_and_recorded(data):
    _, trials = tune(config_of(data, {"lr": [0.02, 0.2], "clip_norm": [1.0, 5.0]}))
    assert [trial.options for trial in trials] == [
        {"lr": lr, "clip_norm": norm} for lr in (0.02, 0.2) for norm in (1.0, 5.0)
    ]
    assert {trial.algorithm for trial in trials} == {"A"} and all(0 <= trial.score <= 1 for trial in trials)


def test_an_algorithm_takes_the_options_that_are_its_own(data):
    config = config_of(data, {"mix": [0.2, 0.4]})
    both = dataclasses.replace(
        config, algorithms={**config.algorithms, "B": AlgorithmSection("apfl", config.algorithms["A"].options)}
    )
    chosen, trials = tune(resolve(both, baselines=False))
    assert [(trial.algorithm, trial.options) for trial in trials] == [("B", {"mix": 0.2}), ("B", {"mix": 0.4})]
    assert chosen.algorithms["A"] == config.algorithms["A"] and "mix" in chosen.algorithms["B"].options


@pytest.mark.parametrize(
    ("tuned", "said"),
    [
        ({}, "There is nothing to tune. Add a table `[tune]`"),
        ({"mix": [0.5]}, "`tune.mix` is an option of none of A. Remove it."),
        ({"lr": [0.1, -0.1]}, "`algorithms.A`: `lr` must be positive, got -0.1."),
        ({"lr": [0.1, "x"]}, "`algorithms.A.lr` must be a number, got 'x'."),
        ({"num_epochs": [1]}, "`algorithms.A`: Give either `num_steps` or `num_epochs`"),
    ],
)
def test_what_cannot_be_tuned_is_said_before_the_first_trial(data, tuned, said):
    with refused(said):
        tune(config_of(data, tuned))


def test_the_best_is_the_highest_accuracy_or_the_lowest_error():
    entry = AlgorithmSection("fedavg", {"lr": 1.0, "num_steps": 1}, {"A": {"model": "global"}})
    for metric, best in (("accuracy", 0.3), ("error", 0.1), ("loss", 0.1)):
        trials = [Trial("A", {"lr": lr}, metric, score) for lr, score in ((0.1, 0.2), (0.2, None), (0.3, 0.9))]
        assert with_best_options("A", entry, trials, lambda text: None).options["lr"] == best


def test_of_equals_the_first_is_chosen():
    entry = AlgorithmSection("fedavg", {"lr": 1.0, "num_steps": 1}, {"A": {"model": "global"}})
    trials = [Trial("A", {"lr": lr}, "accuracy", 0.5) for lr in (0.3, 0.1, 0.2)]
    assert with_best_options("A", entry, trials, lambda text: None).options["lr"] == 0.3


def test_scores_that_options_implied_follow_them_and_others_do_not():
    implied = {"recipe": "per_fedavg", "adapt_lr": 0.1, "lr": 0.1, "num_steps": 1}
    given = {**implied, "scores": {"B": {"model": "adapted", "lr": 0.3}}}
    config = resolve(parse({"algorithms": {"A": implied, "B": given}}), baselines=False)
    options = {"adapt_lr": 0.7, "num_adapt_steps": 3}
    followed, stayed = (with_options(name, entry, options) for name, entry in config.algorithms.items())
    assert make_training("A", followed).scorings == {"A": px.Scoring("adapted", 3, 0.7)}
    assert make_training("B", stayed).scorings == {"B": px.Scoring("adapted", lr=0.3)}
    assert followed.options == {**config.algorithms["A"].options, **options} and dump(config)


FOUND = TuningRecord(
    share=0.2,
    seed=0,
    seeds=[0, 1],
    algorithms=[
        TunedAlgorithm(
            algorithm="A",
            search="grid",
            num_combinations=2,
            metric="accuracy",
            words="the shared model as it is",
            before={"lr": 0.1},
            chosen={"lr": 0.3},
            trials=[TrialRecord({"lr": 0.1}, 0.5, [0.4, 0.6]), TrialRecord({"lr": 0.3}, None, [])],
            warnings=["The largest `lr` diverged."],
        )
    ],
)


def test_the_results_of_a_tuned_run_include_the_search(data, tmp_path):
    folder = start(config_of(data, {}), tmp_path / "run")
    folder.tuning.write_bytes(TUNING.dump_json(FOUND))
    assert execute(folder).tuning == FOUND == read_results(folder.root).tuning
    assert execute(Folder(folder.root)).tuning == FOUND  # a finished run is not written again
    assert RUN.validate_json(folder.results.read_bytes()).tuning.algorithms[0].of({"lr": 0.1}).of_seeds == [0.4, 0.6]
    assert FOUND.algorithms[0].of({"lr": 1.0}) is None
