"""Attacks on the server itself by one certified client: its disk, its log, its connections, its patience."""

import contextlib
import errno
import io
import json
import logging
import os
import random
import socket
import ssl
import time

import grpc
import jax
import numpy as np
import pytest
import safetensors.numpy
from rich.console import Console

from personax.data.locks import sole_user
from personax.experiment.config import Terms
from personax.live import certificates, connections, wire
from personax.live.connection import RefusedByServer
from personax.live.journal import Journal
from personax.live.status import FederationStatus
from personax.live.view import table_of
from tests.live.parts import NAMES, make_book, recipe, serving
from tests.live.test_book import Clock, upload

pytestmark = [pytest.mark.xdist_group("live"), pytest.mark.attack]
TERMS = Terms(num_clients=3, rate=1e5)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    place = tmp_path_factory.mktemp("authority") / "certificates"
    certificates.create(place, ["127.0.0.1", "localhost"], [*NAMES, "mallory"])
    return place


@contextlib.contextmanager
def joined(running, name, **keywords):
    connection = running.connect(name, **{"patience": 2.0, **keywords})
    connection.register(running.book.recipe.digest)
    try:
        yield connection
    finally:
        connection.close()


def encoded(running, scale=0.01):
    shapes = {"delta": running.book.recipe.params_shape, "extra": running.book.recipe.extra_shape}
    return running.book.recipe.up.encode(jax.tree.map(lambda leaf: np.full(leaf.shape, scale, leaf.dtype), shapes))


def raw_call(connection, name):
    """A call that sends bytes without encoding them."""
    method = wire.METHODS[name]
    kind = ("stream" if method.many_in else "unary", "stream" if method.many_out else "unary")
    call = getattr(connection.channel, f"{kind[0]}_{kind[1]}")(method.path)

    def send(content):
        given = iter([content]) if method.many_in else content
        found = call(given, timeout=10, metadata=connection.metadata)
        return list(found) if method.many_out else found

    return send


def code_of(send, content):
    try:
        send(content)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


# Reports


def test_reports_fill_no_disk(tmp_path, authority, attack):
    terms = Terms(num_clients=3, rate=1e5, bytes_per_day=20_000)
    given = recipe("APFL")
    score = next(iter(given.training.scorings))
    with serving(tmp_path, given, terms, authority) as running, joined(running, "mallory") as connection:
        before = (tmp_path / "journal.jsonl").stat().st_size
        for i in range(40):
            with attack("reports that fill the disk"):
                numbers = {score: {f"metric {j} of report {i}": float(j) for j in range(100)}}
                report = {"version": 0, "numbers": numbers, "samples": 1, "train_samples": 1}
                assert connection.report(report, i) is False
        assert (tmp_path / "journal.jsonl").stat().st_size - before < 20_000 + 10_000  # the last one may exceed it
        assert running.service.gate.refusals["mallory", "daily bytes"] > 30
        running.book.save()
        (text,) = (tmp_path / "checkpoints").glob("*.json")
        assert text.stat().st_size < 20_000
        with joined(running, "anna") as other:
            other.report({"version": 0, "numbers": {score: {"accuracy": 0.5}}, "samples": 1, "train_samples": 1}, 0)
        assert "anna" in running.book.ledger.reports


def test_the_history_of_reports_is_stored_once(tmp_path):
    book = make_book(tmp_path, recipe("APFL", num_rounds=10**4))
    book.join("anna")
    sizes = []
    for update in range(60):
        book.settle("anna", upload(book, update))
        book.report("anna", {"numbers": {"APFL": {"accuracy": 0.5}}, "version": 0, "samples": 9, "train_samples": 9})
        book.save()
        sizes.append(max((tmp_path / "checkpoints").glob("*.json")).stat().st_size)
    assert sizes[-1] - sizes[5] < 100, "a checkpoint does not grow with the history"


def test_refused_uploads_fill_no_disk(tmp_path, authority, attack):
    terms = Terms(num_clients=3, rate=1e5, bytes_per_day=5_000)
    with serving(tmp_path, recipe(), terms, authority) as running, joined(running, "mallory", patience=0.0) as bad:
        content, refused = encoded(running, 1e9), 0
        for update in range(60):
            with attack("refused uploads that fill the disk"):
                try:
                    assert bad.send(f"x-{update}", update, 0, content).outcome == "refused"
                    refused += 1
                except OSError as error:
                    assert "Try again tomorrow" in str(error)
        assert 5 < refused < 30
        assert (tmp_path / "journal.jsonl").stat().st_size < 10_000


# Messages


def malformed(rng):
    """A message that no client sends: bytes, JSON of other types, numbers out of range, deep nesting."""
    kinds = [
        lambda: rng.randbytes(rng.randrange(200)),
        lambda: b"[" * 9000 + b"]" * 9000,
        lambda: b'{"run": ' * 4000,
        lambda: b'{"run": 5}',
        lambda: b'{"version": -1, "update": 18446744073709551615, "have": "x", "client": 3, "protocol": -4}',
        lambda: b'{"numbers": {"a": {"b": "c"}}, "have": 1e400, "newcomer": "never", "client": []}',
        lambda: b'{"run": "\x1b[2J\x07',
        lambda: b"\xff\xfe" + rng.randbytes(20),
    ]
    return rng.choice(kinds)()


@pytest.mark.parametrize("num", [80, pytest.param(2000, marks=pytest.mark.slow)])
def test_malformed_messages_are_refusals_within_the_rate(num, tmp_path, authority, attack, caplog, capfd):
    rng, allowed = random.Random(0), Terms(num_clients=3, rate=1e5)
    codes = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED}
    with serving(tmp_path, recipe(), allowed, authority) as running, joined(running, "mallory") as connection:
        sends = {name: raw_call(connection, name) for name in wire.METHODS}
        before = (tmp_path / "journal.jsonl").stat().st_size
        for _ in range(num):
            name, content = rng.choice(list(sends)), malformed(rng)
            with attack("malformed messages"):
                framed = len(content).to_bytes(4, "little") + content if rng.random() < 0.5 else content
                found = code_of(sends[name], framed if name == "Exchange" else content)
                assert found in codes or (name == "Status" and found == grpc.StatusCode.OK), (name, content[:80], found)
        assert running.service.gate.refusals["mallory", "malformed"] > num / 3
        assert (tmp_path / "journal.jsonl").stat().st_size == before
        with joined(running, "anna") as other:
            assert other.send("fine", 0, 0, encoded(running)).outcome == "applied"
    assert len(caplog.records) < 10, "what repeats is logged once"
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr()) and "\x1b" not in caplog.text


def test_malformed_messages_do_not_bypass_the_rate_limit(tmp_path, authority, attack):
    with serving(tmp_path, recipe(), Terms(num_clients=3, rate=1.0), authority) as running:
        connection = running.connect("mallory")
        send = raw_call(connection, "Register")
        with attack("malformed messages beyond the rate", 20):
            found = [code_of(send, b"nonsense") for _ in range(20)]
            assert grpc.StatusCode.RESOURCE_EXHAUSTED in found and running.service.gate.refusals["mallory", "rate"] > 5
        connection.close()


def test_a_message_without_a_certificate_of_a_client_is_not_even_read(tmp_path, authority):
    with serving(tmp_path, recipe(), TERMS, authority) as running:
        operator = running.connect("operator")
        assert code_of(raw_call(operator, "Register"), b"nonsense") == grpc.StatusCode.PERMISSION_DENIED
        assert running.service.gate.refusals["operator", "malformed"] == 0
        operator.close()


def test_empty_pieces_end_an_upload(tmp_path, authority, attack):
    with serving(tmp_path, recipe(), TERMS, authority) as running, joined(running, "mallory") as connection:
        content = encoded(running)
        head = wire.UploadHeader(connection.run, "x", 0, 0, num_bytes=len(content))

        def parts():
            yield wire.MessagePart(head, b"")
            for _ in range(200):
                yield wire.MessagePart(wire.UploadHeader(), b"")

        with attack("uploads in endless pieces"), pytest.raises(grpc.RpcError) as caught:
            list(connection.calls["Exchange"](parts(), timeout=10))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "pieces" in caught.value.details()


def test_what_a_client_repeats_does_not_fill_the_log(tmp_path, attack, caplog):
    book = make_book(tmp_path, recipe(num_rounds=10**4))
    book.join("mallory")
    book.settle("mallory", upload(book, 5))
    caplog.clear()
    with attack("refused uploads that fill the disk", 500):
        for i in range(500):
            assert book.settle("mallory", upload(book, 0, id=f"other {i}")).outcome == "duplicate"
        assert 0 < len(caplog.records) <= 30


CONTROL = "x\x1b[2J\x1b]0;owned\x07\r\n2026 server: all is well"


def test_control_characters_never_reach_the_log_or_a_terminal(tmp_path, authority, attack, caplog):
    given = recipe("APFL")
    score = next(iter(given.training.scorings))
    with serving(tmp_path, given, TERMS, authority) as running, joined(running, "mallory") as connection:
        up = running.book.recipe.up
        named = safetensors.numpy.save({CONTROL: np.zeros(3, np.float32)})
        with attack("control characters"):
            answer = connection.send("names", 0, 0, named[: up.num_bytes].ljust(up.num_bytes, b" "))
            assert answer.outcome == "refused" and "\x1b" not in answer.words
        report = {"version": 0, "numbers": {score: {CONTROL: 1.0}}, "samples": 1, "train_samples": 1}
        with attack("control characters"), pytest.raises(RefusedByServer, match="without control characters"):
            connection.report(report, 0)
        with attack("control characters"), pytest.raises(RefusedByServer):
            connection.send(CONTROL, 1, 0, encoded(running))
        connection.run = CONTROL
        with attack("control characters"), pytest.raises(RefusedByServer) as caught:
            connection.fetch()
        assert "\x1b" not in str(caught.value)
        logging.getLogger("personax.live").warning("%s did %s", "mallory", CONTROL)
        told = [record.getMessage() for record in caplog.records]
        assert told and all(text.isprintable() for text in told)
        lines = (tmp_path / "journal.jsonl").read_text()
        assert "\x1b" not in lines and "\r" not in lines


@pytest.mark.parametrize("update", [2**64 - 1, 2**63 - 1, 2**31, 2_000_000])
def test_a_huge_count_of_updates_does_not_lock_a_client_out(update, tmp_path, authority, attack):
    with serving(tmp_path, recipe(), TERMS, authority) as running, joined(running, "mallory") as connection:
        content = encoded(running)
        head = wire.pack(
            wire.MessagePart(wire.UploadHeader(connection.run, "x", 0, 0, num_bytes=len(content)), content)
        )
        wide = b'"update":%d,' % update
        text = head[4 : 4 + int.from_bytes(head[:4], "little")].rstrip().replace(b'{"run"', b"{" + wide + b'"run"')
        with attack("a huge count of updates"):
            found = code_of(raw_call(connection, "Exchange"), len(text).to_bytes(4, "little") + text + content)
            assert found == grpc.StatusCode.INVALID_ARGUMENT
        assert connection.register(running.book.recipe.digest).next_update == 0
        assert connection.send("next", 0, 0, content).outcome == "applied"


# Connections


def wait_for(condition, seconds=30):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_one_certificate_cannot_take_all_connections(tmp_path, authority, attack):
    terms = Terms(num_clients=3, rate=1e5, max_connections=40, max_client_connections=4)
    with serving(tmp_path, recipe(), terms, authority) as running, joined(running, "anna") as other:
        made = [running.connect("mallory", patience=0.0) for _ in range(30)]
        for connection in made:
            with attack("connections of one certificate"), contextlib.suppress(OSError, RefusedByServer):
                connection.register(running.book.recipe.digest)
        wait_for(lambda: running.service.gate.refusals["mallory", "connections"] >= 20)
        wait_for(lambda: len(running.service.gate.connections.peers["mallory"]) <= 4)
        assert other.fetch().version == 0
        with joined(running, "bert", patience=10.0) as newcomer:
            assert newcomer.fetch().version == 0
        for connection in made:
            connection.close()


def test_silent_connections_are_closed_when_there_are_many(tmp_path, authority, monkeypatch, attack):
    """With a certificate the handshake succeeds, so gRPC's own limit for those without one does not apply."""
    monkeypatch.setattr(connections, "SILENT", 0.5)
    place = authority / "clients" / "mallory"
    context = ssl.create_default_context(cafile=str(place / "ca.pem"))
    context.load_cert_chain(place / "cert.pem", place / "key.pem")
    context.set_alpn_protocols(["h2"])
    terms = Terms(num_clients=3, rate=1e5, max_connections=20)
    with serving(tmp_path, recipe(), terms, authority) as running:
        made = []
        for _ in range(15):
            plain = socket.create_connection(("127.0.0.1", running.port), 5)
            made.append(context.wrap_socket(plain, server_hostname="127.0.0.1"))
        with attack("connections of one certificate", 15):
            wait_for(lambda: running.service.gate.refusals["silent peers", "connections"] >= 15)
        with joined(running, "anna", patience=10.0) as other:
            assert other.fetch().version == 0
        for one in made:
            one.close()


# Certificates and clocks


def test_a_revoked_client_with_an_open_request_gets_no_model(tmp_path, authority, attack):
    given = recipe("FedAvg")  # a round begins with three clients: until then a request waits
    certificates.add(authority, "gone")
    with serving(tmp_path, given, TERMS, authority) as running, joined(running, "gone") as connection:
        ask = wire.Ask(run=connection.run, have=-1, wait_seconds=20.0)
        waiting = connection.calls["Fetch"](ask, timeout=30)
        wait_for(lambda: running.service.gate.streams["gone"] == 1)
        certificates.revoke(authority, "gone")
        time.sleep(0.6)
        with joined(running, "anna"), joined(running, "bert"):  # the round begins, and the request is answered
            with attack("a revoked client with an open request"), pytest.raises(grpc.RpcError) as caught:
                next(waiting)
            assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED


def test_deadlines_follow_a_monotonic_clock(tmp_path, attack):
    """Someone who sets the clock of the machine neither ends a round nor keeps it open."""
    monotonic, wall = Clock(), Clock()
    book = make_book(tmp_path, recipe("FedAvg"), Terms(num_clients=3, deadline=60.0), clock=monotonic, wall=wall)
    for name in NAMES:
        book.join(name)
    for name in NAMES[:2]:
        book.settle(name, upload(book, 0))
    with attack("a clock that is set"):
        wall.now += 1e6
        assert not book.advance() and book.version == 0
    wall.now -= 1e7
    monotonic.now += 61
    assert book.advance() and book.version == 1
    at = book.now
    book.save()
    book.journal.close()
    again = make_book(tmp_path, recipe("FedAvg"), Terms(num_clients=3), clock=monotonic, wall=wall)
    assert again.now >= at, "time does not go back at a restart"


# Files


@pytest.mark.parametrize("name", ["journal.jsonl", "state/0", "state", "server.lock"])
def test_links_are_not_followed(name, tmp_path, attack):
    victim = tmp_path / "precious"
    if name == "state":
        victim.mkdir()
    else:
        victim.write_text("precious")
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(victim)
    with attack("a link in place of a file"), pytest.raises((ValueError, OSError)) as caught:
        if name == "server.lock":
            with sole_user(run / name):
                pass
        else:
            Journal(run)
    assert "link" in str(caught.value) or caught.value.errno == errno.ELOOP
    assert victim.is_dir() or victim.read_text() == "precious"


def test_states_are_for_their_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        book = make_book(tmp_path, terms=Terms(num_clients=3, save_every=1e-9))
        book.join("anna")
        book.settle("anna", upload(book, 0))
        book.save()
        (tmp_path / "journal.jsonl").chmod(0o666)  # of an older version
        book.journal.close()
        make_book(tmp_path).journal.close()
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 6
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {"0o600"}


# What an operator sees of a hostile server


def test_the_status_of_a_hostile_server_is_escaped(attack):
    one = {"name": CONTROL, "seconds_ago": 1.0, "num_applied": 1, "num_refused": 0, "num_late": 0, "staleness": 0}
    one["numbers"] = {CONTROL: {CONTROL: 1.0}}
    table = {key: CONTROL for key in ("name", "algorithm", "mode", "target")} | {"refusals": {CONTROL: 1}}
    table |= {"version": 1, "num_events": 1, "seconds": 1.0, "finished": False, "bytes_up": 0, "bytes_down": 0}
    with attack("control characters"):
        status = FederationStatus.from_json(json.dumps({**table, "clients": [one]}))
        console = Console(record=True, width=400, file=io.StringIO())
        console.print(table_of(status))
        shown = console.export_text()
        assert "\x1b" not in shown and "\x07" not in shown and "owned" in shown
    with attack("a status of other types"), pytest.raises(ValueError):
        FederationStatus.from_json('{"clients": 5}')
