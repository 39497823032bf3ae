"""The experiments against a table of the papers' settings that was written from the papers' text: settings.toml."""

import importlib
import tomllib
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax as px
from personax.reproduce import EXPERIMENTS

TABLE = tomllib.loads(Path(__file__).with_name("settings.toml").read_text(encoding="utf-8"))
OWN = ("adapt_lr", "num_adapt_steps", "curvature_on", "strength", "num_prox_steps", "mix", "update_mix", "option")
SCORED = ("scored_model", "scored_steps", "scored_lr", "score_on", "adapt_on")
IMAGES = {"mnist": (1, 28, 28), "cifar10": (1, 32, 32, 3)}
ACTIVATIONS = {"elu": np.expm1(-1.0), "relu": 0.0, "tanh": np.tanh(-1.0), "elu of 0.2": 0.2 * np.expm1(-1.0)}

pytestmark = pytest.mark.xdist_group("reproduce")


def settings_of(name):
    """The tables of an experiment, over those of the one that it is like."""
    own = TABLE[name]
    base = settings_of(own["like"]) if "like" in own else {}
    kinds = ("all", "first", "row", "column", "paper", "data")
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
        **{name: getattr(local, name) for name in ("num_steps", "num_epochs", "batch_size", "query_share")},
        **{name: getattr(objective, name) for name in OWN if hasattr(objective, name)},
    }
    if hasattr(objective, "hvp"):
        found["curvature"] = type(objective.hvp).__name__
    return found


def of_network(task, shape):
    """The hidden layers, and the activation: the output where the last hidden layer sees -1 and is added up."""
    start = jax.eval_shape(task.model.init, jax.random.key(0), jax.ShapeDtypeStruct(shape, jnp.float32))
    dense = sorted(name for name in start if name.startswith("dense"))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), start)
    found = {
        "widths": [start[name]["kernel"].shape[1] for name in dense[:-1]],
        "convolutions": sum(name.startswith("conv") for name in start),
    }
    if len(dense) > 1 and "scale" not in start[dense[0]]:
        last = start[dense[-1]]["kernel"].shape
        params[dense[-2]]["bias"] = -jnp.ones(last[0])
        params[dense[-1]]["kernel"] = -jnp.ones(last)
        value = -float(task.model.apply(params, jnp.zeros(shape))[0, 0]) / last[0]
        found["activation"] = next(name for name, at in ACTIVATIONS.items() if abs(at - value) < 1e-5)
    return found


def of_schedule(schedule):
    num_rounds = int(schedule.round_ends.sum())
    found = {"clients": schedule.num_clients}
    return found | ({"rounds": num_rounds, "cohort": schedule.num_events // num_rounds} if num_rounds else {})


def facts_of(experiment, training):
    """All facts of a training; those that candidates differ in are lists."""
    given = training.algorithm
    candidates = [given] if isinstance(given, px.Algorithm) else list(given.values())
    columns = [of_algorithm(one) for one in candidates]
    assert len({tuple(sorted(one)) for one in columns}) == 1
    found = {name: sorted({one[name] for one in columns}, key=str) for name in columns[0]}
    shape = IMAGES[experiment.needs[-1]] if experiment.needs else (1, 28, 28)
    if training.data in IMAGES:
        shape = IMAGES[training.data]
    elif training.data == "different":
        shape = IMAGES["cifar10"]
    schedule = of_schedule(training.schedule(key=jax.random.key(0)))
    rest = {**of_network(training.task, shape), **schedule, "data": training.data}
    return found | {name: [value] for name, value in rest.items()}


def of_scoring(one):
    steps = {"scored_steps": one.num_steps, "scored_lr": one.lr, "adapt_on": one.adapt_on}
    return {"scored_model": one.model, "score_on": one.score_on, **(steps if one.model == "adapted" else {})}


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
        tables += [own[kind] for kind in ("all", "first", "paper") if kind in own]
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
            expected = {key: value for key, value in {**table["all"], **row, **column}.items() if key not in SCORED}
            for key, value in expected.items():
                if key in ("where", "paper") or key in table["skip"]:
                    continue
                place = f"{name}, {cell.row}, {cell.column}: {key}"
                if key not in facts:  # an entry for all columns need not be one of each
                    assert key not in column, place
                elif isinstance(value, list) and key != "widths":
                    exact = key in column or key in row
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
            wanted = expected | (table["first"] if at == 0 else {})
            for key, value in wanted.items():
                later = key == "scored_model" and (at > 0 or cell.is_baseline)
                if key in table["skip"] or key not in facts or later or (cell.is_baseline and key == "score_on"):
                    continue
                if scoring.model != "adapted" and key in ("scored_steps", "scored_lr"):
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
