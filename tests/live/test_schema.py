"""Tests of schemas through `serve` and `join` processes: classes and columns by name, and a common scaling."""

import contextlib
import json
import threading
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors import safe_open

from personax import arrivals, simulate
from personax.data.schema import Schema, numbered
from personax.experiment.checkpoint import read_model
from personax.experiment.config import ConfigError, Terms, parse
from personax.experiment.folders import Folder
from personax.live.demo import Parts, wait_for_port
from personax.live.journal import read_lines
from personax.live.limits import Limits
from personax.live.messages import Mismatch
from personax.live.recipe import make_recipe
from personax.live.results import open_run
from personax.live.samples import SampleFile
from personax.live.server import schema_of
from personax.schedules import persafl_delays
from tests.live.parts import FEDERATION, NAMES, assert_same, clients_of, follow, make_book, recipe, serving

pytestmark = pytest.mark.xdist_group("live processes")
FEATURES, CLASSES = ["age", "dose", "pulse", "weight"], ["cat", "dog", "eel"]
CONFIG = """
name = "schema"
seeds = [3]
[data]
kind = "file"
path = "on the clients"
[model]
kind = "logistic_regression"
[schedule]
num_rounds = 5
cohort_size = "all"
[live]
num_clients = 2
rate = 1000
outlier_factor = 0
linger = 5
[live.sample]
{sample}
[algorithms.FedAvg]
recipe = "fedavg"
lr = 0.1
num_steps = 5
batch_size = 8
"""
NAMED = f"features = {json.dumps(FEATURES)}\nclasses = {json.dumps(CLASSES)}"
NUMBERED = "shape = [4]\nnum_outputs = 3"


def rows_of(seed, classes, num=40):
    """Samples of these classes alone, each class around its own mean."""
    rng = np.random.default_rng(seed)
    y = rng.choice(classes, num)
    means = np.array([[2, 0, 0, 1], [0, 2, 0, -1], [0, 0, 2, 0]])
    return means[y] + rng.normal(0, 0.5, (num, 4)), y


ROWS = {"anna": rows_of(1, [0, 1]), "bert": rows_of(2, [1, 2])}  # each lacks one class


def write(path, x, labels, columns=FEATURES, header=FEATURES, extra=None):
    """A CSV file with these columns of the samples in this order."""
    names = [*(header[FEATURES.index(name)] for name in columns), *(extra or ()), "label"]
    order = [FEATURES.index(name) for name in columns]
    lines = [",".join([*(repr(float(n)) for n in row[order]), *(extra or {}).values(), str(label)])
             for row, label in zip(x, labels, strict=True)]  # fmt: skip
    path.write_text("\n".join([",".join(names), *lines]) + "\n")


class Live:
    """A server and its clients."""

    def __init__(self, folder, parts):
        self.folder, self.parts, self.port = folder, parts, 0

    def serve(self, sample, *words):
        (self.folder / "config.toml").write_text(CONFIG.format(sample=sample))
        given = ("--listen", "127.0.0.1:0", "--insecure", "--no-view", "--out", str(self.folder / "run"), *words)
        self.parts.begin("server", "serve", str(self.folder / "config.toml"), *given)
        self.port = wait_for_port(self.parts)

    def join(self, name, *words):
        given = ("--data", str(self.folder / f"{name}.csv"), "--insecure", name, "--folder", str(self.folder / name))
        self.parts.begin(name, "join", f"127.0.0.1:{self.port}", *given, *words)

    def lines(self, what):
        with contextlib.suppress(FileNotFoundError):
            return [line for line in read_lines(self.folder / "run") if line["what"] == what]
        return []

    def wait_for(self, done, seconds=90):
        until = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < until, {name: self.parts.log(name)[-800:] for name in self.parts.processes}
            time.sleep(0.05)

    def end(self, name, seconds=90):
        """The exit status of a process, and what it said."""
        return self.parts.processes[name].wait(seconds), self.parts.log(name)

    def model(self):
        trees, _ = read_model(Folder(self.folder / "run").model("FedAvg"))
        return trees["params"]


@contextlib.contextmanager
def live(folder):
    folder.mkdir(exist_ok=True)
    with Parts(folder) as parts:
        yield Live(folder, parts)


def federate(folder, sample, write_file, *words):
    """A whole run; anna and bert get their numbers in this order. The model, and what both said."""
    with live(folder) as one:
        for name, (x, y) in ROWS.items():
            write_file(folder / f"{name}.csv", x, y)
        one.serve(sample)
        for num, name in enumerate(ROWS, 1):
            one.join(name, *words)
            one.wait_for(lambda num=num: len(one.lines("join")) == num)
        for name in ("anna", "bert", "server"):
            status, told = one.end(name)
            assert status == 0, told
        return one.model(), {name: one.parts.log(name) for name in ROWS}


def assert_same_bits(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def read_about(path):
    with safe_open(path, "numpy") as file:
        return file.metadata()


@pytest.fixture(scope="module")
def from_integers(tmp_path_factory):
    """The model of the same samples with integer labels, columns in order and without names in the configuration."""
    return federate(tmp_path_factory.mktemp("live") / "numbered", NUMBERED, write)[0]


@pytest.mark.slow
def test_text_labels_give_the_model_of_integer_labels(from_integers, tmp_path):
    """Each client lacks a class: numbered by itself, its classes would be others than those of the other client."""
    found, _ = federate(tmp_path / "text", NAMED, lambda path, x, y: write(path, x, [CLASSES[i] for i in y]))
    assert_same_bits(found, from_integers)


@pytest.mark.slow
def test_columns_are_matched_by_name(from_integers, tmp_path):
    def shuffled(path, x, y):
        columns = FEATURES[::-1] if path.stem == "anna" else FEATURES
        write(path, x, [CLASSES[i] for i in y], columns, extra={"ward": "north", "room": "12"})

    found, told = federate(tmp_path / "order", NAMED, shuffled)
    assert_same_bits(found, from_integers)
    assert "anna.csv: ignored 2 columns that the model does not use: 'ward', 'room'" in told["anna"]


def test_what_does_not_fit_is_named_and_nothing_is_sent(tmp_path):
    x, y = ROWS["anna"]
    words = [CLASSES[i] for i in y]
    cases = {
        "label": (["cow", *words[1:]], {}, "unknown label 'cow' in row 0 (counted from 0). The classes are 'cat'"),
        "missing": (words, {"columns": FEATURES[1:]}, "missing column 'age'"),
        "renamed": (
            words,
            {"header": ["age", "doze", *FEATURES[2:]]},
            "missing column 'dose', which the model",
        ),
        "numbers": (y + 0.5, {}, "labels must be classes"),
    }
    with live(tmp_path) as one:
        one.serve(NAMED)
        for name, (labels, how, _) in cases.items():
            write(tmp_path / f"{name}.csv", x, labels, **how)
            one.join(name)
        for name, (_, _, said) in cases.items():
            status, told = one.end(name)
            assert status == 1 and said in told, told
        assert not (tmp_path / "run" / "journal.jsonl").read_text()  # no seat, no upload
        kept = {path.name for name in cases for path in (tmp_path / name).iterdir()}
        assert kept <= {"client.lock", "authority.txt"}  # no state, no model


@pytest.mark.slow
def test_a_scaling_is_fitted_from_the_moments_of_those_who_allow_it(tmp_path):
    """The server is killed after the first client's moments, and keeps them."""
    limits, factors = tmp_path / "limits.toml", np.array([1.0, 1000.0, 1.0, 0.01])
    limits.write_text("share_moments = true\n")
    with live(tmp_path) as one:
        for name, (x, y) in ROWS.items():
            write(tmp_path / f"{name}.csv", x * factors, [CLASSES[i] for i in y])
        one.serve(f"{NAMED}\nstandardize = true")
        one.join("bert")
        status, told = one.end("bert")
        assert status == 1 and "does not allow (limit `share_moments`)" in told and not one.lines("join"), told
        one.join("anna", "--limits", str(limits))
        one.wait_for(lambda: one.lines("moments"))
        one.parts.processes["server"].kill()
        one.parts.processes["server"].wait()
        one.serve(f"{NAMED}\nstandardize = true", "--listen", f"127.0.0.1:{one.port}")
        one.join("bert", "--limits", str(limits))
        for name in ("anna", "bert", "server"):
            status, told = one.end(name)
            assert status == 0, told
        assert [line["client"] for line in one.lines("moments")] == ["anna", "bert"]
        (fitted,) = one.lines("scaling")
        personal = [next((tmp_path / name).glob("*/personal.safetensors")) for name in ROWS]
    schema = Schema((4,), "float32", tuple(FEATURES), tuple(CLASSES))
    files = [SampleFile(tmp_path / f"{name}.csv").conform(schema, print) for name in ROWS]
    x = np.concatenate([file.split_tests(0.2, key=jax.random.key(0)).x for file in files]).astype(float)
    found = fitted["scaling"]["features"]
    np.testing.assert_allclose([found["mean"], found["deviation"]], [x.mean(axis=0), x.std(axis=0)], rtol=1e-9)
    for path in personal:
        assert json.loads(read_about(path)["schema"])["feature_scaling"] == found
    assert np.abs(one.model()["dense_0"]["kernel"]).max() < 5  # in units of 1000, steps of 0.1 would diverge


def test_a_live_run_standardizes_as_the_simulator_does(tmp_path):
    given = recipe("FedAsync")
    given = make_recipe(given.config, given.schema, fits_scaling=True)
    factors = np.array([1.0, 300.0, 1.0, 0.01], FEDERATION.x.dtype)
    federation = replace(FEDERATION, x=FEDERATION.x * factors, test_x=FEDERATION.test_x * factors)
    schedule = arrivals(3, 6, delays=persafl_delays(3, key=jax.random.key(3)), key=jax.random.key(3))
    limits = Limits(share_moments=True)
    with serving(tmp_path / "run", given) as running:
        with clients_of(running, tmp_path, federation=federation, limits=limits) as clients:
            for i, name in enumerate(NAMES):
                running.book.join(name, i)
            threads = [threading.Thread(target=client.enter) for client in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert running.book.trains("anna")
            follow(clients, schedule)
        standardized = federation.standardize()
        assert running.book.recipe.schema.feature_scaling == standardized.schema.feature_scaling
        simulated = simulate(given.algorithm, given.task, standardized, schedule, key=given.key)
        assert_same(running.book.state.params, simulated.params)
    again = make_book(tmp_path / "run", given)
    assert again.recipe.schema == standardized.schema and not again.recipe.fits_scaling


@pytest.mark.parametrize(
    "features",
    [
        None,
        {"count": 3, "total": [1.0] * 3, "squares": [1.0] * 4},
        {"count": 0, "total": [1.0] * 4, "squares": [1.0] * 4},
        {"count": 3, "total": [1.0] * 4, "squares": [-1.0] * 4},
        {"count": 3, "total": [float("nan")] * 4, "squares": [1.0] * 4},
        {"count": 3, "total": ["x"] * 4, "squares": [1.0] * 4},
    ],
)
def test_moments_that_make_no_sense_are_refused_and_not_kept(features, tmp_path):
    given = recipe()
    book = make_book(tmp_path, make_recipe(given.config, given.schema, fits_scaling=True))
    book.join("mallory")
    with pytest.raises(Mismatch, match="moments of features must be of 4 columns, and finite"):
        book.contribute("mallory", {"features": features, "targets": None})
    assert not book.ledger.moments and not book.trains("mallory")


def test_what_a_server_announces_is_checked(tmp_path):
    sample = lambda **given: schema_of(parse({"live": {"sample": given}, "algorithms": {"A": {"recipe": "fedavg"}}}))
    assert sample(features=["a", "b"], classes=["x", "y"]) == Schema((2,), "float32", ("a", "b"), ("x", "y"))
    assert sample(shape=[2, 2], type="uint8", num_outputs=3) == Schema((2, 2), "uint8", classes=("0", "1", "2"))
    assert sample(shape=[2], type="int32", standardize=True).dtype == "float32"
    for given, said in (
        ({}, "needs a `shape` or the names of its columns"),
        ({"shape": [3], "features": ["a"]}, "cannot have 1 named columns"),
        ({"features": ["a", "a"]}, "Duplicate name 'a'"),
        ({"shape": [3], "classes": ["x", "y"], "num_outputs": 3}, "3 outputs need 3 `classes`, got 2"),
        ({"shape": [3], "type": "uint8", "standardize": True}, "uint8 are images"),
    ):
        with pytest.raises(ConfigError, match=f"`live.sample`: .*{said}"):
            sample(**given)
    given = recipe()
    with pytest.raises(ConfigError, match=r"`standardize` requires `live.num_clients`"):
        make_book(tmp_path, make_recipe(given.config, given.schema, fits_scaling=True), Terms())


def test_a_run_continues_only_with_the_same_schema(tmp_path):
    given = recipe()
    open_run(tmp_path, given, "run-1")
    assert open_run(tmp_path, given, "run-2")[1] == "run-1"
    other = make_recipe(given.config, replace(given.schema, classes=("b", "a", "c")))
    with pytest.raises(ValueError, match="has a run on other samples"):
        open_run(tmp_path, other, "run-2")


@pytest.mark.parametrize("name", ROWS)
def test_text_labels_are_numbered_by_the_classes_of_the_server(name, tmp_path):
    """Each client lacks a class: numbered by itself, its classes would be different from those of the other client."""
    x, y = ROWS[name]
    write(tmp_path / f"{name}.csv", x, [CLASSES[i] for i in y])
    found = SampleFile(tmp_path / f"{name}.csv").conform(
        Schema((4,), "float32", tuple(FEATURES), tuple(CLASSES)), print
    )
    np.testing.assert_array_equal(found.y, y)


def test_bytes_are_no_other_numbers(tmp_path):
    np.savez(tmp_path / "bytes.npz", x=np.full((6, 4), 200, np.uint8), y=np.arange(6) % 3)
    np.savez(tmp_path / "floats.npz", x=np.full((6, 4), 0.5, np.float32), y=np.arange(6) % 3)
    file = lambda name: SampleFile(tmp_path / name)
    with pytest.raises(ValueError, match=r"takes float32 numbers, got bytes"):
        file("bytes.npz").conform(Schema((4,), "float32", classes=numbered(3)), print)
    with pytest.raises(ValueError, match=r"trained on bytes"):
        file("floats.npz").conform(Schema((4,), "uint8", classes=numbered(3)), print)
    found = file("bytes.npz").conform(Schema((2, 2), "uint8", classes=numbered(5)), print)
    assert found.x.shape == (6, 2, 2) and found.schema.classes == numbered(5)
    with pytest.raises(FileNotFoundError, match="File not found"):
        file("nothing.npz")
