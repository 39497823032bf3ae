"""Inspection: what is measured is what theory measures, limits follow from it, and the advice runs."""

import dataclasses
import tomllib

import numpy as np
import pytest
from typer.testing import CliRunner

import personax as px
from personax import theory
from personax.cli import app
from personax.experiment.build import build, make_schedules, resolve
from personax.experiment.config import ConfigError, dump, parse
from personax.inspection import INSPECTION, Effort, inspect_federation, measure
from personax.inspection.advice import advise, limits_of, starter_name
from personax.inspection.measure import MIXES, measure_federation
from personax.inspection.validation import Contender, Setting, choose, standardized
from personax.simulation.results import NonFiniteUpdate

pytestmark = pytest.mark.xdist_group("inspection")


def tables(spreads=(0.5, 0.5), seed=0, num_clients=8, num_rounds=30, **changes):
    """A small synthetic federation for logistic regression."""
    data = {"kind": "synthetic", "model_spread": spreads[0], "input_spread": spreads[1], "num_clients": num_clients}
    return {
        "seeds": [0],
        "data": data | {"num_samples": 50, "num_features": 6},
        "split": {"seed": seed},
        "model": {"kind": "logistic_regression"},
        "task": {"l2": 0.01},
        "schedule": {"num_rounds": num_rounds, "cohort_size": 5},
        "algorithms": {"FedAvg": {"recipe": "fedavg", "lr": 0.1, "num_steps": 3, "batch_size": 8}},
    } | changes


def resolved(**changes):
    return resolve(parse(tables(**changes)), baselines=False)


@pytest.fixture(scope="module")
def found():
    return inspect_federation(resolved(), Effort(6, 20))


def test_measurements_are_reported(found):
    measured = found.measured
    assert (len(measured.clients), measured.num_clients, measured.num_samples) == (6, 8, 20)
    assert (measured.num_steps, measured.num_updates) == (3, 150)
    assert "a path of 4 models of FedAvg, 60 rounds" in measured.region
    assert measured.adapt_lr == pytest.approx(0.5 / measured.of("smoothness"))
    assert {one.name for one in measured.constants} == {field.name for field in dataclasses.fields(theory.Constants)}
    assert INSPECTION.validate_json(INSPECTION.dump_json(found)) == found


def test_models_with_batch_normalization_are_refused():
    model = {"kind": "mlp", "widths": [4], "norm": "batch"}
    with pytest.raises(ConfigError, match="inspect with a model without it"):
        inspect_federation(resolved(model=model), Effort(2, 4))


def test_the_constants_are_those_of_the_path(found):
    """Logistic regression with an l2 penalty is at least that convex and at most as smooth as its inputs are long."""
    config = resolved()
    federation = build(config).federation
    longest = (np.square(federation.x).sum(axis=1) + 1).max()  # the bias is a feature of 1
    assert 0.01 < found.measured.of("smoothness") <= longest / 2 + 0.01
    assert found.measured.of("gradient_spread") > 0
    first_order, free = found.measured.estimators
    assert 1e-4 < free.relative_bias * 100 < first_order.relative_bias * 100 and first_order.relative_bias < 2


def test_mixtures_end_at_the_shared_model_and_at_ones_own(found):
    for client in found.measured.clients:
        assert client.mix in MIXES and set(client.losses) == {"shared", "adapted", "mixed", "alone"}
        at_ends = {0.0: "shared", 1.0: "alone"}
        if client.mix in at_ends:
            assert client.losses[at_ends[client.mix]] <= min(client.losses["shared"], client.losses["alone"])
    total = lambda name: sum(client.losses[name] for client in found.measured.clients)
    assert total("mixed") <= min(total("shared"), total("alone")) + 1e-6


def test_limits_follow_from_the_constants(found):
    limits = {limit.setting: limit.value for limit in limits_of(found.measured)}
    steepest = found.measured.of("smoothness")
    constants = theory.Constants(**{one.name: one.value for one in found.measured.constants})
    meta = theory.gmeta.meta_smoothness(constants, found.measured.adapt_lr, 1)
    assert limits["adapt_lr"] == pytest.approx(1 / steepest)
    assert limits["lr"] == pytest.approx(1 / (10 * 3 * meta))
    assert limits["strength, smooth"] == pytest.approx(2 * steepest)
    assert limits["strength, PersA-FL-ME"] == pytest.approx(7 * steepest)
    many = dataclasses.replace(found.measured, num_updates=10**9)
    assert limits_of(many)[-1].value > limits["staleness"]


def test_unusable_limits_are_explained_in_sentences(found):
    """A staleness of -1, and steps with which the model would not move in the whole run."""
    constants = [
        dataclasses.replace(
            one, value={"smoothness": 2.0, "hessian_lipschitz": 0.5, "gradient_bound": 1.0}.get(one.name, 1.0)
        )
        for one in found.measured.constants
    ]
    few = dataclasses.replace(found.measured, constants=constants, num_rounds=10, num_updates=50)
    hidden = {limit.setting: limit for limit in limits_of(few) if limit.problem}
    assert hidden.keys() == {"lr", "staleness"} and hidden["staleness"].value == -1
    assert hidden["lr"].value * 2.0 * few.num_steps * few.num_rounds < 1
    assert hidden["lr"].problem == f"with steps of {hidden['lr'].value:.1g}, the model would hardly change in 10 rounds"
    assert "updates even without delays" in hidden["staleness"].problem
    many = dataclasses.replace(few, num_rounds=10**6, num_updates=10**9)
    assert not any(limit.problem for limit in limits_of(many))
    assert not {"lr", "staleness"} & {limit.setting for limit in found.limits}
    assert [text.split("`")[1] for text in found.unusable] == ["lr", "staleness"]


def test_columns_are_standardized_before_they_are_measured(tmp_path):
    """Scales do not matter: constants, losses and advice are those of columns that were standardized by hand."""
    rng = np.random.default_rng(0)
    rows = [
        (f"c{client}", x, (x.sum() + 0.5 * client > 1).astype(int))
        for client in range(6)
        for x in rng.normal(size=(20, 2))
    ]
    found = []
    for name, scale in (("plain", np.ones(2)), ("scaled", np.array([1.0, 1e4]))):
        path = tmp_path / f"{name}.csv"
        lines = [f"{who},{x[0] * scale[0]!r},{x[1] * scale[1] + scale[1]!r},{y}" for who, x, y in rows]
        path.write_text(
            "\n".join(["who,a,b,label", *lines]).replace("np.float64(", "").replace(")", ""), encoding="utf-8"
        )
        data = {"kind": "file", "path": str(path), "client": "who", "standardize": name == "plain"}
        given = Setting(config := resolved(data=data), build(config))
        scaled = standardized(given)
        assert (scaled is given) == (name == "plain") and scaled.config.data.standardize
        found.append(measure_federation(*scaled, Effort(4, 10)))
    one, other = found
    assert one.standardized and other.standardized
    assert one.of("smoothness") == pytest.approx(other.of("smoothness"), rel=1e-3)
    assert tomllib.loads(advise(scaled.config, other).starter)["data"]["standardize"]


def test_what_cannot_run_is_an_error_before_anything_is_measured():
    asynchronous = {"A": {"recipe": "fedasync", "lr": 0.1, "num_steps": 1}}
    with pytest.raises(ConfigError, match="Asynchronous algorithms need delays"):
        inspect_federation(resolved(algorithms=asynchronous), notify=pytest.fail)


def test_a_long_name_has_a_starter():
    config = resolved(name="n" * 80)
    assert parse({"algorithms": {"A": {"recipe": "fedavg"}}, "name": starter_name(config)}).name.endswith("n-starter")


def test_images_and_whole_numbers_are_not_standardized():
    config = resolved(data={"kind": "digits"}, partition={"kind": "iid", "num_clients": 4}, task={})
    given = Setting(config, build(config))
    assert standardized(given) is given


class Scored:
    """The part of an evaluation that `choose` reads."""

    def __init__(self, *of_clients):
        self.metrics = {"accuracy": np.array([of_clients])}

    def of(self, metric):
        return self.metrics[metric]


def contenders(found, **scores):
    advice = lambda name: dataclasses.replace(found.advice, algorithm=name, validation=None)
    return [
        Contender("advice", name, {"lr": 0.1}, of_clients and Scored(*of_clients), advice(name))
        for name, of_clients in scores.items()
    ]


def test_advice_must_beat_the_configuration_by_more_than_the_standard_error(found):
    own = contenders(found, poor=(0.1, 0.2, 0.3), own=(0.5, 0.6, 0.7), lost=None)
    clear = choose(own, contenders(found, a=(0.6, 0.7, 0.9), b=(0.4, 0.7, 0.7)), 30)
    assert clear.algorithm == "a" and "is better by more than" in clear.why[0]
    assert [run.score for run in clear.validation.runs] == pytest.approx([0.2, 0.6, None, 2.2 / 3, 0.6])
    assert (clear.validation.metric, clear.validation.num_rounds, clear.validation.num_seeds) == ("accuracy", 30, 1)
    noisy = choose(own, contenders(found, a=(0.3, 0.6, 0.95)), 30)  # + 0.017, with an error of 0.13
    assert noisy.algorithm == "own" and "Keep your configuration." in noisy.why[0]
    worse = choose(own, contenders(found, a=(0.4, 0.5, 0.6)), 30)
    assert worse.algorithm == "own" and "not better by more than" in worse.why[0]


def test_algorithms_that_diverge_in_short_runs_are_not_advised(found):
    fine, lost = {"fine": (0.5, 0.6)}, {"lost": None}
    assert choose(contenders(found, **fine), contenders(found, **lost), 9).algorithm == "fine"
    won = choose(contenders(found, **lost), contenders(found, **fine), 9)
    assert won.algorithm == "fine" and "your configuration diverged" in won.why[0]
    nothing = choose(contenders(found, **lost), contenders(found, **lost), 9)
    assert nothing.validation is None and "All short runs diverged" in nothing.sure[0]


def test_the_advice_was_run_and_its_starter_is_the_same_configuration(found):
    runs = found.advice.validation.runs
    assert [run.source for run in runs][:4] == ["your configuration", "advice", "advice", "advice"]
    assert [run.algorithm for run in runs][-1] == "FedAvg"  # of the configuration with standardized features
    starter = resolve(parse(tomllib.loads(found.advice.starter)), baselines=False)
    advised = starter.algorithms[found.advice.algorithm]
    ran = [run for run in runs if (run.algorithm, run.options) == (found.advice.algorithm, advised.options)]
    best = [run for run in runs if run.score == max(run.score for run in runs)]
    assert advised.recipe == found.advice.recipe and ran and (ran[0] == runs[0] or ran[0] in best)


def with_losses(found, **losses):
    clients = [
        dataclasses.replace(client, losses={name: value + 0.01 * at for name, value in losses.items()})
        for at, client in enumerate(found.measured.clients)
    ]
    return dataclasses.replace(found.measured, clients=clients, mix=0.4)


@pytest.mark.parametrize(
    "losses, recipe, options",
    [
        ({"shared": 0.1, "adapted": 0.2, "mixed": 0.1, "alone": 0.9}, "fedavg", {}),
        ({"shared": 0.5, "adapted": 0.2, "mixed": 0.4, "alone": 0.9}, "per_fedavg", {}),
        ({"shared": 0.5, "adapted": 0.4, "mixed": 0.2, "alone": 0.9}, "apfl", {"mix": 0.4}),
        ({"shared": 0.5, "adapted": 0.4, "mixed": 0.2, "alone": 0.2}, "local_only", {}),
    ],
)
def test_the_advice_is_the_best_on_held_out_data(found, losses, recipe, options):
    measured = with_losses(found, **losses)
    advice = advise(resolved(), measured)
    assert advice.recipe == recipe
    table = tomllib.loads(advice.starter)
    entry = next(one for one in table["algorithms"].values() if one["recipe"] == recipe)
    assert options.items() <= entry.items()
    assert table["local"]["lr"] == pytest.approx(1 / measured.of("smoothness"), rel=0.05)
    assert table["local"]["num_steps"] == 3 and table["local"]["batch_size"] == 8


@pytest.mark.parametrize("bias, hvp", [(0.05, "first_order"), (0.5, None)])
def test_first_order_is_advised_where_its_bias_is_small(found, bias, hvp):
    measured = with_losses(found, shared=0.5, adapted=0.2, mixed=0.4, alone=0.9)
    estimators = [dataclasses.replace(measured.estimators[0], relative_bias=bias), measured.estimators[1]]
    starter = tomllib.loads(advise(resolved(), dataclasses.replace(measured, estimators=estimators)).starter)
    assert starter["algorithms"]["Per-FedAvg"].get("hvp") == hvp


def test_advice_states_its_certainty(found):
    clear = with_losses(found, shared=0.5, adapted=0.2, mixed=0.4, alone=0.9)
    assert advise(resolved(), clear).sure[0].endswith("clear.")
    clients = [
        dataclasses.replace(one, losses={**one.losses, "adapted": 0.2 + (0.5 if at % 2 else 0)})
        for at, one in enumerate(clear.clients)
    ]
    close = advise(resolved(), dataclasses.replace(clear, clients=clients))
    assert "too close to call" in close.sure[0]


def test_a_training_that_diverges_takes_smaller_steps(monkeypatch):
    tried, real = [], measure.simulate

    def unstable(algorithm, *given, **more):
        tried.append(float(algorithm.local.lr))
        if len(tried) == 1:
            raise NonFiniteUpdate("too large")
        return real(algorithm, *given, **more)

    monkeypatch.setattr(measure, "simulate", unstable)
    config = resolved()
    measured = measure_federation(config, build(config), Effort(4, 10))
    assert measured.path_lr == tried[1] == tried[0] / 4


@pytest.mark.slow
def test_clients_with_one_sample_are_passed_over_and_targets_may_be_real(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "mine.csv"
    rows = [("a", *rng.normal(size=2)) for _ in range(2)]  # one of them is for its test
    rows += [(name, *rng.normal(size=2)) for name in "bcd" for _ in range(10)]
    path.write_text("who,x,label\n" + "\n".join(",".join(map(str, row)) for row in rows), encoding="utf-8")
    changes = {"data": {"kind": "file", "path": str(path), "client": "who"}, "task": {}, "split": {}}
    schedule = {"num_rounds": 3, "cohort_size": "all"}
    found = inspect_federation(resolve(parse(tables(schedule=schedule, **changes)), baselines=False)).measured
    assert (len(found.clients), found.num_clients) == (3, 4)
    assert all(client.distance is None for client in found.clients)


def test_the_command_writes_findings_a_page_and_a_starter_that_runs(tmp_path):
    config = tmp_path / "mine.toml"
    config.write_text(dump(parse(tables())), encoding="utf-8")
    run = lambda *words: CliRunner().invoke(app, [str(word) for word in words])
    found = run("inspect", config, "--out", tmp_path / "found", "--clients", 4, "--samples", 10)
    assert found.exit_code == 0, found.output
    assert "Start with" in found.output and "How certain" in found.output
    assert (
        "Short runs: 30 rounds, 1 seed, scored on validation data." in found.output
        and "gives no usable limit for `staleness`" in found.output
    )
    page = (tmp_path / "found" / "report.html").read_text(encoding="utf-8")
    assert "What the theorems allow" in page and "kappa_G" in page and "accuracy on validation data" in page
    again = run("inspect", config, "--out", tmp_path / "found")
    assert again.exit_code != 0 and "already has an inspection" in again.output
    starter = tmp_path / "found" / "starter.toml"
    compared = run("compare", starter, "--set", "schedule.num_rounds=2", "--out", tmp_path / "run")
    assert compared.exit_code == 0, compared.output


RECIPES = ("fedavg", "per_fedavg", "apfl", "local_only")


def accuracy(config, name):
    """The score of one algorithm, 0 where it diverges."""
    plan = build(config)
    training = next(one for one in plan.trainings if one.name == name)
    schedules = make_schedules(config, training.algorithm, plan.federation.num_clients)
    result = px.simulate(training.algorithm, plan.task, plan.federation, schedules, key=plan.keys)
    scoring = list(training.scorings.values())[-1]
    found = px.evaluate(training.algorithm, plan.task, plan.federation, result, scoring, key=plan.keys)
    return float(np.mean(found.mean("accuracy")))


@pytest.mark.slow
def test_the_advice_never_diverges_and_beats_the_median_of_a_random_search():
    """Each time up to the noise of 200 test samples, and clearly on average."""
    rng, ahead = np.random.default_rng(0), []
    for seed in range(20):
        given = {"spreads": rng.uniform(0, 1.5, 2).tolist(), "seed": seed, "num_clients": 20}
        advice = inspect_federation(resolved(**given), Effort(10, 20)).advice
        config = resolve(parse(tomllib.loads(advice.starter)), baselines=False)
        advised = accuracy(config, advice.algorithm)  # an update that is not finite raises
        searched = []
        for _ in range(9):
            recipe, lr = str(rng.choice(RECIPES)), float(10 ** rng.uniform(-3, 0.5))
            adapted = {"scores": {"x": {"model": "adapted", "num_steps": 5, "lr": lr}}}
            options = {
                "fedavg": adapted,
                "per_fedavg": adapted | {"adapt_lr": lr},
                "apfl": {"mix": float(rng.uniform())},
            }
            entry = {"recipe": recipe, "lr": lr, "num_steps": 3, "batch_size": 8, **options.get(recipe, {})}
            try:
                searched.append(accuracy(resolved(**given, algorithms={"x": entry}), "x"))
            except NonFiniteUpdate:
                searched.append(0.0)
        ahead.append(advised - np.median(searched))
    error = np.sqrt(0.25 / 200)  # of an accuracy, at most
    assert min(ahead) > -2 * error and np.mean(ahead) > 2 * error
