"""Access control of a server: identity, revocation, and limits on each client's requests."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import grpc

from personax.experiment.config import Terms
from personax.experiment.names import printable, require_client_name
from personax.live.audit import Audit
from personax.live.certificates import Identity, Revocations, identity_of
from personax.live.connections import Connections
from personax.live.log import logger

NAME_KEY = "personax-client"  # metadata with the client's name when there is no TLS
_NEVER = datetime.max.replace(tzinfo=UTC)
_DAY = 86_400.0


class Denied(Exception):
    """A denied request, with a gRPC status code and the reason."""

    def __init__(self, code: grpc.StatusCode, words: str) -> None:
        super().__init__(words)
        self.code, self.words = code, printable(words)


class Gate:
    """Identification of peers by certificate (without TLS, on loopback, by the name they give), and their limits."""

    def __init__(self, terms: Terms, revocations: Revocations | None, audit: Audit | None = None) -> None:
        self.terms, self.revocations, self.audit = terms, revocations, audit or Audit()
        self.budgets: dict[str, tuple[float, float]] = {}  # requests left, and when they were counted
        self.written: dict[str, tuple[float, int]] = {}  # start of the current day, and bytes written since then
        self.streams: Counter[str] = Counter()
        self.connections = Connections(terms.max_client_connections, terms.max_connections)
        self.refusals: Counter[tuple[str, str]] = Counter()  # by name and reason
        self.checked = 0.0

    def identify(self, context: Any) -> Identity:
        """Return the sender's identity, or deny the request if the certificate is not valid."""
        if self.revocations is None:
            given = dict(context.invocation_metadata() or ())
            name = given.get(NAME_KEY)
            if not name:
                words = f"Without TLS, a client must send its name as metadata `{NAME_KEY}`."
                raise Denied(grpc.StatusCode.UNAUTHENTICATED, words)
            return Identity(_checked(name), given.get("personax-role", "client"), None, 0, _NEVER)  # pyright: ignore[reportArgumentType]
        shown = context.auth_context().get("x509_pem_cert")
        if not shown:
            raise Denied(grpc.StatusCode.UNAUTHENTICATED, "A certificate of this federation is required.")
        who = identity_of(shown[0])
        _checked(who.name)
        self.require_valid(who)
        return who

    def admit(self, context: Any, roles: tuple[str, ...] = ("client",)) -> Identity:
        """Return the sender's identity if it has one of these roles and respects its rate limit."""
        who = self.identify(context)
        self.connections.saw(who.name, context.peer())
        self.spend(who.name)
        if who.role not in roles:
            words = f"{who.name} is certified as {who.role or 'no role'}, but only {roles[0]}s may do this."
            raise self.deny(who.name, "role", grpc.StatusCode.PERMISSION_DENIED, words)
        return who

    def require_valid(self, who: Identity) -> None:
        """Deny a certificate that was revoked or has expired since the TLS handshake."""
        if self.revocations is None:
            return
        self.refresh()
        if who.serial in self.revocations.serials:
            raise self.deny(
                who.name, "revoked", grpc.StatusCode.PERMISSION_DENIED, f"{who.name}'s certificate is revoked."
            )
        if who.expires < datetime.now(UTC):
            raise self.deny(
                who.name, "expired", grpc.StatusCode.PERMISSION_DENIED, f"{who.name}'s certificate has expired."
            )

    def spend(self, name: str) -> None:
        """Take one request from a client's budget, which refills at `rate` and holds at most two seconds' worth."""
        now, most = time.monotonic(), 2 * self.terms.rate
        left, then = self.budgets.get(name, (most, now))
        left = min(most, left + (now - then) * self.terms.rate)
        if left < 1:
            self.budgets[name] = (left, now)
            words = f"{name} sends more than {self.terms.rate:g} requests a second. Wait and retry."
            raise self.deny(name, "rate", grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        self.budgets[name] = (left - 1, now)

    def write(self, name: str, num_bytes: int) -> None:
        """Count the bytes written to disk because of a client, except for applied uploads."""
        now = time.monotonic()
        since, before = self.written.get(name, (now, 0))
        if now - since >= _DAY:
            since, before = now, 0
        self.written[name] = (since, before + num_bytes)

    def has_room(self, name: str) -> bool:
        """True if a client's bytes on disk are below the daily limit."""
        self.write(name, 0)
        return self.written[name][1] < self.terms.bytes_per_day

    def require_room(self, name: str) -> None:
        """Deny a client that has reached its daily limit of bytes on disk."""
        if not self.has_room(name):
            words = f"{name} has reached the limit of {self.terms.bytes_per_day:,} bytes a day. Try again tomorrow."
            raise self.deny(name, "daily bytes", grpc.StatusCode.RESOURCE_EXHAUSTED, words)

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Count a stream while it is open."""
        if self.streams[name] >= self.terms.max_streams:
            words = f"{name} has {self.terms.max_streams} streams open, which is the limit. Close one."
            raise self.deny(name, "streams", grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        self.streams[name] += 1
        try:
            yield
        finally:
            self.streams[name] -= 1

    def close_connections(self) -> None:
        """Close excess connections of a certificate, and silent connections if there are many."""
        for name in self.connections.close_excess():
            words = f"A certificate may have at most {self.terms.max_client_connections} connections."
            self.deny(name or "silent peers", "connections", grpc.StatusCode.RESOURCE_EXHAUSTED, words)

    def deny(self, name: str, why: str, code: grpc.StatusCode, words: str) -> Denied:
        """Count a refusal by client and reason, and log the first of its kind; return the error to raise."""
        self.refusals[name, why] += 1
        denied = Denied(code, words)
        if self.audit.count("refusal", client=name, reason=why):
            logger.warning("%s: request refused (%s). %s", name, why, words)
        return denied

    def refresh(self) -> None:
        """Reload the revocation list if it has changed, at most twice a second."""
        now = time.monotonic()
        if self.revocations is not None and now - self.checked > 0.5:
            self.checked, before = now, self.revocations.serials
            try:
                self.revocations.refresh()
            except (OSError, ValueError) as error:  # the previous list stays in force
                logger.error("%s", error)
            for serial in sorted(self.revocations.serials - before):
                self.audit.note("revocation", serial=str(serial))


def _checked(name: object) -> str:
    """Return a client's name if it is safe in logs, tables and file names."""
    try:
        return require_client_name(name)
    except ValueError as error:
        raise Denied(grpc.StatusCode.UNAUTHENTICATED, str(error)) from None
