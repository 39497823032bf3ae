"""Tests of loading trained models, their predictions, and their export."""

import json
import stat
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from jax import export
from safetensors import safe_open
from safetensors.numpy import load_file

import personax as px
from personax.data.schema import Schema
from personax.experiment.build import build, resolve
from personax.experiment.checkpoint import export as write_parameters
from personax.experiment.config import load_run, parse
from personax.experiment.folders import Folder
from personax.experiment.newcomers import personalize_newcomer, write
from personax.experiment.predictions import write_predictions
from personax.experiment.runs import execute, start
from personax.experiment.trained import TrainedModel
from tests.experiment.test_config import refused

pytestmark = pytest.mark.xdist_group("small runs")

FEATURES = ["age", "dose", "pulse"]
STATES = np.array(["ill", "sick", "well"])


def days(num, seed):
    """Samples of one patient; columns have very different scales."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(num, 3))
    rows = pd.DataFrame(z * [10, 0.1, 1000] + [50, 0.5, 6000], columns=FEATURES).round(4)
    rows["state"] = STATES[(z[:, 0] > 0.1 * seed).astype(int) + (z[:, 1] > 0)]
    return rows


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with data.csv, a run on it, a newcomer's file, and one without labels."""
    root = tmp_path_factory.mktemp("loading")
    everyone = pd.concat([days(14, i).assign(patient=f"p{i}") for i in range(5)])
    everyone.to_csv(root / "data.csv", index=False)
    days(20, 9).to_csv(root / "newcomer.csv", index=False)
    days(6, 10)[FEATURES].to_csv(root / "new.csv", index=False)
    execute(start(resolve(configuration(root), baselines=False), root / "run"))
    return root


def configuration(root, **changes):
    adapted = {"model": "adapted", "num_steps": 3, "lr": 0.2, "batch_size": 4}
    table = {
        "name": "patients",
        "seeds": 2,
        "data": {
            "kind": "file",
            "path": str(root / "data.csv"),
            "client": "patient",
            "label": "state",
            "standardize": True,
        },
        "split": {"test_share": 0.25, "num_held_out": 1},
        "model": {"kind": "mlp", "widths": [4]},
        "schedule": {"num_rounds": 2, "cohort_size": 2},
        "evaluation": {"every": 2},
        "local": {"lr": 0.1, "num_steps": 2, "batch_size": 4},
        "algorithms": {
            "FedAvg": {"recipe": "fedavg", "scores": {"FedAvg": {"model": "global"}, "tuned": adapted}},
            "APFL": {"recipe": "apfl", "mix": 0.5},
            "Local": {"recipe": "local_only"},
        },
    }
    return parse({**table, **changes})


@pytest.fixture(scope="module")
def plan(root):
    return build(load_run(root / "run" / "config.toml"))


def as_in_the_file(federation, x):
    scaling = federation.schema.feature_scaling
    return x * np.array(scaling.deviation) + np.array(scaling.mean)


# Choice of the model


@pytest.mark.parametrize("score", ["tuned", "APFL", "Local"])
def test_the_model_of_a_client_is_the_one_that_was_scored(root, plan, score):
    rows = pq.read_table(root / "run" / "clients.parquet").to_pandas()
    for at, name in enumerate(plan.federation.names):
        model = px.load(root / "run", client=name, score=score)
        x, y = plan.federation.client_test(at)
        hits = model.predict(as_in_the_file(plan.federation, x)) == model.classes[y]
        row = rows[(rows.score == score) & (rows.name == name) & (rows.seed == 0)]
        assert np.mean(hits) == pytest.approx(row.accuracy.item(), abs=1e-6)
    assert name in model.title and model.words == plan_words(plan, score)


def plan_words(plan, score):
    (scoring,) = (one.scorings[score] for one in plan.trainings if score in one.scorings)
    return scoring.describe().split(";")[0]


def test_the_shared_model_is_that_of_the_file(root, plan):
    model = px.load(root / "run")  # FedAvg's: the only score of a shared model
    arrays = load_file(Folder(root / "run").model("FedAvg"))
    for leaf, name in (
        (model.params["dense_0"]["kernel"], "dense_0.kernel"),
        (model.params["dense_1"]["bias"], "dense_1.bias"),
    ):
        np.testing.assert_array_equal(leaf, arrays[f"params.{name}"])
    assert model.title == "FedAvg of patients" and model.schema == plan.federation.schema
    again = px.load(Folder(root / "run").model("FedAvg"))
    np.testing.assert_array_equal(again.outputs(root / "new.csv"), model.outputs(root / "new.csv"))


def test_a_client_held_out_of_training_gets_a_model_from_its_own_data(root, plan):
    newcomers, notes = plan.federation.newcomers, []
    model = px.load(root / "run", "FedAvg", newcomers.names[0])
    training = plan.trainings[0]
    shared = px.load(root / "run", "FedAvg")
    scoring = px.Scoring("adapted", 3, 0.2, 4)
    wanted = px.personalize(
        training.algorithm,
        plan.task,
        jax.tree.map(jnp.asarray, shared.params),
        newcomers.client(0),
        scoring,
        id=int(newcomers.ids[0]),
        key=plan.keys[0],
    )
    for leaf, other in zip(*map(jax.tree.leaves, (model.params, wanted)), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-7)
    px.load(root / "run", "APFL", notify=notes.append)
    assert notes[0].startswith("APFL: the shared model, unchanged, which was not scored")


@pytest.mark.parametrize(
    ("given", "said", "kind"),
    [
        (("run", "FedAv"), "`the run` has no algorithm `FedAv`. Did you mean `FedAvg`?", ValueError),
        (("run", "FedAvg", "p77"), "run has no client 'p77'.", ValueError),
        (("run", None, 1), "run has no client 1.", ValueError),
        (("run", "Local"), "Local trains no shared model: its clients share nothing.", ValueError),
        (("nowhere",), "Run folder or model file not found: ", OSError),
        (("run/models",), "No results.json in", ValueError),
        (("data.csv",), "is not a safetensors file", ValueError),
    ],
)
def test_a_model_that_is_not_there(root, given, said, kind):
    place, *who = given
    with refused(said, kind=kind):
        px.load(root / place, *who)


def test_untrained_models_are_not_adapted(root):
    with refused("Local trains no shared model: its clients share nothing.", kind=ValueError):
        personalize_newcomer(Folder(root / "run"), root / "newcomer.csv", "Local")


def test_a_score_of_a_shared_model_gives_clients_none(root):
    with refused("`FedAvg` has no models of single clients", kind=ValueError):
        px.load(root / "run", client="p1", score="FedAvg")
    with refused("the run` has no score `tune`. Did you mean `tuned`?", kind=ValueError):
        px.load(root / "run", client="p1", score="tune")
    with refused("A score selects a model of a client.", kind=ValueError):
        px.load(root / "run", score="tuned")


@pytest.mark.slow
def test_files_that_were_removed_or_changed_after_the_run(root, tmp_path):
    folder = start(resolve(configuration(root, seeds=1), baselines=False), tmp_path / "run")
    execute(folder)
    content = (root / "data.csv").read_text()
    try:
        (root / "data.csv").write_text(content.replace("p3", "p4", 1))
        with refused("were trained with different settings or data: the ", kind=ValueError):
            px.load(folder.root, "APFL", "p1")
    finally:
        (root / "data.csv").write_text(content)
    for path in folder.checkpoints("APFL").iterdir():
        path.unlink()
    with refused("has no checkpoint of APFL", kind=OSError):
        px.load(folder.root, "APFL", "p1")
    folder.model("APFL").unlink()
    with refused("To rebuild the model of APFL", kind=OSError):
        px.load(folder.root, "APFL")
    (folder.root / "live.json").write_text("{}")
    with refused("is a live run, whose clients keep their states.", kind=ValueError):
        px.load(folder.root, "FedAvg", "p1")


# Predictions


def test_arrays_tables_and_files_give_the_same_predictions(root, tmp_path):
    model, rows = px.load(root / "run"), pd.read_csv(root / "new.csv")
    wanted = model.predict(root / "new.csv")
    assert set(wanted) <= set(STATES) and wanted.shape == (6,)
    reversed_columns = rows[FEATURES[::-1]].assign(remark="fine")
    reversed_columns.to_parquet(tmp_path / "new.parquet")
    np.savez(tmp_path / "new.npz", x=rows.to_numpy())
    notes = []
    for given in (rows.to_numpy(), reversed_columns, tmp_path / "new.parquet", tmp_path / "new.npz"):
        np.testing.assert_array_equal(model.predict(given, notify=notes.append), wanted)
    ignored = "ignored 1 column that the model does not use: 'remark'."
    assert {f"The table: {ignored}", f"new.parquet: {ignored}"} <= set(notes)
    outputs = model.outputs(rows)
    shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(model.probabilities(rows), shares, rtol=1e-5)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "Empty CSV file"),
        ("age,dose,pulse\n", "odd.csv has no rows."),
        ("age,dose\n1,2\n", "odd.csv: missing column 'pulse', which the model was trained on."),
        ("age,dose,puls\n1,2,3\n", "Did you mean `puls`?"),
        ("age,dose,pulse\n1,2,3\n1,,3\n", "odd.csv: missing value in row 1"),
        ("age,dose,pulse\n1,2,3\n1,x,3\n", "the feature column 'dose' must be numeric, got string. Encode it as"),
        ("age,dose,pulse\n1,2,3\n1,inf,3\n", "nonfinite value in row 1 (counted from 0), 'dose'"),
    ],
)
def test_a_file_that_cannot_be_predicted(root, tmp_path, content, said):
    (tmp_path / "odd.csv").write_text(content)
    with refused(said, kind=ValueError):
        px.load(root / "run").predict(tmp_path / "odd.csv")


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (np.ones(3), "The array must have the shape (samples, 3), got (3,). For one sample, use `x[None]`."),
        (np.ones((2, 4)), "a sample must have 3 numbers (shape (3,)), got 4"),
        (np.ones((0, 3)), "The array has no rows."),
        (np.array([["a", "b", "c"]]), "Samples must be an array of numbers, a data frame or a path, got ndarray."),
        (np.array([[1, 2, np.nan]]), "The array: nonfinite value in row 0 (counted from 0), 'pulse'."),
    ],
)
def test_an_array_that_cannot_be_predicted(root, x, said):
    with refused(said, kind=ValueError):
        px.load(root / "run").predict(x)


def linear(schema, kernel):
    """The linear model of a kernel."""
    params = {"dense_0": {"kernel": np.asarray(kernel, float), "bias": np.zeros(np.shape(kernel)[1])}}
    return TrainedModel(px.logistic_regression(np.shape(kernel)[1]), params, schema)


def test_whole_numbers_are_predicted_as_whole_numbers_and_words_as_words():
    x = np.array([[1.0, 0.0], [0.0, 1.0]])
    for classes, wanted in ((("3", "7"), [3, 7]), (("03", "7"), ["03", "7"]), (("no", "yes"), ["no", "yes"])):
        found = linear(Schema((2,), "float64", classes=classes), np.eye(2)).predict(x)
        assert found.tolist() == wanted


def test_a_file_without_names_of_columns(tmp_path):
    model, notes = linear(Schema((2,), "float64", classes=("0", "1")), np.eye(2)), []
    (tmp_path / "two.csv").write_text("a,b\n0,5\n")
    assert model.predict(tmp_path / "two.csv", notify=notes.append).tolist() == [1]
    assert notes == ["two.csv: the model has no column names, so columns are read in the order of the file."]
    (tmp_path / "three.csv").write_text("a,b,c\n0,5,1\n")
    with refused("three.csv has 3 columns, but the model takes 2 inputs without names.", kind=ValueError):
        model.predict(tmp_path / "three.csv")
    np.savez(tmp_path / "no.npz", y=np.ones(3))
    with refused("no.npz has no array 'x'. It has 'y'.", kind=ValueError):
        model.predict(tmp_path / "no.npz")


def test_bytes_are_read_as_images():
    model = linear(Schema((2,), "uint8", classes=("0", "1")), np.eye(2))
    np.testing.assert_allclose(model.outputs(np.array([[255, 51]])), [[1.0, 0.2]])
    with refused("the model was trained on bytes", kind=ValueError):
        model.predict(np.array([[0.5, 1.0]]))


def test_many_samples_are_computed_in_parts():
    x = np.random.default_rng(0).normal(size=(20_000, 2))
    model = linear(Schema((2,), "float64", classes=("0", "1")), np.eye(2))
    np.testing.assert_array_equal(model.predict(x), x.argmax(axis=1))


def test_a_regression_predicts_in_the_units_of_its_targets(root, tmp_path):
    rows = days(60, 3).drop(columns="state").assign(cost=lambda t: 1000 + 3 * t.pulse, patient=["a", "b"] * 30)
    rows.to_csv(tmp_path / "costs.csv", index=False)
    data = {"kind": "file", "path": str(tmp_path / "costs.csv"), "client": "patient", "label": "cost"}
    config = configuration(
        root,
        data={**data, "standardize": True},
        split={"test_share": 0.25},
        model={"kind": "logistic_regression"},
        schedule={"num_rounds": 20, "cohort_size": 2},
        seeds=1,
        algorithms={"FedAvg": {"recipe": "fedavg"}},
    )
    execute(start(resolve(config, baselines=False), tmp_path / "run"))
    model = px.load(tmp_path / "run")
    found = model.predict(rows)
    assert found.shape == (60,) and model.classes.size == 0
    assert np.sqrt(np.mean((found - rows.cost) ** 2)) < 0.2 * rows.cost.std()
    with refused("A regression has no class probabilities. Use `predict`.", kind=ValueError):
        model.probabilities(rows)
    assert write_predictions(model, tmp_path / "costs.csv", tmp_path / "out.parquet") == 60
    table = pd.read_parquet(tmp_path / "out.parquet")
    assert list(table.columns) == ["prediction"]
    np.testing.assert_allclose(table.prediction, found)
    model.export(tmp_path / "model")
    called = export.deserialize((tmp_path / "model").read_bytes()).call(rows[FEATURES].to_numpy(np.float32))
    np.testing.assert_allclose(called, found, rtol=1e-4)


# Files


def test_a_personal_model_is_read_from_its_file_alone(root, tmp_path):
    found = personalize_newcomer(Folder(root / "run"), root / "newcomer.csv", "FedAvg")
    path = tmp_path / "personal.safetensors"
    write(found, path)
    model = px.load(path)
    for leaf, other in zip(*map(jax.tree.leaves, (model.params, found.params)), strict=True):
        np.testing.assert_array_equal(leaf, other)
    assert model.title == "FedAvg, personal model" and model.words == found.words.split(";")[0]
    with refused("is a single model file. Omit the algorithm", kind=ValueError):
        px.load(path, "FedAvg")
    with safe_open(path, "numpy") as file:
        assert "px.load(FILE).predict(x)" in file.metadata()["how_to_read"]
    write_parameters(tmp_path / "old.safetensors", found.params, {"algorithm": "FedAvg"})
    with refused("Missing schema in", kind=ValueError):
        px.load(tmp_path / "old.safetensors")
    about = {**found.about, "network": "{"}
    write_parameters(tmp_path / "odd.safetensors", found.params, about)
    with refused("Invalid metadata in", kind=ValueError):
        px.load(tmp_path / "odd.safetensors")
    about = {**found.about, "network": json.dumps({"kind": "mlp", "widths": [5]})}
    write_parameters(tmp_path / "other.safetensors", found.params, about)
    with refused("Parameter dense_0.bias must have shape (5,), got (4,).", kind=ValueError):
        px.load(tmp_path / "other.safetensors")


CODE = """
import personax as px

def small(num_outputs):
    return px.logistic_regression(num_outputs)
"""


def test_a_file_whose_network_is_imported_is_read_if_that_is_allowed(root, tmp_path, monkeypatch):
    (tmp_path / "my_networks_of_loading.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    model = {"kind": "import", "path": "my_networks_of_loading:small"}
    algorithms = {"FedAvg": {"recipe": "fedavg"}}
    config = configuration(root, model=model, seeds=1, algorithms=algorithms)
    folder = start(resolve(config, baselines=False), tmp_path / "run")
    execute(folder)
    wanted = px.load(folder.root).outputs(root / "new.csv")
    path = folder.model("FedAvg")
    sys.modules.pop("my_networks_of_loading")
    with refused("imports and runs my_networks_of_loading:small", kind=ValueError):
        px.load(path)
    assert "my_networks_of_loading" not in sys.modules
    np.testing.assert_array_equal(px.load(path, allow_imports=True).outputs(root / "new.csv"), wanted)


# Predictions as files, and StableHLO


def test_predictions_are_written_in_the_order_of_the_file(root, tmp_path):
    model = px.load(root / "run")
    assert write_predictions(model, root / "new.csv", tmp_path / "out.csv") == 6
    table = pd.read_csv(tmp_path / "out.csv")
    assert table.prediction.tolist() == model.predict(root / "new.csv").tolist()
    np.testing.assert_allclose(table.probability, model.probabilities(root / "new.csv").max(axis=1), rtol=1e-5)
    for path, said in (
        (tmp_path / "out.txt", "written as .csv or .parquet"),
        (root / "new.csv", "would replace the data"),
    ):
        with refused(said, kind=ValueError):
            write_predictions(model, root / "new.csv", path)


def test_an_exported_model_gives_the_same_probabilities_without_personax(root, tmp_path):
    model, rows = px.load(root / "run", client="p1", score="tuned"), pd.read_csv(root / "new.csv")
    path = model.export(tmp_path / "model.stablehlo")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # it is one client's own
    called = export.deserialize(path.read_bytes())
    for num in (1, 6):
        x = rows.to_numpy(np.float32)[:num]
        np.testing.assert_allclose(called.call(x), model.probabilities(x), rtol=1e-4, atol=1e-6)
    about = json.loads((tmp_path / "model.stablehlo.json").read_text())
    assert about["features"] == FEATURES and about["classes"] == STATES.tolist()
    assert about["shape"] == ["samples", 3] and "export.deserialize" in about["call"]
    fixed = export.deserialize(model.export(tmp_path / "fixed", num_samples=2).read_bytes())
    assert fixed.in_avals[0].shape == (2, 3)


@pytest.mark.parametrize(
    ("network", "schema"),
    [
        (px.cnn2(3), Schema((8, 8), "uint8", classes=("a", "b", "c"))),
        (px.standardized(px.cnn((4,), (5,), 3), 0.1, 0.3), Schema((8, 8, 1), "float32", classes=("a", "b", "c"))),
    ],
)
def test_networks_for_images_are_exported_for_any_number_of_samples(network, schema, tmp_path):
    x = np.random.default_rng(0).integers(0, 255, (5, *schema.shape)).astype(schema.dtype)
    params = network.init(jax.random.key(0), jnp.zeros((1, *schema.shape)))
    model = TrainedModel(network, params, schema)
    called = export.deserialize(model.export(tmp_path / "model").read_bytes())
    np.testing.assert_allclose(called.call(x), model.probabilities(x), rtol=1e-5)


def test_a_network_that_cannot_be_exported_names_the_remedy(tmp_path):
    def apply(params, x, key=None):
        return jnp.stack([x[i].sum() for i in range(int(x.shape[0]))])[:, None] * params

    network = px.Model(lambda key, x: jnp.ones(()), apply)
    model = TrainedModel(network, np.ones(()), Schema((2,), "float32"))
    with refused("cannot be exported for any number of samples. Give `num_samples`", kind=ValueError):
        model.export(tmp_path / "model")
    fixed = export.deserialize(model.export(tmp_path / "fixed", num_samples=2).read_bytes())
    np.testing.assert_allclose(fixed.call(np.ones((2, 2), np.float32)), [2, 2])
