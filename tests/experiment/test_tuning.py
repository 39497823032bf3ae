"""Tuning chooses options on a part of the clients' training data, independently of test data and newcomers."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

import personax as px
from personax.evaluation.validation import validation_of
from personax.experiment import tuning
from personax.experiment.build import build, make_schedules, make_training, resolve
from personax.experiment.config import AlgorithmSection, TuneSection, dump, parse
from personax.experiment.folders import Folder
from personax.experiment.records import RUN, TUNING, TrialRecord, TunedAlgorithm, TuningRecord, read_results
from personax.experiment.runs import execute, start
from personax.experiment.search import has_option, search_of, values_of
from personax.experiment.tuning import best_trial, best_trials, run_all, tune, with_options
from personax.values import RECIPES
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
    config = config_of(data, {"lr": [0.02, 1.0]}, schedule={"cohort_size": 1})
    chosen, found = tune(config)
    (tuned,) = found.algorithms
    plan = build(config)
    federation = validation_of(plan.federation, jax.random.key(config.split.seed))
    for trial in tuned.trials:
        algorithm = px.fedavg(lr=trial.options["lr"], num_steps=2, batch_size=4)
        schedules = make_schedules(config.scheduled_for("A"), algorithm, NUM_CLIENTS)
        assert schedules[0].round_size == 1
        result = px.simulate(algorithm, plan.task, federation, schedules, key=plan.keys)
        means = px.evaluate(algorithm, plan.task, federation, result, px.Scoring("global"), key=plan.keys).mean(
            "accuracy"
        )
        assert trial.of_seeds == pytest.approx(means) and trial.score == pytest.approx(means.mean())
    assert tuned.metric == "accuracy" and "scored on the validation data of all clients" in tuned.words
    best = max(tuned.trials, key=lambda trial: trial.score)
    assert tuned.chosen == best.options and tuned.before == {"lr": 0.5}
    assert chosen.algorithms["A"].options == {**config.algorithms["A"].options, **best.options}
    assert chosen.tune == TuneSection() and resolve(chosen, baselines=False) == chosen


def test_neither_tests_nor_newcomers_affect_tuning(tmp_path):
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
    config, found = tune(config_of(data, {"lr": [HUGE, 0.1]}), told.append)
    assert [trial.score is None for trial in found.algorithms[0].trials] == [True, False]
    assert config.algorithms["A"].options["lr"] == 0.1 and told[0].startswith("A: lr = 0.1 (accuracy ")
    assert [mark for _, mark in best_trials(found.algorithms[0])] == ["chosen", ""]


def test_runs_of_a_search_together_equal_separate_runs(data):
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
    config, problem = config_of(data, {"lr": [HUGE, HUGE / 2]}), "`A` diverged with all options."
    heard = []
    chosen, found = tune(config, heard.append)
    (tuned,) = found.algorithms
    assert chosen.algorithms == config.algorithms and [trial.score for trial in tuned.trials] == [None, None]
    warning = f"{problem} Add smaller step sizes to `[tune]`. It keeps its own options."
    assert heard == ["A: lr = 0.5", f"Warning: {warning}"] and tuned.warnings == [warning]
    with refused(problem):
        tune(dataclasses.replace(config, on_nonfinite="raise"))


def test_every_combination_is_tried_and_recorded(data):
    _, found = tune(config_of(data, {"lr": [0.02, 0.2], "clip_norm": [1.0, 5.0]}))
    (tuned,) = found.algorithms
    assert [trial.options for trial in tuned.trials] == [
        {"lr": lr, "clip_norm": norm} for lr in (0.02, 0.2) for norm in (1.0, 5.0)
    ]
    assert tuned.algorithm == "A" and all(0 <= trial.score <= 1 for trial in tuned.trials)
    assert (tuned.search, tuned.num_combinations) == ("grid", 4)


def test_an_algorithm_takes_the_options_that_are_its_own(data):
    config = config_of(data, {"mix": [0.2, 0.4]})
    both = dataclasses.replace(
        config, algorithms={**config.algorithms, "B": AlgorithmSection("apfl", config.algorithms["A"].options)}
    )
    chosen, found = tune(resolve(both, baselines=False))
    (tuned,) = found.algorithms
    assert (tuned.algorithm, [trial.options for trial in tuned.trials]) == ("B", [{"mix": 0.2}, {"mix": 0.4}])
    assert tuned.before == {"mix": 0.01}
    assert chosen.algorithms["A"] == config.algorithms["A"] and "mix" in chosen.algorithms["B"].options


@pytest.mark.parametrize(
    ("tuned", "said"),
    [
        ({"mix": [0.5]}, "None of A has the option `tune.mix`. Remove it."),
        ({"lr": [0.1, -0.1]}, "`algorithms.A`: `lr` must be positive, got -0.1."),
        ({"lr": [0.1, "x"]}, "`algorithms.A.lr` must be a number, got 'x'."),
        ({"num_epochs": [1]}, "`algorithms.A`: Give either `num_steps` or `num_epochs`"),
    ],
)
def test_untunable_options_are_reported_before_the_first_trial(data, tuned, said):
    with refused(said):
        tune(config_of(data, tuned))


def test_the_best_is_the_highest_accuracy_or_the_lowest_error_then_the_lowest_loss_then_the_first():
    trial = lambda lr, score, loss=1.0: TrialRecord({"lr": lr}, score, [] if score is None else [score], loss)
    trials = [trial(0.1, 0.2), trial(0.2, None), trial(0.3, 0.9), trial(0.4, 0.9), trial(0.5, 0.2)]
    for metric, best in (("accuracy", 0.3), ("error", 0.1), ("loss", 0.1)):
        assert best_trial(trials, metric).options == {"lr": best}
    assert best_trial(trials[1:2], "accuracy") is None
    assert best_trial([*trials, trial(0.6, 0.9, 0.5), trial(0.7, 0.8, 0.1)], "accuracy").options == {"lr": 0.6}


def test_scores_that_options_implied_follow_them_and_others_do_not():
    implied = {"recipe": "per_fedavg", "adapt_lr": 0.1, "lr": 0.1, "num_steps": 1}
    given = {**implied, "scores": {"B": {"model": "adapted", "lr": 0.3}}}
    config = resolve(parse({"algorithms": {"A": implied, "B": given}}), baselines=False)
    options = {"adapt_lr": 0.7, "num_adapt_steps": 3}
    followed, stayed = (with_options(name, entry, options) for name, entry in config.algorithms.items())
    assert make_training("A", followed).scorings == {"A": px.Scoring("adapted", 3, 0.7)}
    assert make_training("B", stayed).scorings == {"B": px.Scoring("adapted", lr=0.3)}
    assert followed.options == {**config.algorithms["A"].options, **options} and dump(config)


def test_the_steps_of_a_given_score_are_tuned_without_training_again(data, monkeypatch):
    scores = {"fine-tuned": {"model": "adapted", "num_steps": 2}, "before": {"model": "global"}}
    config = config_of(data, {"lr": [0.02, 0.2], "scores": {"lr": [0.0, 0.3], "num_steps": [1, 4]}}, scores=scores)
    trained, real = [], tuning.simulate
    monkeypatch.setattr(tuning, "simulate", lambda *given, **more: trained.append(given[0]) or real(*given, **more))
    chosen, found = tune(config)
    (tuned,), plan = found.algorithms, build(config)
    assert [len(swept) for swept in trained] == [2 * len(plan.keys)]
    assert len(tuned.trials) == 8 and tuned.before == {"lr": 0.5, "scores.lr": 0.01, "scores.num_steps": 2}
    federation = validation_of(plan.federation, jax.random.key(config.split.seed))
    for trial in tuned.trials:
        algorithm = px.fedavg(lr=trial.options["lr"], num_steps=2, batch_size=4)
        result = px.simulate(algorithm, plan.task, federation, make_schedules(config, algorithm, 6), key=plan.keys)
        scoring = px.Scoring("adapted", trial.options["scores.num_steps"], trial.options["scores.lr"])
        means = px.evaluate(algorithm, plan.task, federation, result, scoring, key=plan.keys).mean("accuracy")
        assert trial.of_seeds == pytest.approx(means)
    best = best_trial(tuned.trials, "accuracy").options
    steps = {"num_steps": best["scores.num_steps"], "lr": best["scores.lr"]}
    assert chosen.algorithms["A"].scores == {"fine-tuned": {"model": "adapted", **steps}, "before": {"model": "global"}}
    assert chosen.algorithms["A"].options == {**config.algorithms["A"].options, "lr": best["lr"]}
    assert f"{steps['num_steps']} gradient step" in tuned.words and resolve(chosen, baselines=False) == chosen


def test_scores_that_follow_the_recipe_or_take_no_steps_have_none_to_tune(data):
    recipe = {"recipe": "per_fedavg", "adapt_lr": 0.1, "lr": 0.1, "num_steps": 1}
    config = resolve(parse({"algorithms": {"A": recipe}}), baselines=False)
    assert not has_option("A", config.algorithms["A"], "scores.lr")
    with refused("None of A has the option `tune.scores.lr`. Remove it."):
        tune(config_of(data, {"scores.lr": [0.1]}))
    with refused("None of A has the option `tune.scores.tunes`. Remove it."):
        tune(config_of(data, {"scores.tunes": ["*"]}, scores={"S": {"model": "adapted"}}))


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
            words="the shared model, unchanged",
            before={"lr": 0.1},
            chosen={"lr": 0.3},
            trials=[TrialRecord({"lr": 0.1}, 0.5, [0.4, 0.6], 1.2), TrialRecord({"lr": 0.3}, None, [], None)],
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


# Choice of options

DEFAULTS = {  # of each recipe, the numbers that it declares
    "fedavg": {"lr"},
    "fedprox": {"lr", "strength"},
    "scaffold": {"lr"},
    "aruba": {"lr"},
    "local_only": {"lr"},
    "per_fedavg": {"lr", "adapt_lr"},
    "ditto": {"lr", "strength"},
    "pfedme": {"lr", "strength", "prox_lr"},
    "apfl": {"lr", "mix"},
    "fedper": {"lr"},
    "lg_fedavg": {"lr"},
    "fedrep": {"lr"},
    "fedalt": {"lr"},
    "fedsim": {"lr"},
    "fedbabu": {"lr"},
    "anil": {"lr", "adapt_lr"},
    "fedbn": {"lr"},
    "fedsa_lora": {"lr"},
    "feddpa": {"lr"},
    "fedasync": {"lr"},
    "fedasync_mixing": {"lr", "mixing"},
    "fedbuff": {"lr", "server_lr"},
    "persafl": {"lr", "objective.strength", "objective.prox_lr"},
}
NEEDED = {
    "personal": "dense_1",
    "head": "dense_1",
    "strength": 1.0,
    "adapt_lr": 0.1,
    "prox_lr": 0.1,
    "objective": {"kind": "Moreau", "strength": 1.0, "prox_lr": 0.1, "num_prox_steps": 2},
}


def entry_of(recipe, **options):
    parameters = RECIPES.parameters({"kind": recipe}, "x")
    needed = {name: NEEDED[name] for name, one in parameters.items() if one.default is one.empty and name in NEEDED}
    if "num_personal_steps" in parameters:
        needed["num_personal_steps"] = 1
    return AlgorithmSection(recipe, {"lr": 0.1, "num_steps": 1} | needed | options)


@pytest.mark.parametrize("recipe", RECIPES.kinds)
def test_each_recipe_states_what_is_tuned_by_default(recipe):
    entry = entry_of(recipe)
    search = search_of(TuneSection(search="grid"), "A", entry, KEY)
    assert search.ranges.keys() == DEFAULTS[recipe]
    own = values_of(entry, "A", list(search.ranges))
    assert search.choices[0] == own and len(search.choices) == search.num_combinations >= 3
    for options in search.choices:  # every combination makes an algorithm
        make_training("A", with_options("A", AlgorithmSection(recipe, entry.options, {"A": {}}), options))


def test_the_step_size_of_personal_steps_is_tuned_if_it_is_given():
    entry = entry_of("fedrep", num_personal_steps=2, personal_lr=0.3)
    assert search_of(TuneSection(), "A", entry, KEY).ranges["personal_lr"].values == (0.1, 0.3, 0.9)


def test_numbers_are_tried_a_factor_apart_and_shares_between_their_ends():
    ranges = lambda **options: search_of(TuneSection(), "A", entry_of("apfl", **options), KEY).ranges
    assert ranges(lr=0.3)["lr"].values == (0.1, 0.3, 0.9)
    assert ranges(mix=0.01)["mix"].values == (0.01, 0.25, 0.5, 0.75)
    assert ranges(mix=0.5)["mix"].values == (0.25, 0.5, 0.75)
    decay = {"kind": "Decay", "initial": 0.1, "rate": 0.01}
    search = search_of(TuneSection(), "A", entry_of("fedavg", lr=decay), KEY)
    assert search.ranges["lr.initial"].values == (0.0333, 0.1, 0.3) and "lr" not in search.ranges
    made = make_training("A", with_options("A", entry_of("fedavg", lr=decay), {"lr.initial": 0.3}))
    assert made.algorithm.local.lr == px.step_sizes.Decay(0.3, 0.01)


def test_a_random_search_tries_different_combinations_of_a_large_grid():
    entry = entry_of("pfedme")
    search = lambda section, seed=0: search_of(section, "A", entry, jax.random.key(seed))
    found = search(TuneSection())
    assert (found.how, found.num_combinations, len(found.choices)) == ("random", 27, 12)
    texts = [str(options) for options in found.choices]
    assert len(set(texts)) == 12 and found.choices[0] == {"lr": 0.1, "strength": 1.0, "prox_lr": 0.1}
    assert search(TuneSection()) == found != search(TuneSection(), 1)
    assert len(search(TuneSection(search="grid")).choices) == len(search(TuneSection(num_trials=27)).choices) == 27
    few = search(TuneSection(search="random", options={"lr": [0.1, 0.2, 0.3]}, num_trials=2))
    assert few.how == "random" and len({options["lr"] for options in few.choices}) == 2


def test_a_search_is_extended_beyond_each_edge_that_is_best():
    search = search_of(TuneSection(), "A", entry_of("apfl", mix=0.5), KEY)
    assert search.extended({"lr": 0.1, "mix": 0.5}).choices == []
    assert search.extended({"lr": 0.3, "mix": 0.5}).choices == [{"lr": 0.9, "mix": 0.5}]
    both = search.extended({"lr": 0.0333, "mix": 0.75})
    assert both.choices == [{"lr": 0.0333, "mix": 0.9}, {"lr": 0.0111, "mix": 0.75}, {"lr": 0.0111, "mix": 0.9}]
    assert both.ranges["lr"].values == (0.0333, 0.1, 0.3, 0.0111)
    given = search_of(TuneSection(options={"lr": [0.1, 0.2]}), "A", entry_of("fedavg"), KEY)
    assert given.extended({"lr": 0.2}).choices == []


def with_tune(config, **section):
    return dataclasses.replace(config, tune=TuneSection(**section))


def test_the_search_is_extended_until_the_best_is_inside_or_a_warning_is_printed(data):
    config, told = config_of(data, {}, lr=1e-4), []
    (short,) = tune(with_tune(config, num_extensions=0), told.append)[1].algorithms
    assert short.chosen["lr"] == 3e-4 and len(short.trials) == 3
    assert short.warnings == [
        "A: the best `lr`, 0.0003, is the largest value tried. A larger one may be better: add some to `[tune]`."
    ]
    assert told[-1] == f"Warning: {short.warnings[0]}"
    (longer,) = tune(with_tune(config, num_extensions=9))[1].algorithms
    assert [trial.options["lr"] for trial in longer.trials[:5]] == [1e-4, 3.33e-5, 3e-4, 9e-4, 2.7e-3]
    assert longer.of(longer.chosen).loss < short.of(short.chosen).loss and longer.warnings == []


def test_a_recipe_that_diverges_everywhere_is_tried_with_smaller_numbers(data):
    config = config_of(data, {}, lr=HUGE / 4)
    (tuned,) = tune(with_tune(config, num_extensions=0))[1].algorithms
    assert tuned.chosen == tuned.before == {"lr": HUGE / 4} and len(tuned.trials) == 3
    (tuned,) = tune(with_tune(config, num_extensions=3))[1].algorithms
    assert tuned.chosen["lr"] < HUGE / 12 and tuned.of(tuned.chosen).score is not None and tuned.metric == "accuracy"


def test_the_validation_split_has_a_seed_which_is_recorded(data):
    config = config_of(data, {"lr": [0.1, 0.5]})
    other = dataclasses.replace(config, tune=dataclasses.replace(config.tune, seed=3))
    one, two = tune(config)[1], tune(other)[1]
    assert (one.seed, two.seed, one.share, one.seeds) == (0, 3, 0.2, [0, 1])
    assert one.algorithms[0].trials != two.algorithms[0].trials
    moved = dataclasses.replace(config, split=dataclasses.replace(config.split, seed=3))
    assert tune(moved)[1].seed == 3


def test_a_sweep_is_one_program_in_pieces_that_fit_into_memory(data, monkeypatch):
    plan, calls = build(config_of(data, {})), []
    algorithms = [px.fedavg(lr=lr, num_steps=2, batch_size=4) for lr in (0.1, 0.2, 0.3)]
    schedules = lambda algorithm: [px.rounds(NUM_CLIENTS, 3, 2, key=key) for key in plan.keys]
    real = tuning.simulate
    monkeypatch.setattr(tuning, "simulate", lambda *given, **more: calls.append(given[0]) or real(*given, **more))
    run = partial(run_all, algorithms, plan.task, plan.federation, schedules, plan.keys)
    together = run()
    assert [len(swept) for swept in calls] == [3 * len(plan.keys)]
    monkeypatch.setattr(tuning, "MOST_BYTES", 1)
    for one, apart in zip(together, run(), strict=True):
        assert_close(one.params, apart.params)
    assert len(calls) == 4


def test_options_in_tables_are_tuned_by_dotted_names(data):
    table = {"tune": {"objective": {"strength": [0.5, 2.0]}, "server.lr": [0.1]}, "algorithms": {"A": {"recipe": "x"}}}
    assert parse(table).tune.options == {"objective.strength": [0.5, 2.0], "server.lr": [0.1]}
    server = {"kind": "asynchronous", "lr": 0.2}
    entry = entry_of("persafl", server=server)
    assert has_option("A", entry, "objective.strength") and has_option("A", entry, "server.lr")
    assert not has_option("A", entry, "objective.mix") and not has_option("A", entry_of("fedavg"), "server.lr")
    search = search_of(parse(table).tune, "A", entry, KEY)
    assert search.choices == [{"objective.strength": value, "server.lr": 0.1} for value in (0.5, 2.0)]
    changed = with_options("A", entry, search.choices[0]).options
    assert changed["objective"]["strength"] == 0.5 and changed["server"] == {**server, "lr": 0.1}


def test_a_recipe_that_states_nothing_cannot_be_tuned_without_lists(data):
    config = config_of(data, {})
    recipe = {"kind": "import", "path": "tests.experiment.test_tuning:plain"}
    entries = {"A": AlgorithmSection(recipe, {"lr": 0.1}, {"A": {"model": "global"}})}
    with refused("There is nothing to tune: the recipes do not declare any options to vary. Add lists to `[tune]`"):
        tune(dataclasses.replace(config, algorithms=entries))
    both = {**config.algorithms, "B": dataclasses.replace(entries["A"], scores={"B": {"model": "global"}})}
    chosen, found = tune(dataclasses.replace(config, algorithms=both))
    assert [one.algorithm for one in found.algorithms] == ["A"] and chosen.algorithms["B"] == both["B"]


def plain(lr: float) -> px.Algorithm:
    return px.fedavg(lr=lr, num_steps=1)
