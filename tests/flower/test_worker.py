"""The adapter to Flower, as far as it needs no Flower: arrays, the worker and the way to it, the app."""

import importlib
import importlib.util
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from personax import arrivals, simulate
from personax.cli import app
from personax.data.schema import Schema
from personax.experiment.checkpoint import read_model
from personax.experiment.config import load
from personax.flower import channel
from personax.flower.arrays import to_arrays, to_tree
from personax.flower.channel import PROTOCOL, WorkerFailed, ask, private_folder, receive, send, socket_of
from personax.flower.node import read_node
from personax.flower.template import PACKAGE, write_app
from personax.flower.worker import Worker, limits_of, samples_of
from personax.live.messages import Layout
from personax.live.recipe import make_recipe
from personax.schedules import persafl_delays
from tests.live.parts import (
    ADAPTERS,
    FEDERATION,
    LOGISTIC,
    NAMES,
    NORMALIZED,
    assert_same,
    data_of,
    make_book,
    recipe,
    recipe_over,
    write_base,
)

pytestmark = pytest.mark.xdist_group("flower")
KEY = jax.random.key(3)


def tree():
    return {
        "kernel": jnp.arange(6.0).reshape(2, 3),
        "half": jnp.array([1.5, -2.0, 3e38], jnp.bfloat16),
        "count": jnp.zeros((), jnp.int32),
        "flag": np.array([True, False]),
        "none": jnp.zeros((0, 2)),
    }


def agreed(given):
    return {"protocol": PROTOCOL, "run": "test-run", "recipe": given.to_text(), "layout": given.layout_text()}


# Arrays


def test_arrays_come_back_as_they_were_with_types_that_numpy_does_not_have():
    layout = Layout.of(tree())
    arrays = to_arrays(layout, tree())
    assert arrays["half"].dtype == np.uint16 and all(isinstance(array, np.ndarray) for array in arrays.values())
    found = to_tree(layout, arrays)
    assert found["half"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(np.asarray, tree()))


def test_arrays_that_were_not_agreed_are_refused():
    layout = Layout.of(tree())
    arrays = to_arrays(layout, tree())
    with pytest.raises(ValueError, match="`kernel` must be float64 of shape"):
        to_tree(layout, {**arrays, "kernel": arrays["kernel"].astype(np.float32)})
    with pytest.raises(ValueError, match="unexpected: more"):
        to_tree(layout, {**arrays, "more": np.zeros(1)})
    with pytest.raises(ValueError, match="missing: count"):
        to_tree(layout, {name: array for name, array in arrays.items() if name != "count"})
    with pytest.raises(ValueError, match="`kernel` must be"):
        to_arrays(layout, {**tree(), "kernel": jnp.zeros(3)})


# The way to the worker


def test_what_is_sent_is_received():
    one, other = socket.socketpair()
    arrays = to_arrays(Layout.of(tree()), tree())
    sender = threading.Thread(target=send, args=(one, {"words": "ünïcode"}, arrays))
    sender.start()
    about, found = receive(other)
    sender.join()
    assert about == {"words": "ünïcode"}
    assert list(found) == list(arrays)
    for name in arrays:
        np.testing.assert_array_equal(found[name], arrays[name])
        assert found[name].dtype == arrays[name].dtype and found[name].shape == arrays[name].shape
    one.close()
    with pytest.raises(EOFError, match="8 of 8 bytes"):
        receive(other)
    other.close()


def test_sockets_are_in_a_folder_of_the_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    place = private_folder()
    assert place == tmp_path / "personax" and stat.S_IMODE(place.stat().st_mode) == 0o700
    assert len(str(socket_of(tmp_path / ("deep/" * 40)))) - len(str(tmp_path)) < 40
    place.chmod(0o755)
    with pytest.raises(WorkerFailed, match="mode 0o700, got 0o755"):
        private_folder()
    place.rmdir()
    place.symlink_to(tmp_path)
    with pytest.raises(WorkerFailed, match="must be a folder of user"):
        private_folder()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(channel.tempfile, "gettempdir", lambda: str(tmp_path))
    assert private_folder() == tmp_path / f"personax-{os.getuid()}"


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node with the first client's samples; its worker does not outlive the test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    (x, y), (test_x, test_y) = FEDERATION.client(0), FEDERATION.client_test(0)
    np.savez(tmp_path / "anna.npz", x=x.astype(np.float32), y=y, test_x=test_x.astype(np.float32), test_y=test_y)
    folder = tmp_path / "state"
    yield folder, {"name": "anna", "data": str(tmp_path / "anna.npz"), "report": 1}
    for pid in worker_of(folder):
        os.kill(pid, signal.SIGKILL)


def worker_of(folder):
    lock = folder / "worker.lock"
    return [int(lock.read_text())] if lock.exists() and lock.read_text() else []


def test_a_worker_starts_once_serves_and_survives_its_own_death(node):
    folder, told = node
    hello = {**agreed(recipe()), "task": "query", "node": told}
    found = []
    threads = [threading.Thread(target=lambda: found.append(ask(folder, hello, {})[0])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{"name": "anna", "id": None}] * 3
    (first,) = worker_of(folder)
    assert stat.S_IMODE(socket_of(folder).stat().st_mode) & 0o077 == 0
    os.kill(first, signal.SIGKILL)
    assert ask(folder, hello, {})[0] == found[0]
    assert worker_of(folder) != [first]
    with pytest.raises(WorkerFailed, match="The protocols differ: 2 here and 0 at the server"):
        ask(folder, {**hello, "protocol": 0}, {})
    ask(folder, {**hello, "node": {**told, "idle-minutes": 0.001}}, {})
    until = time.monotonic() + 10
    while socket_of(folder).exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_worker_that_cannot_start_says_why(node, monkeypatch):
    folder, told = node
    monkeypatch.setenv("JAX_ENABLE_X64", "neither")
    with pytest.raises(WorkerFailed, match="does not start"):
        ask(folder, {"protocol": PROTOCOL, "task": "query", "node": told}, {})


# What a worker does


def workers(tmp_path):
    made = [Worker(tmp_path / name) for name in NAMES]
    for i, worker in enumerate(made):
        worker.node, worker.data = {"name": NAMES[i], "report": 2}, data_of(i)
    return made


def request(given, task, name, book, node):
    seat, content = book.ledger.seats[name], book.published().content
    about = {**agreed(given), "task": task, "node": node, "id": seat.id, "update": seat.next_update}
    return {**about, "version": book.version}, to_arrays(given.down, given.down.decode(content))


def settle(book, given, name, answer, arrays):
    from personax.live.exchange import Arrived

    content = given.up.encode(to_tree(given.up, arrays))
    told = (answer["id"], answer["update"], answer["version"], answer["samples"])
    return book.settle(name, Arrived(*told, content))


@pytest.mark.parametrize("name", ["APFL", "SCAFFOLD", "PersA-FL-ME", "FedBN", "FedBABU"])
def test_workers_led_through_a_table_end_where_the_simulator_does(name, tmp_path):
    """Every worker is forgotten after every message: what counts is on its disk."""
    schedule = arrivals(3, 9, delays=persafl_delays(3, key=KEY), key=KEY)
    given = recipe(name, model=NORMALIZED if name == "FedBN" else LOGISTIC)
    book = make_book(tmp_path / "run", given)
    for i, client in enumerate(NAMES):
        book.join(client, i)
    waiting = {}
    events = list(zip(schedule.client.tolist(), schedule.started_at.tolist(), strict=True))
    for event, (who, _) in enumerate(events):
        for later in range(event, len(events)):
            i, start = events[later]
            if start == event and i not in waiting:
                about, arrays = request(given, "train", NAMES[i], book, {"name": NAMES[i], "report": 2})
                waiting[i] = workers(tmp_path)[i].answer(about, arrays)
                assert "error" not in waiting[i][0], waiting[i][0]
                again, _ = workers(tmp_path)[i].answer(about, arrays)
                assert again["id"] == waiting[i][0]["id"]  # asked twice, it trains once
        assert settle(book, given, NAMES[who], *waiting.pop(who)).outcome == "applied"
    simulated = simulate(given.algorithm, given.task, FEDERATION, schedule, key=KEY)
    assert_same(book.state.params, given.algorithm.sharing.shared(simulated.params))
    for i, client in enumerate(NAMES):
        about, arrays = request(given, "evaluate", client, book, {"name": client, "report": 2})
        worker = workers(tmp_path)[i]
        answer, _ = worker.answer(about, arrays)
        (member,) = worker.members.values()
        assert_same(member.held.personal, jax.tree.map(lambda leaf, i=i: leaf[i], simulated.personal))
        numbers = json.loads((tmp_path / client / "test-run" / "numbers.json").read_text())
        assert answer["report"]["numbers"] == numbers["scores"]
        assert set(numbers) == {"scores", "shared", "shared_model", "personal"}
        about = read_model(tmp_path / client / "test-run" / "personal.safetensors")[1]
        assert ("gradient steps of all parameters" in about["scoring"]) == (name == "FedBABU")


def test_a_node_has_its_own_copy_of_a_base(tmp_path):
    given = recipe_over(write_base(tmp_path / "server.safetensors"), ADAPTERS)
    (tmp_path / "mine.safetensors").write_bytes((tmp_path / "server.safetensors").read_bytes())
    book = make_book(tmp_path / "run", given)
    book.join("anna", 0)
    own = {"name": "anna", "base": str(tmp_path / "mine.safetensors")}
    _, node = read_node({**own, "data": "anna.npz", "folder": str(tmp_path)}, tmp_path / "recipe.toml")
    assert limits_of(node).base == own["base"] and limits_of({"base": "~/b"}).base == str(Path("~/b").expanduser())

    def answered(node):
        worker = workers(tmp_path)[0]
        worker.node = node
        return worker.answer(*request(given, "train", "anna", book, node))

    assert "Ask its operator for the file" in answered({"name": "anna"})[0]["error"]
    answer, sent = answered(own)
    assert "error" not in answer, answer
    assert [name.rpartition(".")[2] for name in sent] == ["a"]


def test_what_a_worker_refuses(tmp_path):
    given = recipe("FedAvg")
    book = make_book(tmp_path / "run", given)
    book.join("anna", 0)
    worker = workers(tmp_path)[0]
    about, arrays = request(given, "train", "anna", book, worker.node)
    assert (
        "letters, digits, - and _, got '../escape'" in worker.answer({**about, "run": "../escape"}, arrays)[0]["error"]
    )
    assert "; missing: " in worker.answer(about, {})[0]["error"]
    assert "KeyError" in worker.answer({**agreed(given), "task": "train", "node": worker.node}, arrays)[0]["error"]
    worker.node, worker.members = {**worker.node, "max-steps": 1}, {}
    assert "this client allows 1" in worker.answer({**about, "node": worker.node}, arrays)[0]["error"]
    gone = {"name": "anna", "data": str(tmp_path / "gone.npz")}
    assert "gone.npz" in worker.answer({**about, "node": gone}, arrays)[0]["error"]


def named(names=("a", "b", "c", "d"), classes=("cat", "dog", "eel"), **more):
    """The recipe of samples with these columns and classes."""
    given = recipe("FedAvg")
    return make_recipe(given.config, Schema((4,), "float32", names, classes), **more)


def node_with(path, header, labels):
    x = np.arange(4.0 * len(labels)).reshape(len(labels), 4)
    rows = [",".join([*map(str, row), label]) for row, label in zip(x, labels, strict=True)]
    path.write_text("\n".join([",".join([*header, "label"]), *rows]) + "\n")
    return {"name": path.stem, "data": str(path)}


def test_a_nodes_file_is_read_as_the_recipe_describes_it(tmp_path, caplog):
    """Columns and classes by name; what does not fit is named on the node, and the server learns only that."""
    hello = {**agreed(named()), "task": "query"}
    fits = node_with(tmp_path / "anna.csv", "dcba", ["eel", "dog"] * 5)
    worker = Worker(tmp_path / "anna")
    assert worker.answer({**hello, "node": fits}, {})[0] == {"name": "anna", "id": None}
    (samples,) = worker.samples.values()
    assert set(samples.y) <= {1, 2} and (samples.x[:, 0] - samples.x[:, 3] == 3).all()
    wrong = ("abcd", ["cow"] * 5, "unknown label 'cow'"), ("abce", ["cat"] * 5, "missing column 'd'")
    for header, labels, said in wrong:
        worker = Worker(tmp_path / "bert")
        odd = node_with(tmp_path / "bert.csv", header, labels)
        for task in ("query", "train"):
            answer = worker.answer({**hello, "task": task, "node": odd, "id": 0, "update": 0, "version": 0}, {})[0]
            assert "do not match the recipe. See its worker.log" in answer["error"] and said not in answer["error"]
        assert said in caplog.text


def test_a_node_sends_moments_if_its_owner_allows_it(tmp_path):
    hello = {**agreed(named(fits_scaling=True)), "task": "query"}
    node = node_with(tmp_path / "anna.csv", "abcd", ["cat", "dog"] * 5)
    refused = Worker(tmp_path / "anna").answer({**hello, "node": node}, {})[0]
    assert "`share_moments`" in refused["error"] and "moments" not in refused
    worker = Worker(tmp_path / "anna")
    found = worker.answer({**hello, "node": {**node, "share-moments": True}}, {})[0]["moments"]
    (samples,) = worker.samples.values()
    np.testing.assert_allclose(found["features"]["total"], samples.x.sum(axis=0))
    assert found["features"]["count"] == len(samples.x) and found["targets"] is None


def test_an_update_that_is_not_finite_is_not_uploaded(tmp_path):
    given = recipe("FedAvg", lr=1e200)
    book = make_book(tmp_path / "run", given)
    book.join("anna", 0)
    worker = workers(tmp_path)[0]
    about, arrays = request(given, "train", "anna", book, worker.node)
    huge = {name: np.full_like(array, 1e308) for name, array in arrays.items()}
    answer, found = worker.answer(about, huge)
    assert "not finite" in answer["fault"] and not found
    assert not (tmp_path / "anna" / "test-run" / "state").exists()


# What a node's owner says


def test_a_nodes_configuration_is_read_and_refused_with_a_message(tmp_path):
    path = tmp_path / "recipe.toml"
    folder, node = read_node({"partition-id": 2, "num-partitions": 3}, path)
    assert node["name"] == "partition-2" and node["recipe"] == str(path) and folder.name == "partition-2"
    assert node["report"] == 1 and "report" not in read_node({"name": "anna", "data": "a.npz"}, path)[1]
    assert read_node({"name": "anna", "data": "a.npz", "folder": str(tmp_path)}, path)[0] == tmp_path
    for given, words in (
        ({"name": "anna"}, "must name the samples"),
        ({"data": "a.npz"}, "must have a `name`"),
        ({"data": "a.npz", "name": "../x"}, "must have a `name`"),
        ({"data": "a.npz", "name": "anna", "colour": 1}, "got 'colour'"),
    ):
        with pytest.raises(ValueError, match=words):
            read_node(given, path)
    limits = limits_of({"name": "anna", "max-steps": 7, "objectives": "Erm,Meta", "allow-imports": True})
    assert (limits.max_steps, limits.objectives, limits.allow_imports) == (7, ("Erm", "Meta"), True)


@pytest.fixture
def client_module(monkeypatch):
    """The ClientApp's module, which needs of Flower only that some names are there."""
    names = ("Array", "ArrayRecord", "ConfigRecord", "RecordDict", "ClientApp", "Context", "Message")
    stand_in = SimpleNamespace(**{name: type(name, (), {}) for name in names})
    if importlib.util.find_spec("flwr") is None:
        monkeypatch.setitem(sys.modules, "personax.flower.api", stand_in)
    yield importlib.import_module("personax.flower.client")
    if importlib.util.find_spec("flwr") is None:
        for module in ("records", "client"):
            del sys.modules[f"personax.flower.{module}"]


def test_a_server_does_not_override_what_a_nodes_owner_says(tmp_path, monkeypatch, client_module):
    asked = []
    owner = {"name": "anna", "data": "/data/anna.npz", "max-steps": 10, "folder": str(tmp_path)}
    settings = {"data": "/etc/passwd", "max-steps": 10**9, "allow-imports": True, "folder": "/tmp/elsewhere"}
    said = {"run": "mine", "node": settings, "task": "query", **settings}
    monkeypatch.setattr(client_module, "from_content", lambda content: (content, {}))
    monkeypatch.setattr(client_module, "to_content", lambda answer, arrays: answer)
    monkeypatch.setattr(client_module, "ask", lambda *request: asked.append(request) or ({}, {}))
    handled = []
    app = SimpleNamespace(**{name: lambda: handled.append for name in ("query", "train", "evaluate")})
    monkeypatch.setattr(client_module, "ClientApp", lambda mods: app)
    monkeypatch.setattr(client_module, "Message", lambda content, reply_to: content)
    client_module.client_app(tmp_path / "recipe.toml")
    message = SimpleNamespace(content=said, metadata=SimpleNamespace(message_type="train"))
    handled[0](message, SimpleNamespace(node_config=owner))
    ((folder, about, _),) = asked
    assert folder == tmp_path and about["node"] == owner and about["task"] == "train" and about["run"] == "mine"
    limits = limits_of(about["node"])
    assert limits.max_steps == 10 and not limits.allow_imports


def test_a_partition_is_a_part_of_the_recipes_data(tmp_path):
    write_app(tmp_path / "app")
    path = tmp_path / "app" / PACKAGE / "recipe.toml"
    parts = [samples_of({"recipe": str(path), "partition-id": i}) for i in range(3)]
    assert all(part.num_clients == 1 and part.test_x is not None for part in parts)
    assert len({len(part.x) for part in parts}) > 1
    with pytest.raises(ValueError, match="below the recipe's 3 clients, got 3"):
        samples_of({"recipe": str(path), "partition-id": 3})


# The app that is written


def personax(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_init_writes_an_app(tmp_path):
    ended = personax("flower", "init", tmp_path / "My App", "--algorithm", "APFL")
    assert ended.exit_code == 0 and "flwr run" in ended.output
    project = tomllib.loads((tmp_path / "My App" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-app"
    told = project["tool"]["flwr"]["app"]
    assert told["components"]["serverapp"] == f"{PACKAGE}.server_app:app" and told["config"]["algorithm"] == "APFL"
    assert "APFL" in load(tmp_path / "My App" / PACKAGE / "recipe.toml").algorithms
    for name in ("server_app", "client_app"):
        lines = (tmp_path / "My App" / PACKAGE / f"{name}.py").read_text().splitlines()
        assert len([line for line in lines[1:] if line]) == 3
    assert "is not empty" in personax("flower", "init", tmp_path / "My App").output
    ended = personax("flower", "init", tmp_path / "other", "--algorithm", "nothing")
    assert ended.exit_code == 1 and "has no algorithm `nothing`. There are: APFL, FedAvg" in ended.output


def test_init_takes_a_recipe(tmp_path):
    config = tmp_path / "mine.toml"
    assert personax("init", config).exit_code == 0
    assert personax("flower", "init", tmp_path / "app", "--config", config, "--clients", 0).exit_code == 0
    assert (tmp_path / "app" / PACKAGE / "recipe.toml").read_text() == config.read_text()
    assert "num-clients = 0" in (tmp_path / "app" / "pyproject.toml").read_text()


def test_the_app_of_any_name_of_an_algorithm_is_valid_toml(tmp_path):
    name = """a "quoted" 'name' \\ <of> & é"""
    config = tmp_path / "mine.toml"
    config.write_text(f"[algorithms.{json.dumps(name)}]\nrecipe = 'fedavg'\n", encoding="utf-8")
    write_app(tmp_path / "app", config)
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["flwr"]["app"]["config"]["algorithm"] == name


def test_the_page_shows_the_proxy_that_is_tested():
    root = Path(__file__).parents[2]
    assert (root / "examples" / "flower" / "nginx.conf").read_text() in (root / "docs" / "flower.md").read_text()


# Without Flower, and without JAX


def run_python(code, **env):
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **env})


@pytest.mark.skipif(importlib.util.find_spec("flwr") is not None, reason="Flower is installed")
@pytest.mark.parametrize("module", ["records", "client", "driver", "server"])
def test_what_needs_flower_says_how_to_get_it(module):
    ended = run_python(f"import personax.flower.{module}")
    assert "flwr is not installed. Run: pip install 'personax[flower]'" in ended.stderr


def test_the_way_to_the_worker_imports_no_jax():
    """In the process of a ClientApp, where the package's own module is left out."""
    code = "import sys, importlib.util as u; sys.modules['personax'] = u.module_from_spec(u.find_spec('personax'))\n"
    code += "import personax.flower.channel, personax.flower.node; print('jax' in sys.modules)"
    ended = run_python(code)
    assert ended.stdout == "False\n", ended.stderr
