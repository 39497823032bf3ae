"""The experiments against a table of the papers' settings that was written from the papers' text: settings.toml."""

import functools
import importlib
import tomllib
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax as px
from personax.reproduce import EXPERIMENTS, persafl
from personax.typing import Batch

TABLE = tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))
OWN = (
    *("adapt_lr", "num_adapt_steps", "curvature_on", "strength", "num_prox_steps", "prox_lr", "mix", "update_mix"),
    *("option", "local_lr", "adaptive"),
)
SCORED = ("scored_model", "scored_steps", "scored_lr", "score_on", "adapt_on", "scored_clients")
MEANS = {"mnist": 0.1307, "cifar10": (0.4914, 0.4822, 0.4465)}  # the usual constants of torchvision's examples
IMAGES = {"mnist": (1, 28, 28), "cifar10": (1, 32, 32, 3)}
ACTIVATIONS = {"elu": np.expm1(-1.0), "relu": 0.0, "tanh": np.tanh(-1.0), "elu of 0.2": 0.2 * np.expm1(-1.0)}

pytestmark = pytest.mark.xdist_group("reproduce")


def settings_of(name):
    """The tables of an experiment, over those of the one that it is like."""
    own = TABLE[name]
    base = settings_of(own["like"]) if "like" in own else {}
    kinds = ("all", "first", "second", "row", "column", "cell", "paper", "data")
    merged = {kind: merge(base.get(kind, {}), own.get(kind, {})) for kind in kinds}
    if "paper" in own:
        merged["paper"] = own["paper"]
    return merged | {"skip": base.get("skip", []) + own.get("skip", [])}


def merge(base, own):
    """Both tables, the own one first; printed numbers are not taken over where there are own ones."""
    deeper = lambda key: isinstance(base.get(key), dict) and key in own and key != "paper"
    return {key: merge(base[key], own[key]) if deeper(key) else value for key, value in {**base, **own}.items()}


def of_row(tables, row):
    """The entries of the tables whose names begin the row's; the longer name first."""
    found = {}
    for name in sorted(tables, key=len):
        if row == name or row.startswith((f"{name},", f"{name};", f"{name}:")):
            found |= tables[name]
    return found


def of_algorithm(algorithm):
    objective = getattr(algorithm.objective, "mixture", algorithm.objective)
    local, lr = algorithm.local, algorithm.local.lr
    found = {
        "objective": type(objective).__name__,
        "asynchronous": not algorithm.server.is_synchronous,
        "server_lr": float(algorithm.server.lr),
        "lr": float(lr.initial if callable(lr) else lr),
        "decay_rate": float(getattr(lr, "rate", 0.0)),
        "decay": type(lr).__name__ if callable(lr) else "none",
        **{name: getattr(lr, name) for name in ("clock", "divisor", "steps_per_epoch") if hasattr(lr, name)},
        **{name: getattr(local, name) for name in ("num_steps", "num_epochs", "batch_size", "query_share")},
        **{name: getattr(objective, name) for name in OWN if hasattr(objective, name)},
    }
    if hasattr(objective, "hvp"):
        found["curvature"] = type(objective.hvp).__name__
    return found


@functools.cache
def of_network(task, shape, images):
    """The hidden layers, and the activation: the output where the last hidden layer sees -1 and is added up."""
    start = jax.eval_shape(task.model.init, jax.random.key(0), jax.ShapeDtypeStruct(shape, jnp.float32))
    dense = sorted(name for name in start if name.startswith("dense"))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), start)
    found = {
        "widths": [start[name]["kernel"].shape[1] for name in dense[:-1]],
        "convolutions": sum(name.startswith("conv") for name in start),
        "channels": [start[name]["kernel"].shape[-1] for name in sorted(start) if name.startswith("conv")],
        **of_loss(task, shape, params),
        **of_start(task, shape, dense[0]),
    }
    last = params[dense[-1]]
    if "bias" in last:  # the output where the last layer gives -1
        lowered = {**params, dense[-1]: {**last, "bias": -jnp.ones_like(last["bias"])}}
        value = float(task.model.apply(lowered, jnp.zeros(shape))[0, 0])
        found["output"] = next(name for name, at in (ACTIVATIONS | {"linear": -1.0}).items() if abs(at - value) < 1e-5)
    if "scale" not in start[dense[0]]:  # batch normalization undoes a scaling of the inputs
        found["standardized"] = is_standardized(task, shape, images)
    if len(dense) > 1:
        found["dropout"] = dropout_of(task, shape, params, dense)
    if len(dense) > 1 and "scale" not in start[dense[0]]:
        last = start[dense[-1]]["kernel"].shape
        params[dense[-2]]["bias"] = -jnp.ones(last[0])
        params[dense[-1]]["kernel"] = -jnp.ones(last)
        value = -float(task.model.apply(params, jnp.zeros(shape))[0, 0]) / last[0]
        found["activation"] = next(name for name, at in ACTIVATIONS.items() if abs(at - value) < 1e-5)
    return found


def of_loss(task, shape, zeros):
    """The loss where all outputs are 0, and the factor of half the squared parameters."""
    batch = Batch(jnp.zeros(shape), jnp.zeros(1, jnp.int32), jnp.ones(1), jax.random.key(0))
    equal = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1), zeros)  # so that all outputs are equal
    at_zero, at_equal = float(task.loss(zeros, batch)), float(task.loss(equal, batch))
    if at_zero == pytest.approx(0.5):
        return {"loss": "squared error"}
    assert any(at_zero == pytest.approx(np.log(num)) for num in (2, 10))
    squares = sum(0.01 * leaf.size for leaf in jax.tree.leaves(zeros))
    return {"loss": "cross entropy", "l2": round(2 * (at_equal - at_zero) / squares, 6)}


def of_start(task, shape, first):
    """The initialization, by the deviation of the first dense kernel and the largest of its biases."""
    layer = task.model.init(jax.random.key(0), jnp.zeros(shape))[first]
    num_in, num_out = layer["kernel"].shape
    spread, bias, bound = float(layer["kernel"].std()), float(abs(layer["bias"]).max()), num_in**-0.5
    known = {
        "glorot": np.sqrt(2 / (num_in + num_out)) if bias == 0 else None,
        "fan_in": bound / np.sqrt(3) if 0 < bias <= bound else None,
        "cited": np.sqrt(2 / num_in) if bias > bound else None,
    }
    return {"init": next(name for name, one in known.items() if one is not None and abs(spread / one - 1) < 0.1)}


def is_standardized(task, shape, images):
    """True if the network sees the mean color as 0. Its output without biases is then 0 as well."""
    params = task.model.init(jax.random.key(0), jnp.zeros(shape))
    params = {name: {**one, "bias": jnp.zeros_like(one["bias"])} for name, one in params.items()}
    outputs = task.model.apply(params, jnp.broadcast_to(jnp.asarray(MEANS.get(images, 0.5)), shape))
    return bool(abs(outputs).max() < 1e-5)


def dropout_of(task, shape, zeros, dense):
    """The share p of units dropped in training: of h units of 1 / (1 - p), h p (1 - p) / (1 - p)^2 is the variance."""
    before, last = zeros[dense[-2]], zeros[dense[-1]]
    ones = {name: jnp.ones_like(leaf) if name in ("bias", "shift") else leaf for name, leaf in before.items()}
    params = {**zeros, dense[-2]: ones, dense[-1]: {**last, "kernel": jnp.ones_like(last["kernel"])}}
    level = float(task.model.apply(params, jnp.zeros(shape))[0, 0])  # of all units, after the activation
    if float(task.model.apply(params, jnp.zeros(shape), jax.random.key(1))[0, 0]) == level:
        return 0.0
    x = jnp.zeros((400 if "conv_0" in zeros else 4000, *shape[1:]))
    outputs = np.asarray(task.model.apply(params, x, jax.random.key(1))[:, 0]) * last["kernel"].shape[0] / level
    odds = outputs.var() / last["kernel"].shape[0]
    return round(20 * float(odds / (1 + odds))) / 20


def of_schedule(schedule):
    num_rounds = int(schedule.round_ends.sum())
    staleness = np.arange(schedule.num_events) - schedule.started_at
    delayed = {"staleness": round(float(staleness.mean())), "largest_staleness": int(staleness.max())}
    found = {"clients": schedule.num_clients, **({} if num_rounds else delayed)}
    return found | ({"rounds": num_rounds, "cohort": schedule.num_events // num_rounds} if num_rounds else {})


def facts_of(experiment, training):
    """All facts of a training; those that candidates differ in are lists."""
    given = training.algorithm
    candidates = [given] if isinstance(given, px.Algorithm) else list(given.values())
    columns = [of_algorithm(one) for one in candidates]
    assert len({tuple(sorted(one)) for one in columns}) == 1
    found = {name: sorted({one[name] for one in columns}, key=str) for name in columns[0]}
    images = experiment.needs[-1] if experiment.needs else ""
    images = training.data if training.data in IMAGES else "cifar10" if training.data == "different" else images
    shape = IMAGES.get(images, (1, 28, 28))
    schedule = of_schedule(training.schedule(key=jax.random.key(0)))
    rest = {**of_network(training.task, shape, images), **schedule, "data": training.data}
    return found | {name: [value] for name, value in rest.items()}


def of_scoring(one):
    steps = {"scored_steps": one.num_steps, "scored_lr": one.lr, "adapt_on": one.adapt_on}
    plain = {"scored_model": one.model, "score_on": one.score_on, "scored_clients": one.clients}
    return plain | (steps if one.model in ("adapted", "recomputed") else {})


def same(found, expected):
    if isinstance(expected, float):
        return found == pytest.approx(expected)
    return found == expected


def scored_as(cell):
    return [one for one in cell.scorings.values() if isinstance(one, px.Scoring)]


def test_every_experiment_has_a_table():
    assert set(TABLE) == set(EXPERIMENTS)
    for name, own in TABLE.items():
        assert own["readings"] == [one.name for one in EXPERIMENTS[name](False).readings], name
        tables = [table for kind in ("row", "column", "data") for table in own.get(kind, {}).values()]
        tables += [own[kind] for kind in ("all", "first", "second", "paper") if kind in own]
        tables += [table for row in own.get("cell", {}).values() for table in row.values()]
        assert all(table["where"] for table in tables), name
        wanted = {one.column for one in EXPERIMENTS[name](False).cells}
        assert set(own.get("column", {})) <= wanted, name


@pytest.mark.parametrize("name", TABLE)
def test_trainings_are_those_of_the_paper(name):
    experiment, table = EXPERIMENTS[name](False), settings_of(name)
    for training in experiment.trainings:
        facts = facts_of(experiment, training)
        for cell in training.cells:
            if cell.is_baseline or cell.metric == "active_share":
                continue
            column, row = table["column"].get(cell.column, {}), of_row(table["row"], cell.row)
            inherited = {**table["all"], **row, **column}
            own = of_row(table["cell"], cell.row).get(cell.column, {})
            expected = {key: value for key, value in inherited.items() if key not in table["skip"]} | own
            for key, value in expected.items():
                if key in ("where", "paper", *SCORED):
                    continue
                place = f"{name}, {cell.row}, {cell.column}: {key}"
                if key not in facts:  # an entry for all columns need not be one of each
                    assert key not in column and key not in own, place
                elif isinstance(value, list) and key not in ("widths", "channels"):
                    exact = key in column or key in row or key in own
                    assert set(facts[key]) == set(value) if exact else set(facts[key]) <= set(value), place
                else:
                    assert len(facts[key]) == 1 and same(facts[key][0], value), f"{place} is {facts[key]}, not {value}"


@pytest.mark.parametrize("name", TABLE)
def test_models_are_scored_as_in_the_paper(name):
    experiment, table = EXPERIMENTS[name](False), settings_of(name)
    for cell in experiment.cells:
        if cell.is_baseline and cell.column != "untrained":
            continue
        column, row = table["column"].get(cell.column, {}), of_row(table["row"], cell.row)
        expected = {key: value for key, value in {**table["all"], **row, **column}.items() if key in SCORED}
        for at, scoring in enumerate(scored_as(cell)):
            facts = of_scoring(scoring)
            wanted = expected | table["first" if at == 0 else "second"] if at < 2 else expected
            for key, value in wanted.items():
                later = key == "scored_model" and (at > 0 or cell.is_baseline)
                if (
                    key in table["skip"]
                    or key not in facts
                    or later
                    or (cell.is_baseline and key in ("score_on", "scored_clients"))
                ):
                    continue
                other = name.startswith("apfl") and cell.column == "perFedAvg" and key == "scored_steps"
                assert other or same(facts[key], value), f"{name}, {cell.row}, {cell.column}: {key} is {facts[key]}"


@pytest.mark.parametrize("name", TABLE)
def test_the_papers_numbers_are_quoted_as_printed(name):
    experiment, table = EXPERIMENTS[name](False), settings_of(name)
    quoted = 0
    for cell in experiment.cells:
        row = of_row(table["row"], cell.row).get("paper", {}) if cell.metric == "accuracy" else {}
        of_column = table["paper"].get(cell.column, {})
        expected = row.get(cell.column) or (of_column.get(cell.metric) if of_column else None)
        assert (None if cell.paper is None else list(cell.paper)) == expected, f"{cell.row}, {cell.column}"
        quoted += expected is not None
    stated = "paper" in TABLE[name] or any("paper" in row for row in TABLE[name].get("row", {}).values())
    assert quoted > 0 or not stated


def test_uploads_of_persafl_take_4_to_6_times_as_long_as_downloads():
    """Section 5: "the average upload delay is 4 to 6 times higher than the average download delay"."""
    delays = persafl.bounded_delays(500, key=jax.random.key(0))
    ratios = np.asarray(delays.upload.mean) / np.asarray(delays.download.mean)
    assert 4 <= ratios.min() < 4.1 and 5.9 < ratios.max() <= 6
    assert delays.upload.spread == delays.download.spread == 0.5


def fake_arrays(source):
    """Labels as many as there are, images of a single pixel."""
    num, num_test = len_of(source, "x"), len_of(source, "test_x")
    labels = lambda count: np.random.default_rng(0).permutation(np.arange(count) % 10).astype(np.uint8)
    image = lambda count: np.zeros((count, 1, 1), np.uint8)
    return {"x": image(num), "y": labels(num), "test_x": image(num_test), "test_y": labels(num_test)}


def len_of(source, name):
    return source.arrays[name].shape[0]


def histograms(labels, offsets):
    return np.stack([np.bincount(labels[a:b], minlength=10) for a, b in pairwise(offsets)])


@pytest.mark.parametrize("name, data", [(name, data) for name in TABLE for data in settings_of(name)["data"]])
def test_splits_are_those_of_the_paper(name, data, monkeypatch):
    monkeypatch.setattr(importlib.import_module("personax.data.datasets.fetch"), "load", fake_arrays)
    experiment, expected = EXPERIMENTS[name](False), settings_of(name)["data"][data]
    if data not in experiment.federations:
        assert data not in TABLE[name].get("data", {})
        return
    federation = experiment.federations[data]()
    counts = histograms(federation.y, federation.offsets)
    if "each" in expected:
        halves = np.split(counts, 2)
        assert (halves[0] == np.r_[[expected["each"]] * 5, [0] * 5]).all()
        first, others = halves[1][:, :5], halves[1][:, 5:]
        assert (np.sort(first, axis=1) == [0, 0, 0, 0, expected["half"]]).all()
        assert (np.sort(others, axis=1) == [0, 0, 0, 0, expected["double"]]).all()
    if "classes" in expected:
        assert set((counts > 0).sum(axis=1)) == {expected["classes"]}
    if "train" in expected:
        assert set(federation.counts) == {expected["train"]} and set(federation.test_counts) == {expected["test"]}
    if "origin" in expected:
        assert expected["origin"] in federation.origin
    if "newcomers" in expected:
        assert (federation.num_clients, federation.newcomers.num_clients) == (97, expected["newcomers"])
    if "pairs" in expected:
        assert {tuple(np.flatnonzero(one)) for one in counts} == {(k, k + 5) for k in range(5)}
