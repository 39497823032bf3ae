"""Clients: what leaves them, what stays, what their owners allow, and what they have at the end."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from functools import partial

import grpc
import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from personax import personalize
from personax.data import datasets
from personax.data.federation import Federation
from personax.data.locks import Taken, sole_user
from personax.evaluation.scoring import Scoring
from personax.experiment.config import Terms
from personax.experiment.records import read_results
from personax.live import wire
from personax.live.acceptance import read_recipe
from personax.live.client import Habits, LiveClient, personalize_only, take_part
from personax.live.connection import RefusedByServer, Unreachable
from personax.live.journal import read_lines
from personax.live.limits import Limits, Refused
from personax.live.messages import ALIGNMENT, Collector, Layout, Mismatch, checksum, checksum_of, pieces
from personax.live.results import open_run, write_results
from personax.live.samples import conformed
from personax.live.server import Address, serve
from personax.live.visits import compiled_visit
from personax.report import write_report
from tests.live.parts import FEDERATION, NAMES, assert_same, clients_of, data_of, recipe, serving

pytestmark = pytest.mark.xdist_group("live")


class Tap:
    """All bytes that a client sends, and in which call."""

    def __init__(self, connection):
        self.calls = []
        for name, call in list(connection.calls.items()):
            connection.calls[name] = self.tapped(call, wire.METHODS[name])

    def tapped(self, call, method):
        write = method.coders[0]

        def kept(request):
            self.calls.append((method.name, write(request)))
            return request

        return lambda request, **keywords: call(map(kept, request) if method.many_in else kept(request), **keywords)

    def of(self, name):
        return [message for call, message in self.calls if call == name]

    @property
    def sent(self):
        return [message for _, message in self.calls]

    def has(self, array):
        return any(np.ascontiguousarray(array).tobytes() in message for message in self.sent)


@pytest.mark.parametrize("name, kept", [("APFL", 3), ("PersA-FL-ME", 2), ("SCAFFOLD", 2)])
def test_no_personal_leaf_and_no_sample_leaves_a_client(name, kept, tmp_path):
    given = recipe(name, num_rounds=10)
    with serving(tmp_path / "run", given) as running, clients_of(running, tmp_path, NAMES[:1]) as (client,):
        tap = Tap(client.connection)
        client.habits = Habits(report_every=1)
        client.enter()
        for visit in range(3):
            upload = client.train()
            if name == "SCAFFOLD" and visit == 0:
                continue  # a control variate starts at 0, so the first difference is the variate itself: the paper's
            own = jax.tree.leaves(client.member.held.personal)
            client.send(upload)
            assert len(own) == kept and not any(tap.has(leaf) for leaf in own)
            sent = jax.tree.leaves(given.up.unflatten(upload.vectors))
            assert all(tap.has(leaf) for leaf in sent)  # or the tap would prove nothing
        client.leave()
        assert not any(tap.has(row) for row in client.data.x) and not tap.has(client.data.y)
        assert {leaf.name.split(".")[0] for leaf in given.up.leaves} <= {"delta", "extra"}
        assert not any(wire.unpack(wire.UploadHeader, sent).about.num_samples for sent in tap.of("Exchange"))


def test_a_client_that_reports_nothing_tells_no_number(tmp_path):
    with serving(tmp_path / "run", recipe(num_rounds=1, cohort_size=1)) as running:
        found = take_part(running.connect("anna"), data_of(0), tmp_path / "anna")
        assert running.book.ledger.reports == {} and found.num_updates == 1
        assert {"start", "shared", "shared_model", "personal", "scores"} == set(found.numbers)


def test_all_clients_end_with_their_own_models_and_the_run_has_a_report(tmp_path):
    given = recipe("APFL", num_rounds=4)
    folder, _ = open_run(tmp_path / "run", given, "name")
    with serving(tmp_path / "run", given, stay=False) as running:
        found = {}

        def live(i, name):
            connection = running.connect(name)
            found[name] = take_part(connection, data_of(i), tmp_path / name, habits=Habits(report_every=1))
            connection.close()

        threads = [threading.Thread(target=live, args=item) for item in enumerate(NAMES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        running.thread.join(20)  # it ends by itself when all know that it is finished
        assert not running.thread.is_alive() and running.error is None
    assert running.book.ledger.num_events == 12 and set(found) == set(NAMES)
    for name in NAMES:
        model = load_file(found[name].model)
        assert model["kernel" if "kernel" in model else next(iter(model))].size
        with safe_open(found[name].model, "np") as file:
            assert json.loads(file.metadata()["numbers"]) == json.loads(json.dumps(found[name].numbers))
    record = write_results(folder, running.book, 1.0, 2.0)
    assert record == read_results(tmp_path / "run")
    (algorithm,) = record.algorithms
    assert sum(algorithm.staleness["count"]) == 12 and len(algorithm.active["time"]) == 200
    last = algorithm.scores[0].evaluations[-1]
    expected = np.mean([found[name].numbers["scores"]["APFL"]["accuracy"] for name in NAMES])
    np.testing.assert_allclose(last.mean["accuracy"], [expected])
    page = write_report([tmp_path / "run"], folder.report).read_text()
    assert all(name in page for name in ("APFL", "Staleness and activity"))


def test_a_newcomer_gets_a_model_without_training(tmp_path):
    given = recipe("PersA-FL-MAML", num_rounds=1, cohort_size=1)
    with serving(tmp_path / "run", given) as running:
        take_part(running.connect("anna"), data_of(0), tmp_path / "anna")
        connection = running.connect("bert")
        tap = Tap(connection)
        found = personalize_only(connection, data_of(1), tmp_path / "bert")
        assert "bert" not in running.book.ledger.seats and found.num_updates == 0
        assert sum(map(len, tap.sent)) < 200  # a greeting and a question
        scoring = Scoring("adapted", 1, 0.1, next(iter(given.training.scorings.values())).batch_size)
        shown = {"key": given.key, "shared": ()}
        params = jax.tree.map(np.asarray, running.book.state.params)
        expected = personalize(given.algorithm, given.task, params, FEDERATION.client(1), scoring, **shown)
        model = load_file(found.model)
        for array, leaf in zip(model.values(), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(array, leaf, rtol=1e-9)


def test_a_client_that_vanishes_comes_back_with_its_personal_state(tmp_path):
    """Dropped after it has trained and before the server heard of it: it sends the same upload, once."""
    with serving(tmp_path / "run", recipe("APFL", num_rounds=100)) as running:
        with clients_of(running, tmp_path, NAMES[:1]) as (client,):
            client.enter()
            client.send(client.train())
            upload = client.train()  # on its disk, and then it is killed
            kept = client.member.held.personal
        told = []
        with clients_of(running, tmp_path, NAMES[:1]) as (again,):
            again.notify = told.append
            again.enter()
            assert_same(again.member.held.personal, kept, 0.0)
            assert running.book.ledger.seats["anna"].last_upload == upload.id and again.member.held.update == 2
            again.send(again.train())
        with clients_of(running, tmp_path, NAMES[:1]) as (third,):
            third.enter()  # nothing is pending: nothing is sent again
    assert "Sending update 1 again." in told
    uploads = [line for line in read_lines(tmp_path / "run") if line["what"] == "upload"]
    assert [line["update"] for line in uploads] == [0, 1, 2]


def test_a_folder_has_one_client_at_a_time(tmp_path):
    (tmp_path / "anna").mkdir()
    with sole_user(tmp_path / "anna" / "client.lock"):
        for part in (take_part, personalize_only):
            with pytest.raises(Taken, match=f"The client's folder .*anna is used by process {os.getpid()}"):
                part(None, data_of(0), tmp_path / "anna")


def test_a_live_run_has_one_server_at_a_time(tmp_path):
    (tmp_path / "run").mkdir()
    taken = pytest.raises(Taken, match=f"The live run .*run is used by process {os.getpid()}")
    with sole_user(tmp_path / "run" / "server.lock"), taken:
        serve(recipe(), tmp_path / "run", Address("127.0.0.1:0", None))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["server.lock"]


def test_a_client_compiles_once(tmp_path):
    with serving(tmp_path / "run", recipe("APFL", num_rounds=100)) as running:
        with clients_of(running, tmp_path, NAMES[:1]) as (client,):
            client.enter()
            client.send(client.train())
            before = compiled_visit._cache_size()
            for _ in range(4):
                client.send(client.train())
        with clients_of(running, tmp_path, NAMES[:1]) as (again,):
            again.enter()  # from the disk
            again.send(again.train())
        assert compiled_visit._cache_size() == before


def test_an_update_that_is_not_finite_stays_home(tmp_path):
    given = recipe(num_rounds=100, lr=1e308)
    with serving(tmp_path / "run", given) as running, clients_of(running, tmp_path, NAMES[:1]) as (client,):
        client.enter()
        assert client.train() is None and client.train() is None
        with pytest.raises(FloatingPointError, match="3 updates in a row"):
            client.train()
        assert running.book.ledger.num_events == 0


LIMITS = [
    (Limits(objectives=("Erm",)), "objective is Meta"),
    (Limits(max_steps=5), "6 gradients"),  # of the visit 4, of the score 1, of the adaptation 1
    (Limits(max_layers=1, max_params=14), "15 parameters"),
    (Limits(min_batch=9), "batches of 8 samples"),
    (Limits(min_steps=3), "visits of 2 steps"),
    (Limits(max_batch=3), "batches of"),
    (Limits(max_bytes=100), "bytes to send"),
]


@pytest.mark.parametrize("limits, told", LIMITS, ids=[told for _, told in LIMITS])
def test_a_client_does_only_what_its_owner_allows(limits, told):
    given = recipe("PersA-FL-MAML")
    with pytest.raises(Refused, match=told):
        read_recipe(given.to_text(), given.layout_text(), limits)
    assert read_recipe(given.to_text(), given.layout_text(), Limits()).algorithm == given.algorithm


def changed(text, change):
    table = json.loads(text)
    change(table)
    return json.dumps(table)


def hostile_model(table):
    table["config"]["model"] = {"kind": "import", "path": "os:system", "options": {}}


def hostile_optimizer(table):
    table["config"]["algorithms"]["FedAsync"]["optimizer"] = {"kind": "Optimizer", "name": "subprocess:run"}


def hostile_server(table):
    table["config"]["algorithms"]["FedAsync"]["server"] = {"kind": "asynchronous", "optimizer": "os:system"}


def hostile_recipe(table):
    entry = table["config"]["algorithms"]["FedAsync"]
    entry.update(recipe={"kind": "import", "path": "os:system"}, command="false")


def hostile_recipe_name(table):
    """The word `import` as the name of a recipe, its path among the options."""
    table["config"]["algorithms"] = {"A": {"recipe": "import", "path": "os:system", "command": "false", "scores": {}}}


def hostile_discount(table):
    discount = {"kind": "import", "path": "os:system", "command": "false"}
    table["config"]["algorithms"]["FedAsync"]["server"] = {"kind": "asynchronous", "discount": discount}


HOSTILE = [hostile_model, hostile_optimizer, hostile_server, hostile_recipe, hostile_recipe_name, hostile_discount]


@pytest.mark.parametrize("change", HOSTILE)
def test_no_name_that_a_server_sends_is_imported(change, monkeypatch):
    import importlib

    given = recipe()
    asked = []
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name, *rest: asked.append(name) or real(name, *rest))
    with pytest.raises(Refused, match=r"recipe imports|optimizer must be one of|has no recipe `import`"):
        read_recipe(changed(given.to_text(), change), given.layout_text(), Limits())
    assert not {"os", "subprocess"} & set(asked)


def test_a_recipe_that_makes_no_sense_is_refused():
    given = recipe()
    for text in ("nonsense", "{}", '{"config": {}, "spec": {}}', "x" * 2_000_000):
        with pytest.raises(Refused):
            read_recipe(text, given.layout_text(), Limits())
    other = json.dumps({"down": given.down.describe(), "up": [["delta.w", [3], "float32"]]})
    with pytest.raises(Mismatch, match="`delta"):
        read_recipe(given.to_text(), other, Limits())


def test_registration_names_what_does_not_match(tmp_path):
    with serving(tmp_path / "run", recipe()) as running:
        connection = running.connect("anna")
        with pytest.raises(RefusedByServer, match="Register again"):
            connection.fetch()
        assert not connection.register("another schema").registered and not running.book.ledger.seats
        wide = Federation.from_clients([(np.ones((5, 8, 8)), np.arange(5) % 3)])
        client = LiveClient(connection, wide, tmp_path / "anna", Limits(), Habits(), lambda text: None)
        with pytest.raises(ValueError, match=r"must have 4 numbers \(shape \(4,\)\), got 64 \(shape \(8, 8\)\)"):
            client.enter()
        assert not running.book.ledger.seats and not running.service.seen
        hello = wire.Hello(protocol=7)
        with pytest.raises(grpc.RpcError, match=f"speaks protocol {wire.PROTOCOL}, anna speaks 7"):
            connection.calls["Register"](hello, timeout=5.0, metadata=connection.metadata)
        connection.close()


def test_another_clients_folder_is_not_used(tmp_path):
    with serving(tmp_path / "run", recipe(num_rounds=100)) as running:
        with clients_of(running, tmp_path, NAMES[:1]) as (client,):
            client.enter()
            client.send(client.train())
        other = LiveClient(
            running.connect("bert"), data_of(1), tmp_path / "anna", Limits(), Habits(), lambda text: None
        )
        with pytest.raises(ValueError, match="has the state of client anna with number 0"):
            other.enter()


def test_synchronous_rounds_run_by_themselves(tmp_path):
    given = recipe("FedAvg", num_rounds=3, cohort_size=2)
    terms = Terms(num_clients=3, rate=1e5)
    with serving(tmp_path / "run", given, terms) as running:
        threads = [
            threading.Thread(target=take_part, args=(running.connect(name), data_of(i), tmp_path / name))
            for i, name in enumerate(NAMES)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert running.book.version == 3 and not any(thread.is_alive() for thread in threads)
    lines = read_lines(tmp_path / "run")
    assert sum(line["what"] == "upload" and line["outcome"] == "applied" for line in lines) == 6


def test_models_longer_than_a_message_travel_in_pieces(tmp_path, monkeypatch):
    from personax.live import connection as connections
    from personax.live import messages, service

    for module in (connections, service):
        monkeypatch.setattr(module, "PIECE", 16)
        monkeypatch.setattr(module, "pieces", partial(messages.pieces, size=50))
    monkeypatch.setattr(service, "SMALL", 16)  # and therefore in a separate thread
    assert messages.PIECE > 50
    given = recipe(num_rounds=100)
    with serving(tmp_path / "run", given) as running, clients_of(running, tmp_path, NAMES[:1]) as (client,):
        client.enter()
        tap = Tap(client.connection)
        client.send(client.train())
        assert len(tap.sent) > 3 and running.book.version == client.newest.version == 1


def test_long_models_wait_for_each_other(tmp_path, monkeypatch):
    """Also those that are an answer in one message; the upload is settled before, and once."""
    from personax.live import service

    monkeypatch.setattr(service, "SMALL", 16)
    terms = Terms(num_clients=3, outlier_factor=0.0, rate=1e5, max_transfers=1)
    with (
        serving(tmp_path / "run", recipe(num_rounds=100), terms) as running,
        clients_of(running, tmp_path, NAMES[:1]) as (client,),
    ):
        client.enter()
        for _ in range(3):
            client.send(client.train())
        assert running.book.version == 3
        transfers, connection, upload = running.service.transfers, client.connection, client.train()
        asyncio.run_coroutine_threadsafe(transfers.acquire(), running.loop).result(5)
        connection.call_seconds, connection.patience = 0.5, 0.0
        with pytest.raises(Unreachable):
            client.send(upload)
        running.loop.call_soon_threadsafe(transfers.release)
        connection.call_seconds, connection.patience = 20.0, 5.0
        client.send(upload)
        assert client.newest.outcome == "duplicate" and running.book.version == 4


def test_a_server_that_takes_too_long_is_asked_again(tmp_path, monkeypatch):
    """On a new stream; the upload counts once, however often it was sent."""
    from personax.live import connection as connections

    monkeypatch.setattr(connections, "GLANCE", 0.05)
    with serving(tmp_path / "run", recipe(num_rounds=100)) as running, clients_of(running, tmp_path, NAMES[:1]) as made:
        (client,) = made
        client.enter()
        client.send(client.train())
        first, settle, slow = client.connection.stream, running.book.settle, [True]

        def slowly(*given):
            found = settle(*given)
            if slow:
                slow.pop()
                time.sleep(1.5)
            return found

        monkeypatch.setattr(running.book, "settle", slowly)
        client.connection.call_seconds = 0.5
        client.send(client.train())
        assert client.connection.stream is not first and not first.answers.is_active()
        assert running.book.ledger.num_events == client.newest.version == 2
        slow.append(True)
        client.connection.patience = 0.1
        with pytest.raises(Unreachable, match=r"The server took more than 0\.5 s"):
            client.send(client.train())


def test_a_stream_that_ended_meanwhile_is_opened_again_at_once(tmp_path):
    with serving(tmp_path / "run", recipe(num_rounds=100)) as running, clients_of(running, tmp_path, NAMES[:1]) as made:
        (client,) = made
        client.enter()
        client.send(client.train())
        client.connection.stream.answers.cancel()
        client.connection.patience = 0.0  # no second try
        client.send(client.train())
        assert running.book.version == client.newest.version == 2


def test_processes_are_set_up_before_grpc_is_there():
    """gRPC reads its settings when it is imported, and a setting of the user's own stays."""
    script = """
import os, sys
import personax.cli
from personax.live.processes import set_up_client
assert "grpc" not in sys.modules
set_up_client()
print(os.environ["GRPC_EXPERIMENTS"])
"""
    run = lambda env: subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    )
    plain = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    assert "-event_engine_client" in run(plain).stdout
    assert run({**plain, "GRPC_EXPERIMENTS": "-mine"}).stdout == "-mine\n"


def test_a_file_of_samples_becomes_a_client(tmp_path):
    x, y = FEDERATION.client(0)
    rows = np.column_stack([x, y])
    header = ",".join([*(f"f{i}" for i in range(x.shape[1])), "label"])
    np.savetxt(tmp_path / "mine.csv", rows, delimiter=",", header=header, comments="", fmt=["%f"] * x.shape[1] + ["%d"])
    found = conformed(datasets.read_client(tmp_path / "mine.csv"), recipe(), print)
    assert len(found.x) + len(found.test_x) == len(x) and found.num_clients == 1 and found.x.dtype == x.dtype


def messages():
    upload = wire.UploadHeader(run="r", id="ünïcode", version=3, num_samples=0.1, checksum=2**64 - 1)
    numbers = wire.Numbers(last=True, numbers={"APFL": {"loss": 0.1, "worst": np.inf}})
    return [
        upload,
        wire.UploadHeader(),
        wire.Hello(protocol=4, features=wire.ClientMoments(3, [0.1], [2.0])),
        wire.Ask(have=-1),
        numbers,
    ]


@pytest.mark.parametrize("message", messages(), ids=lambda message: type(message).__name__)
def test_a_message_is_json_without_defaults(message):
    text = wire.write(message)
    assert wire.read(type(message), text) == message
    default = asdict(type(message)())
    assert set(json.loads(text)) == {name for name, item in asdict(message).items() if item != default[name]}
    later = json.dumps({**json.loads(text), "added_later": [1]}).encode()
    assert wire.read(type(message), later) == message


def test_a_number_that_is_none_reaches_the_server():
    read = wire.read(wire.Numbers, wire.write(wire.Numbers(numbers={"APFL": {"loss": np.nan}})))
    assert np.isnan(read.numbers["APFL"]["loss"])


@pytest.mark.parametrize("piece", [b"", bytes(range(256)) * 3, [b"ab", np.arange(9, dtype=np.uint8), b"", b"c"]])
def test_a_piece_of_data_follows_its_message_and_is_not_copied(piece):
    about = wire.UploadHeader(run="r", id="i", version=3, num_bytes=12)
    packed = wire.pack(wire.MessagePart(about, piece))
    found = wire.unpack(wire.UploadHeader, packed)
    assert found.about == about and found.data == b"".join(piece if isinstance(piece, list) else [piece])
    assert isinstance(found.data, memoryview) and found.data.obj is packed


def test_what_is_not_a_message_is_refused():
    packed = wire.pack(wire.MessagePart(wire.UploadHeader(run="r", id="i", version=3), bytes(700)))
    for content in (b"", packed[:3], packed[:5], packed[:20], b"\xff" * 100, b"\0" * 100):
        with pytest.raises(ValueError):
            wire.unpack(wire.UploadHeader, content)
    with pytest.raises(ValueError, match="too long"):
        wire.unpack(wire.UploadHeader, wire.pack(wire.MessagePart(wire.UploadHeader(run="x" * (1 << 16)))))
    wrong = [
        {"update": -1},
        {"update": 2**63},
        {"update": 0.5},
        {"run": 7},
        {"num_bytes": None},
        {"checksum": 2**64},
        [],
    ]
    for content in wrong:
        with pytest.raises(ValueError):
            wire.read(wire.UploadHeader, json.dumps(content).encode())
    for kind, text in (
        (wire.Ask, b'{"wait_seconds": NaN}'),
        (wire.Ask, b'{"have": -2}'),
        (wire.Numbers, b'{"numbers": [1]}'),
    ):
        with pytest.raises(ValueError):
            wire.read(kind, text)


def test_layouts_are_safetensors(tmp_path):
    from safetensors.numpy import load

    tree = {"params": {"b": np.arange(3, dtype=np.float32), "a": np.ones((2, 2))}, "shared": (np.int32(7),)}
    layout = Layout.of(tree)
    content = layout.encode(tree)
    read = load(content)
    np.testing.assert_array_equal(read["params.b"], tree["params"]["b"])
    assert len(content) == layout.num_bytes and read["shared.0"] == 7
    buffers = layout.buffers(tree)
    assert checksum_of(buffers) == checksum(content)
    for size in (1, 7, 1000):
        cut = list(pieces(buffers, size))
        assert b"".join(part for piece in cut for part in piece) == content
        assert all(sum(map(len, piece)) <= size for piece in cut)
    jax.tree.map(np.testing.assert_array_equal, layout.decode(content), tree)
    collector = Collector(len(content), checksum(content))
    for piece in (content[:7], content[7:]):
        collector.add(piece)
    vectors = layout.vectors(collector.content())
    assert [vector.dtype for vector in vectors] == ["float64", "float32", "int32"]
    assert vectors[0].ctypes.data % ALIGNMENT == 0  # or XLA would copy it
    again = jax.jit(layout.flatten)(tree)
    assert [(one.shape, one.dtype) for one in layout.vector_shapes] == [(one.shape, one.dtype) for one in again]
    jax.tree.map(np.testing.assert_array_equal, layout.unflatten(again), tree)
    assert b"".join(layout.buffers_of(again)) == content
    longer = Layout.of({"params": tree["params"], "shared": tree["shared"], "then": np.zeros(2)})
    more = jax.jit(longer.flatten)({**tree, "then": np.zeros(2)})
    assert longer.begins_with(layout) and b"".join(layout.buffers_of(more, longer)) == content
    assert not layout.begins_with(longer) and not Layout.of({"a": np.zeros(2), **tree}).begins_with(layout)
    other = Layout.of({**tree, "shared": (np.int64(7),)})
    with pytest.raises(Mismatch, match=r"`shared\.0` must be int64"):
        other.require_same(layout.describe(), "here")
    with pytest.raises(Mismatch, match="I64"):
        other.decode(content)
