"""Certificates: an authority, and the certificates it issues to a server, its operator and its clients.

    authority/      the authority's private key, which signs certificates: never share it; no server needs it server/
    for the machine that serves: its certificate and key, and the certificate revocation list operator/       for
    `personax status`, which shows the operator all clients clients/NAME/   for one client: give it to that client only,
    over a channel that you trust

A private key has mode 0600. A certificate contains its owner's name (common name), role (organizational unit) and, for
a client, the number that seeds its random streams (serial number of the subject).
"""

import ipaddress
import json
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from personax.experiment.checkpoint import write_atomically
from personax.values import check_names

DAYS = 365
ROLES = ("server", "operator", "client")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
SOON = timedelta(days=30)  # a warning precedes the expiry of a certificate by this time
_EARLIER = timedelta(minutes=5)  # the clocks of different machines differ


class Credentials(NamedTuple):
    """A private key, its certificate and the trusted authority's certificate, as PEM."""

    authority: bytes
    certificate: bytes
    key: bytes


class Identity(NamedTuple):
    """The owner of a certificate: name, role, number, and the certificate's serial number and expiry."""

    name: str
    role: str
    id: int | None
    serial: int
    expires: datetime


def create(folder: Path, hosts: Sequence[str], clients: Sequence[str], days: int = DAYS) -> None:
    """Create an authority and certificates for a server with these host names or addresses, an operator and clients."""
    authority = folder / "authority"
    if authority.exists():
        raise ValueError(
            f"{folder} already has an authority. Add clients with `personax certify add`, or choose another folder."
        )
    if not hosts:
        raise ValueError("A server needs at least one host name or address. Give it with --host.")
    for name in clients:
        _check_name(name)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject("personax authority", "authority")
    can = _usage(key_cert_sign=True, crl_sign=True)
    made = _builder(subject, subject, key.public_key(), 10 * days)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).add_extension(can, True)
    certificate = made.sign(key, hashes.SHA256())
    _write_private(authority / "key.pem", _key_pem(key))
    write_atomically(authority / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))
    _write_issued(folder, {})
    issue(folder, folder / "server", "server", "server", days, hosts=hosts)
    issue(folder, folder / "operator", "operator", "operator", days)
    _write_revoked(folder, [])
    for name in clients:
        add(folder, name, days)


def add(folder: Path, name: str, days: int = DAYS) -> Path:
    """Issue a certificate for one more client; return the folder to give to it."""
    _check_name(name)
    issued = _issued(folder)
    if name in issued and issued[name]["serial"]:
        raise ValueError(f"{name} already has a certificate. Revoke it first, or choose another name.")
    # A client that is certified again keeps its number, because it is the same client.
    taken = [entry["id"] for known, entry in issued.items() if not _is_staff(known)]
    number = issued[name]["id"] if name in issued else len(taken)
    place = folder / "clients" / name
    issue(folder, place, name, "client", days, number=number)
    return place


def renew(folder: Path, name: str, role: str = "client", days: int = DAYS) -> Path:
    """Issue a new key and certificate to a client, the server or the operator; return the folder to give to it.

    A client keeps its number and the server keeps its host names. The old certificate stays valid until it expires, so
    a running federation is not interrupted; `revoke` revokes all certificates of a client.
    """
    entry = _valid_entry(folder, name, role) if role == "client" else {"id": None}
    place = folder / "clients" / name if role == "client" else folder / role
    hosts = _hosts_of((place / "cert.pem").read_bytes()) if role == "server" else []
    issue(folder, place, name, role, days, number=entry["id"], hosts=hosts)
    return place


def valid_clients(folder: Path) -> list[str]:
    """The names of the clients whose certificates are not revoked."""
    return [name for name, entry in _issued(folder).items() if entry["serial"] and not _is_staff(name)]


def revoke(folder: Path, name: str, role: str = "client") -> Path:
    """Add all certificates of a client or the operator to the revocation list, which a running server reloads."""
    entry, issued = _valid_entry(folder, name, role), _issued(folder)
    revoked = [*entry["revoked"], *entry.get("older", []), entry["serial"]]
    issued[_entry_name(name, role)] = {"id": entry["id"], "serial": None, "revoked": revoked}
    _write_issued(folder, issued)
    _write_revoked(folder, [int(serial) for entry in issued.values() for serial in entry["revoked"]])
    return folder / "server" / "revoked.pem"


def read_credentials(folder: Path) -> Credentials:
    """Read the files of an identity; raise if other users can read the private key."""
    paths = [folder / name for name in ("ca.pem", "cert.pem", "key.pem")]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"File not found: {path}. Create an identity with `personax certify`.")
    if os.name == "posix" and paths[2].stat().st_mode & 0o077:
        raise ValueError(f"Other users can read the private key {paths[2]}. Run: chmod 600 {paths[2]}")
    return Credentials(*(path.read_bytes() for path in paths))


def expiry_warning(certificate: bytes, now: datetime | None = None) -> str:
    """A warning if a certificate expires within `SOON`, otherwise ""."""
    who, now = identity_of(certificate), now or datetime.now(UTC)
    if who.expires - now > SOON:
        return ""
    when = f"expired on {who.expires:%Y-%m-%d}" if who.expires < now else f"expires on {who.expires:%Y-%m-%d}"
    what = f"personax certify renew {who.name if who.role == 'client' else f'--{who.role}'}"
    return f"The certificate of {who.name} {when}. On the machine with the authority, run: {what}"


@lru_cache(maxsize=4096)
def identity_of(certificate: bytes) -> Identity:
    """Read the owner of a certificate. TLS has already verified the signature."""
    parsed = x509.load_pem_x509_certificate(certificate)
    read = lambda oid: next((str(part.value) for part in parsed.subject.get_attributes_for_oid(oid)), "")
    name, role = read(NameOID.COMMON_NAME), read(NameOID.ORGANIZATIONAL_UNIT_NAME)
    number = read(NameOID.SERIAL_NUMBER)
    id = int(number) if number.isdigit() else None
    return Identity(name, role, id, parsed.serial_number, parsed.not_valid_after_utc)


def fingerprint_of(authority: bytes) -> str:
    """The SHA-256 fingerprint of an authority's certificate."""
    return x509.load_pem_x509_certificate(authority).fingerprint(hashes.SHA256()).hex()


class Revocations:
    """The certificate revocation list, signed by the authority and reloaded whenever its file changes."""

    def __init__(self, path: Path, authority: bytes) -> None:
        self.path, self.authority = path, x509.load_pem_x509_certificate(authority)
        self.seen: tuple[int, int] | None = None
        self.serials: frozenset[int] = frozenset()
        self.refresh()

    def refresh(self) -> None:
        """Reload the list if its file has changed."""
        found = self.path.stat() if self.path.exists() else None
        if found is None:
            if self.seen is None:
                raise ValueError(
                    f"Revocation list not found: {self.path}. Copy it from the folder where you issue certificates."
                )
            return
        stamp = (found.st_mtime_ns, found.st_size)
        if stamp == self.seen:
            return
        listed = x509.load_pem_x509_crl(self.path.read_bytes())
        key: Any = self.authority.public_key()
        if not listed.is_signature_valid(key):
            raise ValueError(
                f"The revocation list {self.path} must be signed by this federation's authority. Copy the right one."
            )
        self.serials = frozenset(entry.serial_number for entry in listed)
        self.seen = stamp


def issue(
    folder: Path,
    place: Path,
    name: str,
    role: str,
    days: int,
    *,
    number: int | None = None,
    hosts: Sequence[str] = (),
    begin: timedelta = timedelta(),
) -> None:
    """Write a new key and certificate to the folder `place`."""
    signer = serialization.load_pem_private_key((folder / "authority" / "key.pem").read_bytes(), None)
    authority = x509.load_pem_x509_certificate((folder / "authority" / "ca.pem").read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    made = _builder(_subject(name, role, number), authority.subject, key.public_key(), days, begin)
    made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    made = made.add_extension(_usage(digital_signature=True), critical=True)
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if role == "server" else ExtendedKeyUsageOID.CLIENT_AUTH
    made = made.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    if hosts:
        made = made.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
    certificate = made.sign(signer, hashes.SHA256())  # pyright: ignore[reportArgumentType]
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write_private(place / "key.pem", _key_pem(key))
    write_atomically(place / "cert.pem", certificate.public_bytes(serialization.Encoding.PEM))
    write_atomically(place / "ca.pem", (folder / "authority" / "ca.pem").read_bytes())
    issued, known = _issued(folder), _entry_name(name, role)
    before = issued.get(known, {})
    older = [*before.get("older", []), *([before["serial"]] if before.get("serial") else [])]
    serial = str(certificate.serial_number)
    issued[known] = {"id": number, "serial": serial, "older": older, "revoked": before.get("revoked", [])}
    _write_issued(folder, issued)


def _entry_name(name: str, role: str) -> str:
    """The key in `issued.json`. Staff have a slash, which a client's name cannot contain."""
    return name if role == "client" else f"/{role}"


def _is_staff(known: str) -> bool:
    return known.startswith("/")


def _valid_entry(folder: Path, name: str, role: str) -> dict[str, Any]:
    """The entry of a client or staff member that has a valid certificate."""
    issued, place = _issued(folder), folder / role / "cert.pem"
    if role != "client":
        entry = issued.get(f"/{role}")
        if entry is None and place.is_file():  # made by an older version
            serial = str(identity_of(place.read_bytes()).serial)
            entry = {"id": None, "serial": serial, "revoked": []}
            _write_issued(folder, {**issued, f"/{role}": entry})
        if entry is None or not entry["serial"]:
            raise ValueError(
                f"{folder} has no valid certificate for its {role}. Create one: personax certify renew --{role}"
            )
        return entry
    known = sorted(other for other, entry in issued.items() if entry["serial"] and not _is_staff(other))
    check_names(str(folder), [name], known, "valid certificate of")
    return issued[name]


def _hosts_of(certificate: bytes) -> list[str]:
    """The names and addresses that a server's certificate is for."""
    parsed = x509.load_pem_x509_certificate(certificate)
    names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(entry.value) for entry in names]


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Any, days: int, begin: timedelta = timedelta()
) -> x509.CertificateBuilder:
    now = datetime.now(UTC) + begin
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    made = made.serial_number(x509.random_serial_number())
    return made.not_valid_before(now - _EARLIER).not_valid_after(now + timedelta(days=days))


def _subject(name: str, role: str, number: int | None = None) -> x509.Name:
    parts = [
        (NameOID.ORGANIZATION_NAME, "personax"),
        (NameOID.ORGANIZATIONAL_UNIT_NAME, role),
        (NameOID.COMMON_NAME, name),
    ]
    if number is not None:
        parts.append((NameOID.SERIAL_NUMBER, str(number)))
    return x509.Name([x509.NameAttribute(oid, text) for oid, text in parts])


def _usage(**given: bool) -> x509.KeyUsage:
    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    names += ("key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    return x509.KeyUsage(**{name: given.get(name, False) for name in names})


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(
            "A name must have up to 63 letters, digits, `.`, `_` or `-` and begin with a letter or digit, got "
            f"{name!r}."
        )


def _key_pem(key: Any) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that no other user can read at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as opened:
        opened.write(content)


def _issued(folder: Path) -> dict[str, Any]:
    path = folder / "authority" / "issued.json"
    if not path.is_file():
        raise ValueError(f"No authority found in {folder}. Create one: personax certify create {folder}")
    return json.loads(path.read_text())


def _write_issued(folder: Path, issued: dict[str, Any]) -> None:
    write_atomically(folder / "authority" / "issued.json", json.dumps(issued, indent=1).encode())


def _write_revoked(folder: Path, serials: list[int]) -> None:
    signer = serialization.load_pem_private_key((folder / "authority" / "key.pem").read_bytes(), None)
    authority = x509.load_pem_x509_certificate((folder / "authority" / "ca.pem").read_bytes())
    now = datetime.now(UTC)
    made = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
    made = made.last_update(now - _EARLIER).next_update(now + timedelta(days=10 * DAYS))
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        made = made.add_revoked_certificate(entry.build())
    listed = made.sign(signer, hashes.SHA256())  # pyright: ignore[reportArgumentType]
    write_atomically(folder / "server" / "revoked.pem", listed.public_bytes(serialization.Encoding.PEM))
