"""The driver and nodes that fail, vanish, lie or come back: a grid without processes, with Flower's own messages."""

import threading
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Error, Message

from personax import rounds, simulate
from personax.experiment.config import Sample, Terms
from personax.flower.arrays import to_tree
from personax.flower.driver import Driver, Manners, NodeFailed, report_of
from personax.flower.records import from_content, to_content, to_record
from personax.flower.server import read_terms, serve
from personax.flower.worker import Worker
from personax.live.journal import read_lines
from personax.live.messages import Layout
from personax.live.recipe import make_recipe
from personax.live.results import journal_schedule
from tests.flower.test_worker import agreed, tree
from tests.live.parts import FEDERATION, NAMES, assert_same, data_of, make_book, recipe

TERMS = Terms(num_clients=3, outlier_factor=0.0)


class Info:
    def __init__(self, node_id, last_activated_at, name):
        self.node_id, self.last_activated_at, self.name = node_id, last_activated_at, name


class Loopback:
    """A grid for the driver; each node answers in its own thread, with a worker or as a test specifies."""

    def __init__(self, folder):
        self.nodes, self.replies, self.asked, self.keys = {}, {}, [], {}
        self.answers = {i: self.working(i, Worker(folder / NAMES[i])) for i in range(3)}

    def working(self, i, worker):
        worker.node, worker.data = {"name": NAMES[i], "client-id": i, "report": 1}, data_of(i)
        return lambda task, about, arrays: worker.answer({**about, "task": task, "node": worker.node}, arrays)

    def come(self, i, when="first"):
        self.nodes[i] = when

    def get_nodes(self):
        return [Info(i, when, self.keys.get(i, "")) for i, when in list(self.nodes.items())]

    def push_messages(self, messages):
        (message,) = messages
        sent, (about, arrays) = f"message-{len(self.asked)}", from_content(message.content)
        node, task = message.metadata.dst_node_id, message.metadata.message_type
        self.asked.append((node, task, about))

        def work():
            answer, found = self.answers[node](task, about, arrays)
            if "error" in answer:
                self.replies[sent] = Message(Error(code=1, reason=answer["error"]), reply_to=message)
            elif "silent" not in answer:
                self.replies[sent] = Message(to_content(answer, found), reply_to=message)

        threading.Thread(target=work, daemon=True).start()
        return [sent]

    def pull_messages(self, ids):
        return [self.replies.pop(sent) for sent in ids if sent in self.replies]


@pytest.fixture(autouse=True, scope="module")
def identity():
    """Set the run of a message, as Flower does in the processes that it starts."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def drive(grid, book, manners=Manners(), seconds=60):
    """A driver in a thread: what happens meanwhile is up to the test; then `end()`."""
    driver, failures = Driver(grid, book, manners), []

    def run():
        try:
            driver.run()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def end():
        thread.join(seconds)
        assert not thread.is_alive()
        return failures

    return end


def until(done, seconds=30):
    limit = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.02)


def applied(folder):
    return [line for line in read_lines(folder) if line.get("outcome") == "applied"]


# Records


def test_records_come_back_as_they_were():
    layout = Layout.of(tree())
    record = to_record(layout, tree())
    assert isinstance(record, ArrayRecord) and list(record) == [leaf.name for leaf in layout.leaves]
    _, arrays = from_content(to_content({}, record))
    found = to_tree(layout, arrays)
    assert found["half"].dtype == jax.numpy.bfloat16
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(np.asarray, tree()))


def test_flower_alone_would_forget_bfloat16_and_refuse_jax():
    half = np.asarray(tree()["half"])
    assert Array(half).numpy().dtype != half.dtype
    with pytest.raises(TypeError):
        Array(tree()["kernel"])


# A run


def test_a_synchronous_run_ends_where_the_simulator_does(tmp_path):
    given, grid = recipe("FedAvg", num_rounds=3), Loopback(tmp_path)
    book = make_book(tmp_path / "run", given, TERMS)
    for i in (2, 0, 1):
        grid.come(i)
    assert drive(grid, book)() == []
    simulated = simulate(given.algorithm, given.task, FEDERATION, rounds(3, 3, key=given.key), key=given.key)
    assert_same(book.state.params, simulated.params)
    assert sorted(node for node, task, _ in grid.asked if task == "evaluate") == [0, 1, 2]
    assert set(book.ledger.reports) == set(NAMES)  # whose owners let them report


def test_a_run_standardizes_as_the_simulator_does(tmp_path):
    """Nodes send their moments when they register; a scaling of all three is fitted before any trains."""
    given, grid = recipe("FedAvg", num_rounds=2), Loopback(tmp_path)
    book = make_book(tmp_path / "run", make_recipe(given.config, given.schema, fits_scaling=True), TERMS)
    for i in range(3):
        worker = Worker(tmp_path / NAMES[i])
        grid.answers[i] = grid.working(i, worker)
        worker.node["share-moments"] = True
        grid.come(i)
    assert drive(grid, book)() == []
    standardized = FEDERATION.standardize()
    assert book.recipe.schema == replace(given.schema, feature_scaling=standardized.schema.feature_scaling)
    simulated = simulate(given.algorithm, given.task, standardized, rounds(3, 2, key=given.key), key=given.key)
    assert_same(book.state.params, simulated.params)


def test_a_node_that_went_away_sends_its_update_when_it_is_back(tmp_path):
    given, grid = recipe("SCAFFOLD", num_rounds=3), Loopback(tmp_path)
    book = make_book(tmp_path / "run", given, TERMS)
    honest, lost = grid.answers[0], threading.Event()

    def lose(task, about, arrays):
        found = honest(task, about, arrays)
        if task == "train" and not lost.is_set():
            lost.set()
            return {"silent": True}, {}  # it has trained, and its reply is lost
        return found

    grid.answers[0] = lose
    for i in range(3):
        grid.come(i)
    end = drive(grid, book)
    assert lost.wait(30)
    grid.come(0, "again")
    assert end() == []
    lines = [line for line in read_lines(tmp_path / "run") if line["what"] == "upload"]
    own = [line["update"] for line in lines if line["client"] == "anna"]
    assert own == list(range(len(own))) and own
    simulated = simulate(
        given.algorithm, given.task, FEDERATION, journal_schedule(applied(tmp_path / "run"), list(NAMES)), key=given.key
    )
    assert_same(book.state.params, simulated.params)


def test_a_slow_node_delays_no_other_and_is_awaited_at_the_end(tmp_path):
    given, grid = recipe("FedAsync", num_rounds=3), Loopback(tmp_path)
    book = make_book(tmp_path / "run", given, TERMS)
    honest, go_on = grid.answers[0], threading.Event()

    def slow(task, about, arrays):
        if task == "train":
            assert go_on.wait(30)
        return honest(task, about, arrays)

    grid.answers[0] = slow
    for i in range(3):
        grid.come(i)
    end = drive(grid, book)
    until(lambda: book.finished)
    go_on.set()
    assert end() == []
    outcomes = {line["client"]: line["outcome"] for line in read_lines(tmp_path / "run") if line["what"] == "upload"}
    assert outcomes["anna"] == "late"
    assert len(applied(tmp_path / "run")) == 9


def test_a_client_speaks_through_its_newest_node(tmp_path):
    """A killed SuperNode without a key comes back as another node, while Flower still believes in the first."""
    given, grid = recipe("FedAvg", num_rounds=2), Loopback(tmp_path)
    book = make_book(tmp_path / "run", given, TERMS)
    grid.answers[3] = grid.answers[0]
    introduced, _ = grid.answers[3]("query", agreed(given), {})
    grid.answers[0] = lambda task, about, arrays: (introduced if task == "query" else {"silent": True}, {})
    for i in range(3):
        grid.come(i)
    end = drive(grid, book)
    until(lambda: any(node == 0 and task == "train" for node, task, _ in grid.asked))
    grid.come(3)
    assert end() == []
    assert book.version == 2 and len(applied(tmp_path / "run")) == 6
    assert not any(node == 0 and task == "evaluate" for node, task, _ in grid.asked)


@pytest.mark.parametrize("lie", ["shape", "nan", "fields", "error"])
def test_a_node_that_lies_is_left_alone_and_the_others_finish(lie, tmp_path, caplog):
    given, grid = recipe("FedAsync", num_rounds=2), Loopback(tmp_path)
    book = make_book(tmp_path / "run", given, TERMS)
    honest = grid.answers[0]

    def lying(task, about, arrays):
        answer, found = honest(task, about, arrays)
        if task != "train":
            return answer, found
        if lie == "error":
            return {"error": "no disk"}, {}
        if lie == "fields":
            return {"report": {}}, found
        if lie == "nan":
            return answer, {name: np.full_like(array, np.nan) for name, array in found.items()}
        return answer, {name: array[..., None] for name, array in found.items()}

    grid.answers[0] = lying
    for i in range(3):
        grid.come(i)
    assert drive(grid, book)() == []
    assert {line["client"] for line in applied(tmp_path / "run")} == {"bert", "cleo"}
    assert "anna" in caplog.text
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(book.state.params))


def test_a_run_without_able_nodes_ends_with_a_message(tmp_path):
    grid = Loopback(tmp_path)
    book = make_book(tmp_path / "run", recipe("FedAsync"), TERMS)
    for i in range(3):
        grid.answers[i] = lambda task, about, arrays: ({"error": "no samples"}, {})
        grid.come(i)
    (failure,) = drive(grid, book)()
    assert isinstance(failure, NodeFailed) and "None of the nodes can take part" in str(failure)


def test_a_key_that_was_registered_for_a_client_speaks_for_no_other(tmp_path, caplog):
    given, grid = recipe("FedAsync", num_rounds=1), Loopback(tmp_path)
    book = make_book(tmp_path / "run", given, TERMS)
    grid.keys = {0: "anna", 1: "dora"}
    for i in range(3):
        grid.come(i)
    assert drive(grid, book)() == []
    assert {line["client"] for line in applied(tmp_path / "run")} == {"anna", "cleo"}
    assert "registered for dora, but it claims to be bert" in caplog.text


def test_odd_reports_are_left_out():
    given = recipe("FedAvg")
    (name,) = given.training.scorings
    told = {"numbers": {name: {"accuracy": 0.5, "loss": float("nan")}, "other": {"accuracy": 1.0}}}
    told |= {"version": 1, "samples": 3, "train_samples": 4}
    assert report_of(given, told)["numbers"] == {name: {"accuracy": 0.5}}
    assert report_of(given, "nonsense")["numbers"] == {}
    for odd in ({**told, "samples": "many"}, {**told, "numbers": {name: 1}}):
        assert report_of(given, odd) == {"numbers": {}}


# The ServerApp


def test_a_run_continues_in_its_folder_and_two_do_not_share_it(tmp_path):
    given, grid = recipe("FedAvg", num_rounds=1), Loopback(tmp_path)
    config = replace(given.config, live=Terms(sample=Sample([4], num_outputs=3)))
    for i in range(3):
        grid.come(i)
    told = {"out": str(tmp_path / "run"), "num-clients": 3}
    serve(grid, config, told)
    first = (tmp_path / "run" / "live.json").read_text()
    assert (tmp_path / "run" / "report.html").exists()
    serve(grid, config, told)  # it is finished: nothing is trained again
    assert (tmp_path / "run" / "live.json").read_text() == first
    assert len(applied(tmp_path / "run")) == 3
    from personax.data.locks import Taken, sole_user

    with sole_user(tmp_path / "run" / "server.lock"), pytest.raises(Taken, match="is used by process"):
        serve(grid, config, told)


def test_the_runs_configuration_is_read_and_refused_with_a_message():
    config = recipe("FedAvg").config
    terms, manners = read_terms(config, {"num-clients": 0, "deadline": 5.0, "ttl": 9.0, "out": "x"})
    assert (terms.num_clients, terms.deadline, manners.ttl) == (None, 5.0, 9.0)
    stated = replace(config, live=Terms(num_clients=7, least_share=0.25))
    terms, _ = read_terms(stated, {"deadline": 5.0})
    assert (terms.num_clients, terms.deadline, terms.least_share) == (7, 5.0, 0.25)
    for wrong, words in (({"colour": 1}, "has no key `colour`"), ({"ttl": 0.0}, "`ttl` must be positive")):
        with pytest.raises(ValueError, match=words):
            read_terms(config, wrong)
