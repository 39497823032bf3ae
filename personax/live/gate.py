"""Who is let in, and how much each may ask for: identity, revocation, rates, streams."""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import grpc

from personax.experiment.config import Terms
from personax.experiment.names import require_client_name
from personax.live.certificates import Identity, Revocations, identity_of

NAME_KEY = "personax-client"  # says who a client is where there is no TLS
logger = logging.getLogger("personax.live")
_NEVER = datetime.max.replace(tzinfo=UTC)


class Denied(Exception):
    """A request that is not served: a status code of gRPC, and why."""

    def __init__(self, code: grpc.StatusCode, words: str) -> None:
        super().__init__(words)
        self.code, self.words = code, words


class Gate:
    """Knows each peer by its certificate; without TLS, on loopback, by the name that it gives."""

    def __init__(self, terms: Terms, revocations: Revocations | None) -> None:
        self.terms, self.revocations = terms, revocations
        self.budgets: dict[str, tuple[float, float]] = {}  # requests left, and when that was
        self.streams: Counter[str] = Counter()
        self.refusals: Counter[tuple[str, str]] = Counter()  # by name and reason
        self.checked = 0.0

    def identify(self, context: Any) -> Identity:
        """Return who asks, if the certificate is valid."""
        if self.revocations is None:
            given = dict(context.invocation_metadata() or ())
            name = given.get(NAME_KEY)
            if not name:
                raise Denied(grpc.StatusCode.UNAUTHENTICATED, f"Without TLS a client gives its name as {NAME_KEY}.")
            return Identity(_checked(name), given.get("personax-role", "client"), None, 0, _NEVER)  # pyright: ignore[reportArgumentType]
        shown = context.auth_context().get("x509_pem_cert")
        if not shown:
            raise Denied(grpc.StatusCode.UNAUTHENTICATED, "A certificate of this federation is needed.")
        who = identity_of(shown[0])
        _checked(who.name)
        self.require_valid(who)
        return who

    def client(self, context: Any) -> Identity:
        """Return who asks, if it is a client within its rate."""
        who = self.identify(context)
        if who.role != "client":
            words = f"{who.name} is certified as {who.role or 'nothing'}, and only clients may do this."
            raise self.deny(who.name, "role", grpc.StatusCode.PERMISSION_DENIED, words)
        self.spend(who.name)
        return who

    def require_valid(self, who: Identity) -> None:
        """Certificates that TLS let pass are refused when they are revoked or have run out since."""
        if self.revocations is None:
            return
        self._refresh()
        if who.serial in self.revocations.serials:
            raise self.deny(
                who.name, "revoked", grpc.StatusCode.PERMISSION_DENIED, f"{who.name}'s certificate is revoked."
            )
        if who.expires < datetime.now(UTC):
            raise self.deny(
                who.name, "expired", grpc.StatusCode.PERMISSION_DENIED, f"{who.name}'s certificate has run out."
            )

    def spend(self, name: str) -> None:
        """Take one request from a client's budget, which refills at `rate` and holds two seconds of it."""
        now, most = time.monotonic(), 2 * self.terms.rate
        left, then = self.budgets.get(name, (most, now))
        left = min(most, left + (now - then) * self.terms.rate)
        if left < 1:
            self.budgets[name] = (left, now)
            words = f"{name} asks more than {self.terms.rate:g} times a second. Wait."
            raise self.deny(name, "rate", grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        self.budgets[name] = (left - 1, now)

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Count a stream while it is open."""
        if self.streams[name] >= self.terms.max_streams:
            words = f"{name} has {self.terms.max_streams} streams open, which is the most. Close one."
            raise self.deny(name, "streams", grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        self.streams[name] += 1
        try:
            yield
        finally:
            self.streams[name] -= 1

    def deny(self, name: str, why: str, code: grpc.StatusCode, words: str) -> Denied:
        """A refusal, counted with the client's name."""
        self.refusals[name, why] += 1
        return Denied(code, words)

    def _refresh(self) -> None:
        now = time.monotonic()
        if self.revocations is not None and now - self.checked > 0.5:
            self.checked = now
            try:
                self.revocations.refresh()
            except (OSError, ValueError) as error:  # the list as it was holds
                logger.error("%s", error)


def _checked(name: object) -> str:
    """A client's name, which goes into logs, tables and files."""
    try:
        return require_client_name(name)
    except ValueError as error:
        raise Denied(grpc.StatusCode.UNAUTHENTICATED, str(error)) from None
