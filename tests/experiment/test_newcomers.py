"""A newcomer's own model, made from a run and a file, and its improvement."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import personax as px
from personax.data.datasets import read_client
from personax.data.schema import Schema
from personax.evaluation.scores import interval
from personax.experiment.build import make_training, resolve
from personax.experiment.checkpoint import read_model
from personax.experiment.config import load, parse
from personax.experiment.newcomers import choose, personalize_newcomer, read_newcomer, write
from personax.experiment.records import read_results
from personax.experiment.runs import execute, start
from personax.models import logistic_regression
from tests.experiment.test_config import refused
from tests.experiment.test_runs import by_hand, model_of, stepped

pytestmark = pytest.mark.xdist_group("small runs")

KEY = jax.random.key(0)
WORDS = ["fit", "ill", "sick"]
CONFIG = {
    "name": "patients",
    "seeds": 2,
    "split": {"test_share": 0.25},
    "model": {"kind": "logistic_regression"},
    "schedule": {"num_rounds": 2, "cohort_size": 2},
    "evaluation": {"every": 2},
    "local": {"lr": 0.1, "num_steps": 2, "batch_size": 4},
    "algorithms": {
        "FedAvg": {
            "recipe": "fedavg",
            "scores": {
                "FedAvg": {"model": "global"},
                "poor": {"model": "adapted", "lr": 0.0},
                "tuned": {"model": "adapted", "num_steps": 1, "lr": 0.4},
            },
        },
        "ARUBA": {"recipe": "aruba", "scores": {"ARUBA": {"model": "recomputed", "num_steps": 2, "lr": 0.5}}},
    },
}


def samples(num, seed):
    """Features and classes of one client, whose classes lie along two lines."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 3)).round(4)
    return x, (x[:, 0] > 0) + (x[:, 1] > 0).astype(int)


def table(rows, header="patient,a,b,c,state"):
    return "\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n"


def rows_of(patient, num, seed, name=WORDS.__getitem__):
    x, y = samples(num, seed)
    return [(patient, *features, name(label)) for features, label in zip(x, y, strict=True)]


def patients(root):
    """The configuration of a run on four patients whose states are words, and their data in a folder."""
    (root / "data.csv").write_text(table([row for i in range(4) for row in rows_of(f"p{i}", 12, i)]))
    data = {"kind": "file", "path": str(root / "data.csv"), "client": "patient", "label": "state"}
    return parse({**CONFIG, "data": data})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("patients")
    made = start(resolve(patients(root), baselines=False), root / "run")
    execute(made)
    return made


@pytest.fixture
def patient(tmp_path):
    path = tmp_path / "patient.csv"
    path.write_text(table(rows_of("new", 20, 9)))
    return path


def read(path):
    """Return the samples that personalization reads: a fifth is held out."""
    return read_client(path, client="patient", label="state").split_tests(0.2, key=KEY)


def test_before_and_after_are_those_of_softmax_regression(folder, patient):
    found = personalize_newcomer(folder, patient, "FedAvg", lr=0.4)
    client, params = read(patient), model_of(folder, "FedAvg")
    after = stepped(params, 0.4, *client.client(0))  # a batch of 40 holds all 16 samples
    assert (found.algorithm, found.num_train, found.num_test) == ("FedAvg", 16, 4)
    assert found.before == pytest.approx(by_hand(params, *client.client_test(0))[0], rel=1e-5)
    assert found.after == pytest.approx(by_hand(after, *client.client_test(0))[0], rel=1e-5)
    for leaf in ("kernel", "bias"):
        np.testing.assert_allclose(found.params["dense_0"][leaf], after["dense_0"][leaf], rtol=1e-5, atol=1e-7)


def test_steps_and_their_size_can_be_asked_for(folder, patient):
    found = personalize_newcomer(folder, patient, "FedAvg", num_steps=2, lr=0.2)
    client, params = read(patient), model_of(folder, "FedAvg")
    for _ in range(2):
        params = stepped(params, 0.2, *client.client(0))
    np.testing.assert_allclose(found.params["dense_0"]["bias"], params["dense_0"]["bias"], rtol=1e-5, atol=1e-7)
    assert found.words.startswith("the shared model after 2 gradient steps of size 0.2")
    unchanged = personalize_newcomer(folder, patient, "FedAvg", lr=0.0)
    assert unchanged.before == unchanged.after


def test_the_objectives_own_way_uses_what_the_server_shares(folder, patient):
    found = personalize_newcomer(folder, patient, "ARUBA")
    config = load(folder.config)
    training = make_training("ARUBA", config.algorithms["ARUBA"])
    trees, _ = read_model(folder.model("ARUBA"))
    task = px.classification(logistic_regression(3))
    params = jax.tree.map(jnp.asarray, trees["params"])
    structure = jax.tree.structure(training.algorithm.objective.init_shared(params))
    leaves = [jnp.asarray(trees["shared"][str(i)]) for i in range(len(trees["shared"]))]
    shared = jax.tree.unflatten(structure, leaves)
    assert int(shared.num_tasks) == 1 + 2 * 2  # the next after two visits in each of two rounds
    wanted = px.personalize(
        training.algorithm,
        task,
        params,
        read(patient).client(0),
        px.Scoring("recomputed", 2, 0.5),
        shared=shared,
        key=KEY,
    )
    for leaf, other in zip(*map(jax.tree.leaves, (found.params, wanted)), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-12)


def test_the_model_is_written_under_readable_names(folder, patient, tmp_path):
    found, path = personalize_newcomer(folder, patient, "FedAvg"), tmp_path / "mine.safetensors"
    write(found, path)
    arrays = load_file(path)
    assert arrays.keys() == {"dense_0.kernel", "dense_0.bias"}
    np.testing.assert_array_equal(arrays["dense_0.kernel"], found.params["dense_0"]["kernel"])
    with safe_open(path, "numpy") as file:
        about = file.metadata()
    assert about["algorithm"] == "FedAvg" and about["scoring"] == found.words
    assert json.loads(about["before"]) == found.before and json.loads(about["after"]) == found.after


# Choice of algorithm and score


def with_rows(folder, headline="accuracy", **changes):
    """The record of the run with other numbers in its table."""
    record = read_results(folder.root)
    rows = [dataclasses.replace(row, metric=headline) for row in record.table if row.metric == record.headline]
    rows = [dataclasses.replace(row, **changes.get(row.score, {})) for row in rows]
    return dataclasses.replace(record, headline=headline, table=rows)


def trainings_of(folder):
    return [make_training(name, entry) for name, entry in load(folder.config).algorithms.items()]


@pytest.mark.parametrize(
    ("means", "chosen"),
    [
        ({"FedAvg": 0.9, "poor": 0.2, "tuned": 0.3, "ARUBA": 0.1}, ("FedAvg", "tuned")),
        ({"FedAvg": 0.9, "poor": 0.4, "tuned": 0.3, "ARUBA": 0.1}, ("FedAvg", "poor")),
        ({"FedAvg": 0.9, "poor": 0.4, "tuned": 0.3, "ARUBA": 0.8}, ("ARUBA", "ARUBA")),
        ({"FedAvg": 0.9, "poor": 0.4, "tuned": np.nan, "ARUBA": 0.1}, ("FedAvg", "poor")),
    ],
)
def test_the_best_score_by_which_newcomers_adapt_is_chosen(folder, means, chosen):
    changes = {score: {"mean": interval(mean)} for score, mean in means.items()}
    assert choose(with_rows(folder, **changes), trainings_of(folder)) == chosen
    flagged = with_rows(folder, **{**changes, chosen[1]: {"mean": interval(1.0), "flag": "adapted on the scored data"}})
    assert choose(flagged, trainings_of(folder))[1] not in ("FedAvg", chosen[1])
    lowest = min((mean, score) for score, mean in means.items() if score != "FedAvg" and mean == mean)[1]
    assert choose(with_rows(folder, "error", **changes), trainings_of(folder))[1] == lowest  # of errors


def test_an_algorithm_that_is_asked_for_adapts_by_its_own_best_score_or_by_steps(folder):
    changes = {"poor": {"mean": interval(0.2)}, "tuned": {"mean": interval(0.1)}, "ARUBA": {"mean": interval(0.9)}}
    assert choose(with_rows(folder, **changes), trainings_of(folder), "FedAvg") == ("FedAvg", "poor")
    none_able = with_rows(folder, **{score: {"flag": "x"} for score in changes})
    assert choose(none_able, trainings_of(folder), "FedAvg") == ("FedAvg", None)
    with refused("No algorithm of patients adapts to newcomers. Name one with --algorithm."):
        choose(none_able, trainings_of(folder))


def test_the_protocol_is_that_of_the_best_score_of_the_algorithm(folder, patient):
    record = read_results(folder.root)
    means = {row.score: row.mean.mean for row in record.table if row.metric == "accuracy"}
    best = max(("poor", "tuned"), key=means.get)
    assert choose(record, trainings_of(folder), "FedAvg") == ("FedAvg", best)
    size = {"poor": 0, "tuned": 0.4}[best]
    assert f"1 gradient step of size {size}" in personalize_newcomer(folder, patient, "FedAvg").words
    assert personalize_newcomer(folder, patient).algorithm == choose(record, trainings_of(folder))[0]


# Files


def test_columns_are_matched_by_name_and_others_ignored(folder, patient, tmp_path):
    wanted = personalize_newcomer(folder, patient, "FedAvg")
    plain, mixed, notes = tmp_path / "plain.csv", tmp_path / "mixed.csv", []
    rows = [row[1:] for row in rows_of("new", 20, 9)]
    plain.write_text(table(rows, "a,b,c,state"))
    mixed.write_text(table([(c, "some words", a, state, 7.5, b) for a, b, c, state in rows], "c,remark,a,state,d,b"))
    for path in (plain, mixed):
        found = personalize_newcomer(folder, path, "FedAvg", notify=notes.append)
        assert (found.before, found.after) == (wanted.before, wanted.after)
    assert notes == ["mixed.csv: ignored 2 columns that the model does not use: 'remark', 'd'."]


def test_other_kinds_of_files(folder, patient, tmp_path):
    wanted = personalize_newcomer(folder, patient, "FedAvg")
    (x, y), notes = samples(20, 9), []
    np.savez(tmp_path / "new.npz", x=x, state=np.array(WORDS)[y])
    columns = {"c": x[:, 2], "a": x[:, 0], "b": x[:, 1], "state": np.array(WORDS)[y]}
    pq.write_table(pa.table(columns), tmp_path / "new.parquet")
    for name in ("new.npz", "new.parquet"):
        assert personalize_newcomer(folder, tmp_path / name, "FedAvg", notify=notes.append).after == wanted.after
    assert notes == ["new.npz: columns without names are read in the order 'a', 'b', 'c'."]


def written(tmp_path, rows, header="patient,a,b,c,state"):
    path = tmp_path / "odd.csv"
    path.write_text(table(rows, header))
    return path


@pytest.mark.parametrize(
    ("rows", "header", "said"),
    [
        (rows_of("x", 5, 1) + rows_of("y", 5, 2), "patient,a,b,c,state", "must hold the samples of one client, got 2"),
        ([row[:3] + row[4:] for row in rows_of("x", 9, 1)], "patient,a,b,state", "odd.csv: missing column 'c'"),
        (rows_of("x", 9, 1), "patient,a,beta,c,state", "missing column 'b', which the model was trained on."),
        (rows_of("x", 9, 1), "patient,a,b,c,status", "state"),
        (rows_of("x", 9, 1, lambda label: label), "patient,a,b,c,state", "The classes are 'fit', 'ill', 'sick'"),
        (rows_of("x", 9, 1, lambda label: label + 0.5), "patient,a,b,c,state", "labels must be classes ('fit', 'ill'"),
        (
            rows_of("x", 9, 1, lambda label: ["dead", "fit", "ill"][label]),
            "patient,a,b,c,state",
            "odd.csv: unknown label 'dead' in row ",
        ),
        (rows_of("x", 1, 1), "patient,a,b,c,state", "at least 2 samples"),
    ],
    ids=[
        "two clients",
        "a feature less",
        "another feature",
        "no label",
        "another label",
        "real labels",
        "other words",
        "one sample",
    ],
)
def test_errors_explain_why_a_file_does_not_match(folder, tmp_path, rows, header, said):
    with refused(said, kind=ValueError):
        personalize_newcomer(folder, written(tmp_path, rows, header), "FedAvg")


def test_labels_that_are_kept_apart_are_checked_too(folder, patient, tmp_path):
    kept = read(patient).client_test(0)[0][0]  # the features of one sample
    x, y = samples(20, 9)
    words = np.where(np.all(x.astype(np.float32) == kept, axis=1), "dead", np.array(WORDS)[y])
    np.savez(tmp_path / "new.npz", x=x, state=words)
    with refused("unknown label 'dead' in row", kind=ValueError):
        personalize_newcomer(folder, tmp_path / "new.npz", "FedAvg")


def test_a_client_may_have_some_of_the_runs_classes(folder, tmp_path):
    rows = [row for row in rows_of("x", 60, 1) if row[-1] != "fit"]
    found = personalize_newcomer(folder, written(tmp_path, rows), "FedAvg", lr=0.4)
    client, params = read(tmp_path / "odd.csv"), model_of(folder, "FedAvg")
    x, y = client.client_test(0)
    assert client.schema.classes == ("ill", "sick") and set(y.tolist()) == {0, 1}  # as in the file alone
    assert found.before == pytest.approx(by_hand(params, x, y + 1)[0], rel=1e-5)


def unfinished(folder, root):
    return start(load(folder.config), root)


def test_an_algorithm_or_a_file_that_is_not_there(folder, patient, tmp_path):
    with refused("`the run` has no algorithm `FedAv`. Did you mean `FedAvg`?"):
        personalize_newcomer(folder, patient, "FedAv")
    with refused("File not found: ", kind=OSError):
        personalize_newcomer(folder, tmp_path / "none.csv", "FedAvg")
    with refused("No results.json in", kind=ValueError):
        personalize_newcomer(unfinished(folder, tmp_path / "run"), patient, "FedAvg")


def schema_of(shape, dtype):
    return Schema(shape, dtype, classes=("0", "1"))


def silent(text):
    raise AssertionError(text)


def test_numbers_become_what_the_model_was_trained_on(tmp_path):
    config = parse({"algorithms": {"A": {"recipe": "fedavg"}}})
    x = np.arange(24).reshape(6, 4) % 7
    path = tmp_path / "new.npz"
    np.savez(path, x=x.astype(float), label=np.arange(6) % 2)
    client = read_newcomer(path, config, schema_of((2, 2), "uint8"), 0, silent)
    assert client.x.dtype == np.uint8 and client.x.shape == (5, 2, 2) and client.test_x.dtype == np.uint8
    np.savez(path, x=x.astype(np.uint8), label=np.arange(6) % 2)
    assert read_newcomer(path, config, schema_of((4,), "float32"), 0, silent).x.dtype == np.float32
    for wrong in (x + 0.5, x - 1.0, x + 250.0):
        np.savez(path, x=wrong, label=np.arange(6) % 2)
        with refused(
            "new.npz: the model was trained on bytes (integers from 0 to 255), got other values.", kind=ValueError
        ):
            read_newcomer(path, config, schema_of((4,), "uint8"), 0, silent)
