"""Attacks on a live server: each is refused, counted with the attacker's name, and never reaches the model."""

import contextlib
import socket
import time
from datetime import datetime, timedelta
from types import SimpleNamespace

import grpc
import jax
import numpy as np
import pytest

from personax.experiment.config import Terms
from personax.live import certificates, gate, service, wire
from personax.live.certificates import read_credentials
from personax.live.connection import Connection, RefusedByServer, Unreachable
from personax.live.journal import read_lines
from personax.live.messages import Layout, checksum
from tests.live.parts import NAMES, clients_of, make_book, recipe, serving

pytestmark = [pytest.mark.xdist_group("live"), pytest.mark.attack]
TERMS = Terms(num_clients=3, rate=1e5, outlier_factor=20.0, stall=1.0, max_connections=300)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    place = tmp_path_factory.mktemp("authority") / "certificates"
    certificates.create(place, ["127.0.0.1", "localhost"], [*NAMES, "mallory"])
    certificates.issue(place, place / "clients" / "late", "late", "client", 1, number=9, begin=timedelta(days=-30))
    return place


@pytest.fixture(scope="module")
def running(authority, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("run"), recipe(num_rounds=10**6), TERMS, authority) as made:
        yield made


@pytest.fixture
def mallory(running):
    """A client with a good certificate and bad intentions."""
    with joined(running, "mallory") as connection:
        yield connection


@contextlib.contextmanager
def joined(running, name):
    connection = running.connect(name, patience=2.0)
    connection.next_update = connection.register(running.book.recipe.digest).next_update
    try:
        yield connection
    finally:
        connection.close()


@pytest.fixture(autouse=True)
def untouched(running):
    """No attack changes the model."""
    before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(running.book.state.params)]
    events = running.book.ledger.num_events
    yield
    if running.book.ledger.num_events == events:
        for old, new in zip(before, jax.tree.leaves(running.book.state.params), strict=True):
            np.testing.assert_array_equal(old, new)


def delta_of(running, scale=0.01):
    shapes = running.book.recipe.params_shape
    filled = jax.tree.map(lambda leaf: np.full(leaf.shape, scale, leaf.dtype), shapes)
    return {"delta": filled, "extra": ()}


def encoded(running, scale=0.01):
    return running.book.recipe.up.encode(delta_of(running, scale))


def upload_of(running, connection, content, **changes):
    about = {
        "run": connection.run,
        "id": "x",
        "update": running.book.ledger.seats[connection.name].next_update,
        "version": running.book.version,
        "num_bytes": len(content),
        "checksum": checksum(content),
    }
    return wire.UploadHeader(**{**about, **changes})


def refused(call, *codes):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() in codes, caught.value
    return caught.value.details()


def cannot_enter(running, shown, patience=0.5):
    connection = Connection(running.address, shown, patience=patience, call_seconds=2.0)
    try:
        with pytest.raises((Unreachable, RefusedByServer)) as caught:
            connection.register(running.book.recipe.digest)
        return caught.value
    finally:
        connection.close()


def test_no_client_enters_without_a_certificate(running):
    channel = grpc.insecure_channel(running.address)
    call = channel.unary_unary(wire.METHODS["Register"].path)
    refused(lambda: call(b"", timeout=2), grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    channel.close()
    trusted = (running.certificates / "server" / "ca.pem").read_bytes()
    channel = grpc.secure_channel(running.address, grpc.ssl_channel_credentials(trusted))
    call = channel.unary_unary(wire.METHODS["Register"].path)
    refused(lambda: call(b"", timeout=2), grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    channel.close()


def test_a_certificate_of_another_authority_is_refused(running, tmp_path):
    certificates.create(tmp_path / "other", ["127.0.0.1"], ["anna"])
    theirs = read_credentials(tmp_path / "other" / "clients" / "anna")
    ours = (running.certificates / "server" / "ca.pem").read_bytes()
    assert isinstance(cannot_enter(running, theirs._replace(authority=ours)), Unreachable)
    # The other way round: a client that trusts ours does not talk to a server that others certified.
    with serving(tmp_path / "run", recipe(), TERMS, tmp_path / "other") as fake:
        shown = read_credentials(running.certificates / "clients" / "anna")
        assert isinstance(cannot_enter(fake, shown), Unreachable)
        assert fake.book.ledger.seats == {}


def test_an_expired_certificate_is_refused(running):
    assert isinstance(cannot_enter(running, read_credentials(running.certificates / "clients" / "late")), Unreachable)
    assert "late" not in running.book.ledger.seats


def test_a_client_certificate_is_no_servers(running, tmp_path):
    """A client that lures others to a server of its own is found out: its certificate is not for serving."""
    place = tmp_path / "lure"
    (place / "clients").mkdir(parents=True)
    (place / "server").symlink_to(running.certificates / "clients" / "mallory")
    (place / "clients" / "anna").symlink_to(running.certificates / "clients" / "anna")
    revoked = running.certificates / "clients" / "mallory" / "revoked.pem"
    revoked.write_bytes((running.certificates / "server" / "revoked.pem").read_bytes())
    with serving(tmp_path / "run", recipe(), TERMS, place) as lure:
        assert isinstance(cannot_enter(lure, read_credentials(place / "clients" / "anna")), Unreachable)


def test_a_revoked_client_is_refused_in_the_middle_of_its_connection(running):
    certificates.add(running.certificates, "gone")
    with joined(running, "gone") as connection:
        connection.fetch()
        assert connection.send("first", 0, running.book.version, encoded(running)).outcome == "applied"
        certificates.revoke(running.certificates, "gone")
        time.sleep(0.6)
        with pytest.raises(RefusedByServer, match="gone's certificate is revoked"):
            connection.send("second", 1, running.book.version, encoded(running))  # on the stream of the first
        assert running.book.ledger.seats["gone"].next_update == 1
        with pytest.raises(RefusedByServer, match="gone's certificate is revoked") as caught:
            connection.fetch()
        assert caught.value.code == grpc.StatusCode.PERMISSION_DENIED
    assert running.service.gate.refusals["gone", "revoked"] >= 1
    number = certificates.identity_of(read_credentials(running.certificates / "clients" / "gone").certificate).id
    certificates.add(running.certificates, "gone")  # a new certificate lets it in again, as the same client
    again = read_credentials(running.certificates / "clients" / "gone")
    assert certificates.identity_of(again.certificate).id == number
    with joined(running, "gone") as connection:
        connection.fetch()


def test_a_certificate_that_runs_out_is_refused_in_the_middle_of_its_connection(running, monkeypatch):
    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=400)

    with joined(running, "anna") as connection:
        connection.fetch()
        monkeypatch.setattr(gate, "datetime", Later)
        with pytest.raises(RefusedByServer, match="anna's certificate has expired"):
            connection.fetch()


def test_who_has_not_registered_uploads_nothing(running):
    certificates.add(running.certificates, "stranger")
    connection = running.connect("stranger")
    connection.run = running.book.ledger.run
    with pytest.raises(RefusedByServer, match="stranger has not registered"):
        connection.send("x", 0, running.book.version, encoded(running))
    connection.close()


@pytest.mark.parametrize("id", ["", "x" * 65])
def test_an_id_of_an_upload_has_some_letters(running, mallory, id):
    with pytest.raises(RefusedByServer, match="an id of up to 64 letters"):
        mallory.send(id, 0, running.book.version, encoded(running))


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, 1e300])
def test_numbers_of_samples_that_make_no_sense_are_refused(tmp_path, authority, weight):
    given = recipe(server={"kind": "asynchronous", "weighting": "samples"})
    with serving(tmp_path, given, TERMS, authority) as running, joined(running, "mallory") as connection:
        with pytest.raises(RefusedByServer, match="`num_samples` must be positive"):
            connection.send("x", 0, 0, encoded(running), weight)
        assert connection.send("y", 0, 0, encoded(running), 5.0).outcome == "applied"


def test_a_client_takes_no_model_that_is_longer_than_it_allows(running):
    with joined(running, "anna") as connection:
        connection.max_bytes = running.book.recipe.down.num_bytes - 1
        with pytest.raises(RefusedByServer, match="The server announced a model of"):
            connection.fetch()


def test_a_client_cannot_upload_as_another(running, mallory):
    with joined(running, "anna"):
        pass
    before = running.book.ledger.seats["anna"]
    mallory.metadata = (("personax-client", "anna"),)  # what counts without TLS counts for nothing with it
    answer = mallory.send(
        "as-anna", running.book.ledger.seats["mallory"].next_update, running.book.version, encoded(running)
    )
    assert answer.outcome == "applied" and running.book.ledger.seats["anna"] == before
    assert running.book.ledger.seats["mallory"].last_upload == "as-anna"


def test_only_an_operator_sees_the_others(running, mallory):
    from personax.live.status import FederationStatus

    assert [one.name for one in FederationStatus.from_json(mallory.status()).clients] == ["mallory"]
    operator = running.connect("operator")
    assert "mallory" in [one.name for one in FederationStatus.from_json(operator.status()).clients]
    with pytest.raises(RefusedByServer, match="only clients may"):
        operator.fetch()
    operator.close()


def test_a_replayed_upload_is_applied_once(running, mallory):
    update, version = running.book.ledger.seats["mallory"].next_update, running.book.version
    content = encoded(running)
    assert mallory.send("once", update, version, content).outcome == "applied"
    events, params = running.book.ledger.num_events, jax.tree.map(np.asarray, running.book.state.params)
    for id in ("once", "once", "another"):
        assert mallory.send(id, update, version, content).outcome == "duplicate"
    assert running.book.ledger.num_events == events
    jax.tree.map(np.testing.assert_array_equal, params, running.book.state.params)


def test_a_truncated_stream_is_refused(running, mallory):
    content = encoded(running)
    head = upload_of(running, mallory, content)
    send = lambda: list(
        mallory.calls["Exchange"](iter([wire.MessagePart(head, content[: len(content) // 2])]), timeout=5)
    )
    words = refused(send, grpc.StatusCode.DATA_LOSS)
    assert "the stream was cut" in words
    spoiled = content[:-1] + bytes([content[-1] ^ 1])
    send = lambda: list(mallory.calls["Exchange"](iter([wire.MessagePart(head, spoiled)]), timeout=5))
    assert "checksum" in refused(send, grpc.StatusCode.DATA_LOSS)
    assert running.service.gate.refusals["mallory", "broken"] == 2


def test_a_stalled_stream_is_closed_and_blocks_no_other(running, mallory):
    content = encoded(running)
    head = upload_of(running, mallory, content)

    def slowly():
        yield wire.MessagePart(head, content[:10])
        time.sleep(3)

    stalled = mallory.calls["Exchange"](slowly(), timeout=10)
    with joined(running, "bert") as other:
        begin = time.monotonic()
        update = running.book.ledger.seats["bert"].next_update
        assert other.send("quick", update, running.book.version, content).outcome == "applied"
        assert time.monotonic() - begin < 1.0
    assert "Nothing came" in refused(lambda: list(stalled), grpc.StatusCode.DEADLINE_EXCEEDED)


def test_a_client_that_does_not_read_a_large_model_blocks_no_other(tmp_path, authority, monkeypatch):
    monkeypatch.setattr(service, "SLOWEST", 1e9)
    given = recipe(federation=SimpleNamespace(x=np.zeros((1, 200_000), np.float32)))
    terms = Terms(num_clients=3, rate=1e5, stall=0.5, max_transfers=1)
    with (
        serving(tmp_path, given, terms, authority) as large,
        joined(large, "mallory") as lazy,
        joined(large, "anna") as other,
    ):
        unread = lazy.calls["Fetch"](wire.Ask(run=lazy.run, have=-1), timeout=20)
        while not large.service.transfers.locked():
            time.sleep(0.01)
        assert len(other.fetch().content) == given.down.num_bytes > 1 << 20
        assert large.service.gate.refusals["mallory", "stalled"] == 1
        unread.cancel()


def test_a_gigantic_announcement_is_refused_before_anything_is_kept(running, mallory):
    content, before = encoded(running), running.service.gate.refusals["mallory", "size"]
    head = upload_of(running, mallory, content, num_bytes=2**50)
    words = refused(
        lambda: list(mallory.calls["Exchange"](iter([wire.MessagePart(head, content)]), timeout=5)),
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    assert str(2**50) in words and running.service.gate.refusals["mallory", "size"] == before + 1
    more = upload_of(running, mallory, content, num_bytes=10)
    refused(
        lambda: list(mallory.calls["Exchange"](iter([wire.MessagePart(more, content)]), timeout=5)),
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    huge = wire.MessagePart(head, bytes(6 << 20))  # longer than any message may be
    refused(
        lambda: list(mallory.calls["Exchange"](iter([huge]), timeout=5)),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e300])
def test_numbers_that_are_not_finite_never_reach_the_model(running, mallory, number, caplog):
    seat = running.book.ledger.seats["mallory"]
    answer = mallory.send("bad", seat.next_update, running.book.version, encoded(running, number))
    assert answer.outcome == "refused" and "must be finite" in answer.words
    assert running.book.ledger.seats["mallory"].num_refused == seat.num_refused + 1
    assert "mallory" in caplog.text


def test_wrong_shapes_are_refused(running, mallory):
    given = running.book.recipe.up
    turned = {
        "delta": jax.tree.map(lambda leaf: np.zeros(leaf.shape[::-1], leaf.dtype), running.book.recipe.params_shape)
    }
    other = Layout.of({**turned, "extra": ()})
    content = other.encode({**turned, "extra": ()})
    content = content[: given.num_bytes].ljust(given.num_bytes, b"\0")
    seat = running.book.ledger.seats["mallory"]
    answer = mallory.send("shapes", seat.next_update, running.book.version, content)
    assert answer.outcome == "refused" and "delta" in answer.words
    answer = mallory.send("noise", seat.next_update + 1, running.book.version, bytes(given.num_bytes))
    assert answer.outcome == "refused"
    answer = mallory.send("future", seat.next_update + 2, running.book.version + 1, encoded(running))
    assert answer.outcome == "refused" and "newest is" in answer.words


def test_a_norm_far_beyond_the_others_is_refused(running, mallory):
    for name in ("anna", "bert"):
        with joined(running, name) as other:
            update = running.book.ledger.seats[name].next_update
            assert other.send(f"{name}-{update}", update, running.book.version, encoded(running)).outcome == "applied"
    update = running.book.ledger.seats["mallory"].next_update
    answer = mallory.send("loud", update, running.book.version, encoded(running, 0.01 * 21))
    assert answer.outcome == "refused" and "far beyond" in answer.words
    assert mallory.send("fine", update + 1, running.book.version, encoded(running, 0.01 * 19)).outcome == "applied"


def test_a_norm_far_beyond_the_others_is_clipped_where_that_is_wanted(tmp_path):
    from personax.live.exchange import Arrived

    book = make_book(tmp_path, recipe(num_rounds=100), Terms(num_clients=3, outliers="clip", outlier_factor=2.0))
    fill = lambda scale: book.recipe.up.encode(
        {"delta": jax.tree.map(lambda leaf: np.full(leaf.shape, scale), book.recipe.params_shape), "extra": ()}
    )
    arrived = lambda scale: Arrived("x", 0, 0, 1.0, fill(scale))
    for name in NAMES:
        book.join(name)
    for name in NAMES[:2]:
        book.settle(name, arrived(0.1))
    before = jax.tree.map(np.asarray, book.state.params)
    assert book.settle("cleo", arrived(50.0)).words.startswith("Clipped")
    moved = jax.tree.map(lambda old, new: old - np.asarray(new), before, book.state.params)
    expected = 0.5 * 2 * 0.1  # the server's step size, the factor, the others' entries
    jax.tree.map(lambda leaf: np.testing.assert_allclose(leaf, expected, rtol=1e-5), moved)
    book.journal.close()
    again = make_book(tmp_path, recipe(num_rounds=100), Terms(num_clients=3, outliers="clip", outlier_factor=2.0))
    jax.tree.map(np.testing.assert_array_equal, again.state.params, book.state.params)


def test_who_asks_too_often_must_wait(authority, tmp_path):
    with serving(tmp_path, recipe(), Terms(num_clients=3, rate=5.0, max_streams=2), authority) as slow:
        connection = slow.connect("mallory", patience=0.3)
        connection.register(slow.book.recipe.digest)
        ask = wire.Ask(run=connection.run, have=slow.book.version)
        with pytest.raises(grpc.RpcError) as caught:
            for _ in range(30):
                list(connection.calls["Fetch"](ask, timeout=5))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert slow.service.gate.refusals["mallory", "rate"] >= 1
        time.sleep(1.0)
        connection.patience = 0.0
        with pytest.raises(Unreachable, match="more than 5 requests a second"):  # uploads on one stream count, too
            for update in range(30):
                connection.send(f"x-{update}", update, slow.book.version, encoded(slow))
        other = slow.connect("anna")
        other.register(slow.book.recipe.digest)
        other.close()
        connection.close()


def test_a_slow_rate_lets_an_upload_in(authority, tmp_path):
    """A budget of less than two requests: the stream and its first upload are one."""
    with serving(tmp_path, recipe(), Terms(num_clients=3, rate=0.9), authority) as slow:
        connection = slow.connect("mallory")
        connection.register(slow.book.recipe.digest)
        assert connection.send("x", 0, slow.book.version, encoded(slow)).outcome == "applied"
        connection.close()


def test_streams_of_one_client_are_counted(tmp_path, authority):
    given = recipe("FedAvg")
    with serving(tmp_path, given, Terms(num_clients=3, rate=1e5, max_streams=2), authority) as waiting:
        connection = waiting.connect("mallory")
        connection.register(given.digest)
        ask = wire.Ask(run=connection.run, have=0, wait_seconds=2.0)  # the round begins with three clients
        held = [connection.calls["Fetch"](ask, timeout=10) for _ in range(2)]
        time.sleep(0.3)
        words = refused(lambda: list(connection.calls["Fetch"](ask, timeout=5)), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert "2 streams open" in words
        assert all(next(iter(one)).about.unchanged for one in held)
        connection.close()


def test_more_connections_give_a_client_no_more_streams(tmp_path, authority):
    """Limits count for a certificate, whatever the number of connections; other clients have their own."""
    given = recipe("FedAvg")
    with serving(tmp_path, given, Terms(num_clients=5, rate=1e5, max_streams=2), authority) as waiting:
        made = [waiting.connect("mallory") for _ in range(12)]
        for connection in made:
            connection.register(given.digest)
        ask = wire.Ask(run=made[0].run, have=0, wait_seconds=1.0)
        held = [connection.calls["Fetch"](ask, timeout=10) for connection in made]
        codes = []
        for one in held:
            try:
                assert next(one).about.unchanged
            except grpc.RpcError as error:
                codes.append(error.code())
        assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 10
        assert waiting.service.gate.refusals["mallory", "streams"] == 10
        with joined(waiting, "anna") as other:
            assert other.fetch().version == 0
        for connection in made:
            connection.close()


def flood(running, num, hold):
    """Many bare connections from one peer, none of which says anything; how many were still open after `hold` s."""
    sockets = []
    try:
        for _ in range(num):
            one = socket.socket()
            one.settimeout(0.5)
            with contextlib.suppress(OSError):
                one.connect(("127.0.0.1", running.port))
            sockets.append(one)
        time.sleep(hold)
        return sum(is_open(one) for one in sockets)
    finally:
        for one in sockets:
            one.close()


def is_open(one):
    one.setblocking(False)
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize("num", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_flood_of_connections_does_not_disturb_connected_clients(running, num):
    import threading

    with joined(running, "cleo") as other:
        left, slowest, stop = [], [0.0], threading.Event()
        thread = threading.Thread(target=lambda: left.append(flood(running, num, 0.3)))
        thread.start()
        while thread.is_alive() and not stop.is_set():
            begin = time.monotonic()
            update = running.book.ledger.seats["cleo"].next_update
            assert other.send(f"cleo-{update}", update, running.book.version, encoded(running)).outcome == "applied"
            slowest[0] = max(slowest[0], time.monotonic() - begin)
            time.sleep(0.01)
        thread.join()
    assert left[0] <= TERMS.max_connections, "more connections were kept than the server allows"
    assert slowest[0] < 5.0
    until = time.monotonic() + 15
    while time.monotonic() < until:  # when it is over, newcomers get in again
        with contextlib.suppress(Unreachable), joined(running, "anna"):
            return
    pytest.fail("nobody got in after the flood")


def test_an_upload_for_one_federation_is_not_sent_to_another(authority, tmp_path):
    """Both servers call their runs the same, and the second is as genuine as the first."""
    other, given = tmp_path / "certificates", recipe("APFL", num_rounds=100)
    certificates.create(other, ["127.0.0.1", "localhost"], NAMES)
    entered = lambda running: clients_of(running, tmp_path / "state", NAMES[:1])
    with serving(tmp_path / "one", given, certificates=authority) as first, entered(first) as (client,):
        client.enter()
        client.train()  # killed before the upload leaves
    with serving(tmp_path / "two", given, certificates=other) as second, entered(second) as (client,):
        with pytest.raises(ValueError, match=r"belongs to the federation of authority .* Nothing was sent"):
            client.enter()
        assert not [line for line in read_lines(tmp_path / "two") if line["what"] == "upload"]


@pytest.mark.parametrize("name", ["../anna", "anna\x1b[2J", "anna bert", "", "x" * 81], ids=repr)
def test_names_of_clients_are_checked(name):
    context = SimpleNamespace(invocation_metadata=lambda: ((gate.NAME_KEY, name),))
    with pytest.raises(gate.Denied, match="name"):
        gate.Gate(TERMS, None).identify(context)
