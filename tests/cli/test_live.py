"""The commands of a live federation, its view, its metrics, and how a server ends."""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.request

import jax
import pytest
from cryptography import x509
from rich.console import Console
from typer.testing import CliRunner

from personax.cli import app, certify
from personax.live import certificates, wire
from personax.live import journal as journal_module
from personax.live.certificates import Revocations, identity_of, read_credentials
from personax.live.connection import Unreachable
from personax.live.limits import Limits, read_limits
from personax.live.messages import checksum
from personax.live.ports import require_loopback
from personax.live.status import FederationStatus
from personax.live.view import Metrics, table_of
from tests.live.parts import NAMES, clients_of, recipe, serving

pytestmark = pytest.mark.xdist_group("live")


def personax(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(autouse=True, scope="module")
def untouched():
    """Undo process-wide changes of the command line after each test."""
    handler, files = signal.getsignal(signal.SIGTERM), resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        yield
    signal.signal(signal.SIGTERM, handler)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    jax.config.update("jax_cpu_enable_async_dispatch", True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    place = tmp_path_factory.mktemp("certified") / "certificates"
    ended = personax("certify", "create", place, "--host", "127.0.0.1", "--client", "anna", "--client", "bert")
    assert ended.exit_code == 0, ended.output
    assert "never share it" in ended.output and str(place / "clients" / "anna") in ended.output
    return place


def test_private_keys_are_private_and_the_authoritys_is_apart(authority):
    keys = sorted(path.relative_to(authority) for path in authority.rglob("key.pem"))
    assert [str(path.parent) for path in keys] == ["authority", "clients/anna", "clients/bert", "operator", "server"]
    assert all(stat.S_IMODE((authority / path).stat().st_mode) == 0o600 for path in keys)
    signer = (authority / "authority" / "key.pem").read_bytes()
    others = [path for path in authority.rglob("*") if path.is_file() and path.parent.name != "authority"]
    assert all(signer not in path.read_bytes() for path in others)


def test_certificates_name_the_holder_and_the_purpose(authority):
    found = [identity_of(read_credentials(authority / place).certificate) for place in ("server", "clients/bert")]
    assert [(one.name, one.role, one.id) for one in found] == [("server", "server", None), ("bert", "client", 1)]
    parsed = x509.load_pem_x509_certificate((authority / "clients" / "bert" / "cert.pem").read_bytes())
    assert not parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    ca = x509.load_pem_x509_certificate((authority / "authority" / "ca.pem").read_bytes())
    parsed.verify_directly_issued_by(ca)


def test_clients_are_added_and_revoked(tmp_path):
    personax("certify", "create", tmp_path / "c")
    ended = personax("certify", "add", "dora", "--folder", tmp_path / "c")
    assert ended.exit_code == 0 and str(tmp_path / "c" / "clients" / "dora") in ended.output
    serial = identity_of(read_credentials(tmp_path / "c" / "clients" / "dora").certificate).serial
    listed = tmp_path / "c" / "server" / "revoked.pem"
    trusted = (tmp_path / "c" / "server" / "ca.pem").read_bytes()
    assert serial not in Revocations(listed, trusted).serials
    assert "dora is revoked" in personax("certify", "revoke", "dora", "--folder", tmp_path / "c").output
    assert serial in Revocations(listed, trusted).serials
    certificates.create(tmp_path / "other", ["localhost"], [])
    with pytest.raises(ValueError, match="must be signed by this federation's authority"):
        Revocations(listed, (tmp_path / "other" / "server" / "ca.pem").read_bytes())
    for words, told in (
        (("add", "dora x"), "letters, digits"),
        (("revoke", "dora"), "has no valid certificate of `dora`"),
        (("add", "erik", "--folder", tmp_path), "No authority found in"),
    ):
        folder = () if "--folder" in words else ("--folder", tmp_path / "c")
        ended = personax("certify", *words, *folder)
        assert ended.exit_code == 1 and told in ended.output
    assert "already has an authority" in personax("certify", "create", tmp_path / "c").output


def test_a_key_that_others_can_read_is_refused(authority, tmp_path):
    place = tmp_path / "anna"
    place.mkdir()
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (place / name).write_bytes((authority / "clients" / "anna" / name).read_bytes())
    (place / "key.pem").chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_credentials(place)


@pytest.mark.parametrize("address", ["0.0.0.0:7000", "10.0.0.1:7000", "example.org:7000", "[::]:7000"])
def test_without_tls_only_this_machine_is_served(address, tmp_path):
    with pytest.raises(ValueError, match="Without TLS"):
        require_loopback(address)
    config = tmp_path / "c.toml"
    personax("init", config)
    given = ("--algorithm", "FedAvg", "--out", tmp_path / "run")
    ended = personax("serve", config, "--listen", address, "--insecure", *given)
    assert ended.exit_code == 1 and "Without TLS" in ended.output
    assert "Give either --" in personax("serve", config, "--listen", address, *given).output
    both = ("--insecure", "--identity", tmp_path)
    assert "Give either --" in personax("serve", config, "--listen", address, *given, *both).output
    assert "Give either --" in personax("join", address, "--data", config).output


def test_configurations_that_cannot_be_served_are_reported(tmp_path):
    config = tmp_path / "c.toml"
    personax("init", config)
    serve = lambda *words: personax("serve", config, "--insecure", "--out", tmp_path / "run", *words).output
    assert "Choose one with --algorithm" in serve()
    assert "shares nothing" in serve("--algorithm", "Local")
    assert "`live.sample.shape.0`: input should be a valid integer" in serve("--set", "live.sample.shape=['a']")
    assert "`live` has no setting `deadlin`. Did you mean `deadline`?" in serve("--set", "live.deadlin=3")
    assert "describe a sample in `[live.sample]`" in serve(
        "--algorithm", "FedAvg", "--set", "data={kind='file', path='x.csv'}"
    )


def test_limits_come_from_a_file_of_the_owner(tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text('objectives = ["Erm", "Meta"]\nmax_steps = 20\npatience = 5\n')
    assert read_limits(path) == Limits(("Erm", "Meta"), max_steps=20, patience=5.0)
    for text, told in (
        ("max_stepz = 3", "has no limit `max_stepz`. Did you mean `max_steps`?"),
        ('objectives = ["Evil"]', "`objectives` has no objective `Evil`. There are: Aruba,"),
        ("max_bytes = 0", "invalid `max_bytes`"),
        ("x", "is not valid TOML"),
    ):
        path.write_text(text)
        ended = personax("join", "127.0.0.1:1", "--data", path, "--insecure", "anna", "--limits", path)
        assert ended.exit_code == 1 and told in ended.output, ended.output


def test_the_command_line_is_light_and_names_the_extra_to_install():
    """It imports nothing of the extra, and without the extra a live command names the missing package."""
    heavy = ("grpc", "cryptography", "prometheus_client")
    code = (
        "import sys; from personax.cli import app\n"
        f"print([m for m in {heavy} if m in sys.modules], flush=True)\n"
        "sys.modules['grpc'] = None\n"
        "app(['status', '127.0.0.1:1', '--insecure'])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.strip() == "[]" and certify.group.registered_commands
    assert shown.returncode == 1 and "pip install 'personax[live]'" in shown.stderr, shown.stderr


def test_status_finds_the_operators_certificate_by_itself(authority, tmp_path, monkeypatch):
    monkeypatch.chdir(authority.parent)
    with serving(tmp_path, recipe(), None, authority) as running:
        shown = personax("status", running.address)
    assert shown.exit_code == 0 and "FedAsync" in shown.output, shown.output


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A server to which a client has reported a number."""
    place = tmp_path_factory.mktemp("told")
    with serving(place / "run", recipe(num_rounds=100)) as running:
        with clients_of(running, place, NAMES[:2]) as clients:
            for client in clients:
                client.enter()
                client.send(client.train())
            running.book.report("anna", {"numbers": {"FedAsync": {"accuracy": 0.5}}, "samples": 4, "train_samples": 16})
        yield running


def test_status_shows_the_clients_and_what_they_reported(told):
    ended = personax("status", told.address, "--insecure")
    assert ended.exit_code == 0 and "anna" in ended.output and "50.0" in ended.output, ended.output
    shown = FederationStatus.from_json(personax("status", told.address, "--insecure", "--json").output)
    assert [one.num_applied for one in shown.clients] == [1, 1] and shown.num_events == 2
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table_of(shown))
    assert "FedAsync, asynchronous" in console.export_text()
    console.file.close()


def test_prometheus_reads_the_same_numbers(told):
    server, thread = Metrics(told.service.current_status).start(0)
    try:
        page = urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=5).read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
    for line in (
        "personax_updates_total 2.0",
        'personax_client_updates_total{client="bert",outcome="applied"} 1.0',
        'personax_client_score{client="anna",metric="accuracy",score="FedAsync"} 0.5',
    ):
        assert line in page, page


def test_a_server_whose_disk_is_full_stops_and_tells_its_clients(tmp_path, monkeypatch):
    given = recipe(num_rounds=100)
    with serving(tmp_path / "run", given) as running, clients_of(running, tmp_path, NAMES[:1]) as (client,):
        client.enter()
        client.send(client.train())
        client.connection.patience = 0.5
        upload = client.train()
        full = lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))
        with monkeypatch.context() as patch:
            patch.setattr(journal_module.os, "pwritev", full)
            with pytest.raises(Unreachable, match=r"cannot write to its disk|stopping|failed to connect"):
                client.send(upload)
            running.thread.join(20)
        assert isinstance(running.error, OSError) and "No space" in str(running.error)
    with serving(tmp_path / "run", given) as again:
        assert again.book.ledger.num_events == 1
        with clients_of(again, tmp_path, NAMES[:1]) as (client,):
            client.enter()  # and sends again what was not taken
            assert again.book.ledger.num_events == 2


def test_a_shutdown_does_not_wait_for_clients_that_train(tmp_path):
    """Their streams are open and nothing is under way; the server that comes back on another port settles the rest."""
    given = recipe(num_rounds=100)
    with serving(tmp_path / "run", given) as running, clients_of(running, tmp_path, NAMES[:1]) as (client,):
        client.enter()
        client.send(client.train())
        until = time.monotonic() + 5
        while not running.service.idle:  # it has answered, and waits for the next upload
            assert time.monotonic() < until
            time.sleep(0.01)
        begin = time.monotonic()
        running.stop()
        assert time.monotonic() - begin < 5 and running.error is None and not running.service.idle
        client.connection.patience = 0.2
        with pytest.raises(Unreachable):
            client.send(client.train())
    with serving(tmp_path / "run", given) as again, clients_of(again, tmp_path, NAMES[:1]) as (client,):
        client.enter()
        assert again.book.ledger.num_events == again.book.version == 2


def test_a_clean_shutdown_drains_and_saves(tmp_path):
    """An upload that is half complete when the server is stopped is accepted; later requests are refused."""
    given, stopping, over = recipe(num_rounds=100), threading.Event(), threading.Event()
    with serving(tmp_path / "run", given) as running, clients_of(running, tmp_path, NAMES[:1]) as (client,):
        client.enter()
        upload = client.train()
        content = b"".join(given.up.buffers_of(upload.vectors))
        about = {"run": client.connection.run, "id": upload.id, "num_bytes": len(content)}
        half = len(content) // 2

        def slowly():
            yield wire.MessagePart(
                wire.UploadHeader(**about, checksum=checksum(content), want_model=True), content[:half]
            )
            assert stopping.wait(10)
            yield wire.MessagePart(wire.UploadHeader(), content[half:])
            assert over.wait(20)  # clients keep their streams open

        before = running.service.seen["anna"]
        answers = client.connection.calls["Exchange"](slowly(), metadata=client.connection.metadata, timeout=20)
        while running.service.seen["anna"] == before:  # until the first half has been looked at
            time.sleep(0.01)
        running.loop.call_soon_threadsafe(running.stopped.set)
        while not running.service.draining:
            time.sleep(0.01)
        client.connection.patience = 0.2
        with pytest.raises(Unreachable):
            client.connection.fetch()
        stopping.set()
        assert next(iter(answers)).about.outcome == "applied"
        begin = time.monotonic()
        running.stop()
        over.set()
        assert time.monotonic() - begin < 5
        assert running.error is None and running.book.saved == running.book.journal.last
    assert list((tmp_path / "run" / "checkpoints").glob("*.json"))
    with serving(tmp_path / "run", given) as again:
        assert again.book.version == 1 and again.book.ledger.seats["anna"].last_upload == upload.id


def test_a_health_check_stands_next_to_the_metrics():
    problem = [""]
    server, thread = Metrics(lambda: None, lambda: problem[0]).start(0)
    address = f"http://127.0.0.1:{server.server_port}/health"
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            assert answer.status == 200 and answer.read() == b"healthy\n"
        problem[0] = "The server is stopping: disk \x1b[2J full"
        with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(address, timeout=5):
            pass
        assert caught.value.code == 503 and caught.value.read() == b"The server is stopping: disk \\x1b[2J full\n"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
