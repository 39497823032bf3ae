"""Tests of operator commands: return to a saved state, exclude a client, read the audit log."""

import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from personax.cli import app
from personax.experiment.config import Terms
from personax.live import certificates
from personax.live import journal as journal_module
from personax.live.audit import Audit, describe, read_audit, settings_changed
from personax.live.connection import RefusedByServer
from personax.live.journal import read_lines
from personax.live.messages import Mismatch
from personax.live.results import history_of, journal_schedule
from personax.live.saved import versions
from personax.live.server import Address, serve
from tests.live.parts import NAMES, clients_of, make_book, recipe, serving
from tests.live.test_book import same, state_of, upload

pytestmark = pytest.mark.xdist_group("live")
SAVING = Terms(num_clients=3, save_every=1e-9, num_saved=3)


def personax(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_run_returns_to_a_saved_state_and_its_journal_knows(tmp_path):
    given = recipe("SCAFFOLD", num_rounds=100)
    book = make_book(tmp_path, given, SAVING)
    for name in NAMES:
        book.join(name)
    states = {}
    for update in range(6):
        for name in NAMES[:2]:
            book.settle(name, upload(book, update, 0.01))
        book.save()
        states[book.version] = state_of(book)
    assert versions(tmp_path / "saved") == [8, 10, 12]
    events, seats = book.ledger.num_events, dict(book.ledger.seats)
    with pytest.raises(ValueError, match=r"Version 9 is not saved .* Saved versions: 8, 10, 12"):
        book.roll_back(9)
    book.roll_back(8)
    same(state_of(book), states[8])
    assert (events, book.ledger.num_events, book.ledger.rollbacks) == (12, 8, 1)
    assert book.ledger.seats["anna"].next_update == seats["anna"].next_update, "nothing is applied twice"
    assert book.settle("anna", upload(book, 6)).outcome == "late", "it started from the model before"
    again = upload(book, 7)._replace(rollbacks=1)
    assert book.settle("anna", again).outcome == "applied" and book.version == 9
    book.journal.close()
    restarted = make_book(tmp_path, given, SAVING)
    same(state_of(book), state_of(restarted))
    assert restarted.ledger.seats == book.ledger.seats and restarted.ledger.rollbacks == 1
    (line,) = [line for line in read_lines(tmp_path) if line["what"] == "rollback"]
    assert (line["from"], line["version"]) == (12, 8)
    assert journal_schedule(read_lines(tmp_path), list(NAMES)).num_events == 9


def test_a_crash_right_after_a_rollback_keeps_it(tmp_path, monkeypatch):
    book = make_book(tmp_path, recipe(num_rounds=100), SAVING)
    book.join("anna")
    for update in range(3):
        book.settle("anna", upload(book, update))
        book.save()
    monkeypatch.setattr(type(book), "save", lambda self: None)
    book.roll_back(1)
    monkeypatch.undo()
    restarted = make_book(tmp_path, recipe(num_rounds=100), SAVING)
    same(state_of(book), state_of(restarted))
    assert restarted.version == 1 and restarted.ledger.rollbacks == 1 and restarted.ledger.num_events == 1


def test_the_history_of_a_run_leaves_out_what_was_rolled_back():
    report = lambda client, value, time: {"what": "report", "client": client, "numbers": value, "time": time}
    applied = lambda version: {"what": "upload", "outcome": "applied", "state": 1, "version": version}
    lines = [applied(1), report("a", 1, 1.0), applied(2), report("a", 2, 2.0)]
    assert [entry["events"] for entry in history_of(lines, False, 1, 1)] == [1, 2]
    lines += [{"what": "rollback", "state": 1, "version": 1, "events": 1}, report("b", 3, 3.0)]
    assert [entry["reports"] for entry in history_of(lines, False, 1, 1)] == [{"a": 2, "b": 3}]


def test_clients_take_the_model_of_a_rollback_whatever_its_version(tmp_path):
    """A version is used again after a rollback, for another model."""
    given = recipe(num_rounds=100)
    with (
        serving(tmp_path / "run", given, Terms(num_clients=1, rate=1e5, save_every=1e-9)) as running,
        clients_of(running, tmp_path, NAMES[:1]) as (client,),
    ):
        client.enter()
        running.book.save()
        for _ in range(2):
            client.send(client.train())
        waiting = client.train()  # from version 2 of the first branch
        held = jax.tree.map(np.array, client.member.recipe.down.decode(client.model))
        running.book.roll_back(0)
        client.send(waiting)
        assert client.newest.outcome == "late" and client.newest.rollbacks == 1 and client.newest.version == 0
        for _ in range(2):
            client.send(client.train())
        assert client.newest.version == 2 == running.book.version
        ours = client.member.recipe.down.decode(client.model)
        assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(ours), strict=True))
        assert client.connection.fetch(2, rollbacks=0).content is not None, "version 2 before the rollback is another"
        assert client.connection.fetch(2, rollbacks=1).content is None


def test_serve_from_a_version_is_in_the_audit_log_and_in_the_journal(tmp_path):
    given = recipe(num_rounds=100)

    def train(port, service):
        service.book.join("anna")
        for update in range(3):
            service.book.settle("anna", upload(service.book, update))
            service.book.save()
        service.failure = OSError("stop here")

    def look(port, service):
        assert service.book.version == 1
        service.failure = OSError("stop here")

    for opened, version in ((train, None), (look, 1)):  # the first state is saved at once, the next an hour later
        with pytest.raises(OSError, match="stop here"):
            serve(given, tmp_path, Address("127.0.0.1:0", None), roll_back_to=version, opened=opened)
    assert [line["what"] for line in read_audit(tmp_path)] == ["start", "stop", "start", "rollback", "stop"]
    assert [line["what"] for line in read_lines(tmp_path)] == ["join", *["upload"] * 3, "rollback"]


def test_an_excluded_client_uploads_nothing_more_until_it_is_admitted_again(tmp_path):
    given, place = recipe(num_rounds=100), tmp_path / "certificates"
    certificates.create(place, ["127.0.0.1"], NAMES)
    with (
        serving(tmp_path / "run", given, Terms(num_clients=3, rate=1e5), place) as running,
        clients_of(running, tmp_path) as clients,
    ):
        for client in clients:
            client.enter()
            client.send(client.train())
        address, operator = running.address, place / "operator"
        ended = personax("live", "exclude", "anna", "--server", address, "--identity", operator)
        assert ended.exit_code == 0 and "anna is excluded" in ended.output, ended.output
        with pytest.raises(RefusedByServer, match="anna was excluded from this run"):
            clients[0].send(clients[0].train())
        with pytest.raises(RefusedByServer, match="anna was excluded from this run"):
            clients[0].connection.fetch()
        clients[1].send(clients[1].train())
        assert running.book.ledger.num_events == 4
        theirs = personax("live", "exclude", "bert", "--server", address, "--identity", place / "clients" / "anna")
        assert theirs.exit_code == 1 and "only operators may" in theirs.output
        unknown = personax("live", "exclude", "nobody", "--server", address, "--identity", operator)
        assert unknown.exit_code == 1 and "Registered: anna, bert, cleo" in unknown.output
        again = personax("live", "exclude", "anna", "--server", address, "--identity", operator, "--undo")
        assert again.exit_code == 0 and "anna is admitted again" in again.output
        clients[0].send(clients[0].member.held.upload)
        assert running.book.ledger.num_events == 5
    found = [(line["excluded"], line["by"]) for line in read_lines(tmp_path / "run") if line["what"] == "exclude"]
    assert found == [(True, "operator"), (False, "operator")]


def test_an_exclusion_survives_a_restart_and_ends_a_round_that_waits(tmp_path):
    given = recipe("FedAvg", num_rounds=10)
    book = make_book(tmp_path, given)
    for name in NAMES:
        book.join(name)
    for name in NAMES[:2]:
        assert book.settle(name, upload(book, 0)).outcome == "applied"
    book.exclude("cleo", True, "operator")
    assert book.version == 1
    assert set(book.ledger.round.members) == {"anna", "bert"}, "nobody waits for a client that is excluded"
    assert book.settle("cleo", upload(book, 0)).outcome == "refused"
    with pytest.raises(Mismatch, match="dora has not registered"):
        book.exclude("dora", True, "operator")
    book.journal.close()
    restarted = make_book(tmp_path, given)
    assert restarted.ledger.seats["cleo"].excluded and not restarted.trains("cleo")


def test_what_repeats_has_one_line_with_a_count_in_the_audit_log(tmp_path):
    now = [0.0]
    audit = Audit(tmp_path, clock=lambda: now[0])
    assert [audit.count("refusal", client="anna", reason="rate") for _ in range(1000)] == [True] + [False] * 999
    audit.count("login", client="anna")
    now[0] = 700.0
    audit.flush()
    audit.note("exclude", client="anna\x1b[2J")
    audit.close()
    lines = read_audit(tmp_path)
    assert [line["what"] for line in lines] == ["refusal", "login", "refusal", "exclude"]
    assert lines[2]["count"] == 999
    assert "\x1b" not in describe(lines[3]) and "client anna\\x1b[2J" in describe(lines[3])
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(b'{"what": "cut o')
    assert len(read_audit(tmp_path)) == 4


def test_settings_that_changed_at_a_restart_are_named():
    before = [{"what": "start", "settings": {"rate": 100.0, "sync": False}}]
    assert settings_changed(before, {"rate": 5.0, "sync": False}) == {"rate": [100.0, 5.0]}
    assert settings_changed([], {"rate": 5.0}) == {}


def test_the_audit_log_is_shown(tmp_path):
    audit = Audit(tmp_path)
    audit.note("start", settings={"rate": 1})
    audit.note("rollback", version=3)
    audit.close()
    shown = personax("live", "audit", tmp_path)
    assert shown.exit_code == 0 and "rollback  version 3" in shown.output and "rate" not in shown.output
    lines = personax("live", "audit", tmp_path, "--json").output.splitlines()
    assert json.loads(lines[0])["settings"] == {"rate": 1}
    assert "File not found" in personax("live", "audit", tmp_path / "none").output


@pytest.mark.parametrize("crash", [False, True])
def test_old_lines_of_the_journal_are_compressed_and_none_is_lost(crash, tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "ARCHIVED_BYTES", 2000)
    given = recipe(num_rounds=10**4)
    book = make_book(tmp_path, given)
    book.join("anna")
    for update in range(60):
        book.settle("anna", upload(book, update))
        if update % 3 == 0:
            book.save()
        if crash and update % 7 == 0:  # also between the compression and the cut
            book = make_book(tmp_path, given)
    assert len(list((tmp_path / "archive").iterdir())) > 2
    lines = read_lines(tmp_path)
    assert [line["number"] for line in lines] == list(range(1, 62))
    assert [line["update"] for line in lines if line["what"] == "upload"] == list(range(60))
    if not crash:
        assert (tmp_path / "journal.jsonl").stat().st_size < 8000
    again = make_book(tmp_path, given)
    same(state_of(book), state_of(again))
    (newest,) = sorted((tmp_path / "checkpoints").glob("*.safetensors"))[-1:]
    newest.write_bytes(b"damaged")  # the one before it needs more lines
    same(state_of(book), state_of(make_book(tmp_path, given)))
