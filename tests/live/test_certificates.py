"""Certificates over the years: renewed one at a time, revoked for an operator too, and with a warning in time."""

from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from personax.cli import app, live
from personax.experiment.config import Terms
from personax.live import certificates
from personax.live.certificates import expiry_warning, identity_of, read_credentials
from personax.live.connection import RefusedByServer
from tests.live.parts import recipe, serving

pytestmark = pytest.mark.xdist_group("live")


def personax(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def place(tmp_path):
    certificates.create(tmp_path / "c", ["127.0.0.1", "fed.example.org"], ["anna", "bert"], days=20)
    return tmp_path / "c"


def shown(place, who):
    return read_credentials(place / who)


def test_certificates_are_renewed_while_the_others_stay(place, tmp_path):
    before = {who: shown(place, who) for who in ("server", "operator", "clients/anna", "clients/bert")}
    with serving(tmp_path / "run", recipe(), Terms(num_clients=2, rate=1e5), place) as running:
        anna = running.connect("anna")
        anna.register(running.book.recipe.digest)
        ended = personax("certify", "renew", "anna", "--operator", "--server", "--folder", place)
        assert ended.exit_code == 0, ended.output
        anna.fetch()  # the old certificate stays valid
        again = running.connect("anna")
        assert again.register(running.book.recipe.digest).id == 0 and again.fetch().version == 0
        certificates.revoke(place, "anna")  # revokes both
        for connection in (anna, again):
            running.service.gate.checked = 0.0
            with pytest.raises(RefusedByServer, match="anna's certificate is revoked"):
                connection.fetch()
            connection.close()
    assert shown(place, "clients/bert") == before["clients/bert"]
    for who in ("server", "operator", "clients/anna"):
        old, new = (identity_of(one.certificate) for one in (before[who], shown(place, who)))
        assert new.expires > old.expires + timedelta(days=300) and new.serial != old.serial
        assert (new.name, new.role, new.id) == (old.name, old.role, old.id)
        assert shown(place, who).authority == before[who].authority
    with serving(tmp_path / "again", recipe(), Terms(num_clients=2, rate=1e5), place) as running:
        bert = running.connect("bert")  # trusts the renewed server
        bert.register(running.book.recipe.digest)
        bert.close()


def test_all_valid_certificates_are_renewed_together(place):
    certificates.revoke(place, "bert")
    ended = personax("certify", "renew", "--all", "--folder", place)
    assert ended.exit_code == 0 and "bert" not in ended.output, ended.output
    found = [identity_of(shown(place, who).certificate).expires for who in ("server", "operator", "clients/anna")]
    assert min(found) > datetime.now(UTC) + timedelta(days=300)
    assert "Name the clients" in personax("certify", "renew", "--folder", place).output
    assert "valid certificate of" in personax("certify", "renew", "bert", "--folder", place).output
    certificates.add(place, "cleo")
    assert identity_of(shown(place, "clients/cleo").certificate).id == 2


def test_an_operator_is_revoked_and_gets_a_new_certificate(place, tmp_path):
    with serving(tmp_path / "run", recipe(), Terms(num_clients=2, rate=1e5), place) as running:
        operator = running.connect("operator")
        operator.status()
        ended = personax("certify", "revoke", "--operator", "--folder", place)
        assert ended.exit_code == 0 and "operator is revoked" in ended.output
        running.service.gate.checked = 0.0
        with pytest.raises(RefusedByServer, match="operator's certificate is revoked"):
            operator.status()
        with pytest.raises(RefusedByServer, match="operator's certificate is revoked"):
            operator.exclude("anna", True)
        operator.close()
        assert (
            "no valid certificate for its operator"
            in personax("certify", "revoke", "--operator", "--folder", place).output
        )
        certificates.renew(place, "operator", "operator")
        again = running.connect("operator")
        again.status()
        again.close()
    assert "Give either the name" in personax("certify", "revoke", "--folder", place).output


def test_an_authority_of_an_older_version_can_revoke_its_operator(place):
    import json

    path = place / "authority" / "issued.json"
    table = {name: entry for name, entry in json.loads(path.read_text()).items() if not name.startswith("/")}
    path.write_text(json.dumps(table))
    serial = identity_of(shown(place, "operator").certificate).serial
    certificates.revoke(place, "operator", "operator")
    listed = certificates.Revocations(place / "server" / "revoked.pem", shown(place, "server").authority)
    assert serial in listed.serials


def test_there_is_a_warning_thirty_days_before_a_certificate_expires(place, monkeypatch):
    certificate = shown(place, "clients/anna").certificate
    expires = identity_of(certificate).expires
    assert expiry_warning(certificate, expires - timedelta(days=31)) == ""
    soon = expiry_warning(certificate, expires - timedelta(days=29))
    assert f"expires on {expires:%Y-%m-%d}" in soon and "personax certify renew anna" in soon
    assert "expired on" in expiry_warning(certificate, expires + timedelta(days=1))
    assert "certify renew --server" in expiry_warning(shown(place, "server").certificate)
    monkeypatch.setattr(live, "PATIENCE", 0.1)
    found = personax("status", "127.0.0.1:1", "--identity", place / "operator")
    assert "Warning: The certificate of operator expires" in found.output
