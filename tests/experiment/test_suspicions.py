"""Warnings before training about valid data that is likely to be a mistake."""

import json

import numpy as np
import pytest

import personax as px
from personax.data.schema import Schema
from personax.experiment.build import build, resolve
from personax.experiment.checkpoint import read_model
from personax.experiment.config import parse
from personax.experiment.runs import Silent, execute, prepare, start
from personax.experiment.suspicions import suspicions_of
from personax.simulation.checks import check_model
from tests.experiment.test_config import refused

pytestmark = pytest.mark.xdist_group("small runs")
NUM = 40
BASE = {
    "seeds": 1,
    "model": {"kind": "logistic_regression"},
    "schedule": {"num_rounds": 1, "cohort_size": 2},
    "evaluation": {"every": 1},
    "local": {"lr": 0.1, "num_steps": 1, "batch_size": 4},
    "algorithms": {"FedAvg": {"recipe": "fedavg"}},
}
RNG = np.random.default_rng(0)
AGE, INCOME = RNG.normal(0, 1, NUM), RNG.normal(4e4, 1e4, NUM)
SPREAD = np.arange(NUM) * 3
SICK = np.where(AGE > 0, "sick", "fit")
CLIENT = np.repeat(np.arange(4), NUM // 4)


def written(path, **columns):
    rows = zip(*({"client": CLIENT, "label": SICK, **columns}).values(), strict=True)
    path.write_text("\n".join([",".join({"client": 0, "label": 0, **columns}), *(",".join(map(str, r)) for r in rows)]))
    return path


def config_of(path, **sections):
    data = {"kind": "file", "path": str(path), **sections.pop("data", {})}
    return resolve(parse({**BASE, **sections, "data": data}), baselines=False)


def suspected(tmp_path, data=None, task=None, **columns):
    path = written(tmp_path / "t.csv", **columns)
    return suspicions_of(build(config_of(path, data=data or {}, task=task or {})))


def test_ordinary_data_is_not_suspected(tmp_path):
    assert suspected(tmp_path, age=AGE, dose=RNG.uniform(0, 9, NUM), group=CLIENT // 2) == []


def test_unscaled_features_are_named_with_the_remedy(tmp_path):
    (first, second) = suspected(tmp_path, age=AGE, income=INCOME)
    assert "different scales: 'income' about" in first and "and 'age' about" in first
    assert "Set `standardize = true` in `[data]`" in first
    assert "Training may diverge" in second and "the column 'income'" in second
    assert suspected(tmp_path, {"standardize": True}, age=AGE, income=INCOME) == []


def test_constant_and_identifying_columns_are_reported(tmp_path):
    columns = {"age": AGE, "unit": np.full(NUM, 0.1), "row": RNG.permutation(NUM), "site": CLIENT + 0.5}
    for data in ({}, {"standardize": True}):
        constant, rows, clients = suspected(tmp_path, data, **columns)
        assert "same value in every row: 'unit'." in constant and "`exclude`" in constant
        assert "different integer in every row: 'row'." in rows
        assert "differ only between clients: 'site'." in clients
    assert suspected(tmp_path, {"exclude": ["unit", "row", "site"]}, **columns) == []


def test_labels_that_are_likely_a_mistake(tmp_path):
    assert "have the same class, 'fit'" in suspected(tmp_path, age=AGE, label=np.full(NUM, "fit"))[0]
    assert "32 classes for 32 samples" in suspected(tmp_path, age=AGE, label=SPREAD)[0]  # a fifth is for tests


def test_a_gap_in_numbered_labels_of_python_is_reported(tmp_path, monkeypatch):
    (tmp_path / "gaps.py").write_text(
        "import numpy as np, personax as px\n"
        "def data():\n"
        "    x = np.random.default_rng(0).normal(size=(20, 2))\n"
        "    return px.Federation.from_clients([(x, np.arange(20) % 2 * 5 + 3)] * 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = parse({**BASE, "data": {"kind": "import", "path": "gaps:data"}})
    assert "9 classes but only 2 different labels" in suspicions_of(build(resolve(config, baselines=False)))[0]


def test_targets_that_explode_are_named(tmp_path):
    (text,) = suspected(tmp_path, age=AGE, label=100 + AGE / 2)
    assert "in the targets, about 1e+02" in text and "standardize" in text
    assert suspected(tmp_path, {"standardize": True}, age=AGE, label=100 + AGE / 2) == []


class Listening(Silent):
    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


def test_a_run_reports_them_before_training(tmp_path):
    watch, config = Listening(), config_of(written(tmp_path / "t.csv", age=AGE, unit=np.ones(NUM)))
    execute(start(config, tmp_path / "run"), watch)
    assert watch.said == [f"Warning: {text}" for text in prepare(config).suspicions] and len(watch.said) == 1


# Standardization and pools in TOML


def test_a_regression_is_scored_in_original_units(tmp_path):
    """The error is computed from rescaled predictions and the targets of the file."""
    target = np.round(100 + 20 * AGE + RNG.normal(size=NUM), 6)
    path = written(tmp_path / "t.csv", age=AGE, label=target)
    config = config_of(path, data={"standardize": True})
    folder = start(config, tmp_path / "run")
    record = execute(folder)
    federation, (trees, about) = build(config).federation, read_model(folder.model("FedAvg"))
    scaling = Schema.from_dict(json.loads(about["schema"])).target_scaling
    assert scaling == federation.schema.target_scaling == record.federation.schema.target_scaling
    assert np.sqrt(np.mean(np.square(target - 100))) / scaling.deviation[0] == pytest.approx(1, abs=0.3)
    layer, errors = trees["params"]["dense_0"], []
    for i in range(4):
        x, y = federation.client_test(i)
        outputs = (x @ layer["kernel"] + layer["bias"])[:, 0] * scaling.deviation[0] + scaling.mean[0]
        raw = y * scaling.deviation[0] + scaling.mean[0]
        assert all(np.abs(target - one).min() < 1e-4 for one in raw)
        errors.append(np.mean(np.square(outputs - raw)))
    assert record.algorithms[0].scores[0].evaluations[-1].mean["error"][0] == pytest.approx(np.mean(errors), rel=1e-4)


def test_what_cannot_be_standardized_is_rejected(tmp_path):
    config = resolve(parse({**BASE, "partition": {"kind": "iid", "num_clients": 4}}), baselines=False)
    table = {**BASE, "partition": {"kind": "iid", "num_clients": 4}, "data": {"kind": "digits", "standardize": True}}
    with refused("Images in bytes cannot be standardized", "`standardize`", kind=ValueError):
        build(resolve(parse(table), baselines=False))
    build(config).federation.save(tmp_path / "saved")
    table = {**BASE, "data": {"kind": "folder", "path": str(tmp_path / "saved"), "standardize": True}}
    with refused("Use `standardize()` before `save(...)`"):
        build(resolve(parse(table), baselines=False))


def test_a_pooled_file_is_divided_by_the_partition(tmp_path):
    path = written(tmp_path / "t.csv", age=AGE)
    table = {**BASE, "data": {"kind": "pool", "path": str(path), "exclude": ["client"]}}
    partition = {"kind": "classes_per_client", "num_clients": 5, "num_classes_each": 1}
    federation = build(resolve(parse({**table, "partition": partition}), baselines=False)).federation
    assert federation.num_clients == 5 and federation.schema.classes == ("fit", "sick")
    assert federation.schema.features == ("age",)
    assert all(len(set(federation.client(i)[1].tolist())) == 1 for i in range(5))
    with refused("data must be divided among clients. Add `[partition]`."):
        build(resolve(parse(table), baselines=False))
    file = {"kind": "file", "path": str(path)}
    with refused('Remove `[partition]`, or use `kind = "pool"` for a file without clients.'):
        build(resolve(parse({**table, "data": file, "partition": partition}), baselines=False))


def test_whole_numbers_are_the_targets_of_a_regression(tmp_path):
    path = written(tmp_path / "t.csv", age=AGE, label=np.rint(AGE * 5).astype(int) * 3)
    federation = build(config_of(path, task={"kind": "regression"})).federation
    assert federation.schema.classes == () and set(federation.y.tolist()) <= set((np.rint(AGE * 5) * 3).tolist())
    assert json.loads(json.dumps(federation.schema.to_dict()))["classes"] == []


def test_class_numbers_are_not_the_targets_of_a_regression(tmp_path):
    read = px.datasets.read_table(written(tmp_path / "t.csv", age=AGE, label=np.arange(NUM) % 2 * 5 + 3))
    task = px.regression(px.logistic_regression(1))
    with refused("There are 2 classes, '3' to '8'", "use `federation.as_targets()`", kind=ValueError):
        check_model(task, read, None)
    check_model(task, read.as_targets(), None)
