"""The client's side of the protocol: one connection, reopened until the client's patience runs out."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version as version_of
from math import inf
from queue import SimpleQueue
from typing import Any, NamedTuple

import grpc

from personax.experiment.names import printable
from personax.live import wire
from personax.live.certificates import Credentials, fingerprint_of, identity_of
from personax.live.gate import NAME_KEY
from personax.live.log import logger
from personax.live.messages import FRAME, PIECE, Broken, Buffers, Collector, Content, checksum_of, pieces, whole

GLANCE = 0.5  # seconds between checks of the clock
_AGAIN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
)


class Unreachable(OSError):
    """The server did not answer within the client's patience."""


class RefusedByServer(ValueError):
    """The server refused a request."""

    def __init__(self, words: str, code: grpc.StatusCode) -> None:
        super().__init__(printable(words))
        self.code = code


class Newest(NamedTuple):
    """The server's answer: the outcome of an upload, the next action, and the newest model unless it is unchanged."""

    version: int
    content: Content | None
    train: bool
    finished: bool
    outcome: str = ""
    words: str = ""
    retry_seconds: float = 0.5
    rollbacks: int = 0  # rollbacks of the run; with the version they identify a model


class ExchangeStream:
    """An open `Exchange` call, which sends uploads and yields answers. A timeout ends it."""

    def __init__(self, call: Any, metadata: Any) -> None:
        self.uploads: SimpleQueue[wire.MessagePart | None] = SimpleQueue()
        self.answers = call(iter(self.uploads.get, None), metadata=metadata)
        self.due, self.closed = inf, threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """End the call."""
        self.closed.set()
        self.uploads.put(None)
        self.answers.cancel()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Cancel the call if the body takes longer than this. (gRPC only has timeouts for whole calls.)"""
        self.due = time.monotonic() + seconds
        try:
            yield
        except grpc.RpcError:
            if time.monotonic() > self.due:
                raise Broken(f"The server took more than {seconds:g} s.") from None
            raise
        finally:
            self.due = inf

    def _watch(self) -> None:
        while not self.closed.wait(GLANCE):
            if time.monotonic() > self.due:
                self.answers.cancel()


class Connection:
    """A client's connection to a server. Failed calls are retried after pauses that grow to `longest_pause` seconds."""

    def __init__(
        self,
        address: str,
        credentials: Credentials | None,
        *,
        name: str = "",
        role: str = "client",
        max_bytes: int = 256 << 20,
        patience: float = 600.0,
        call_seconds: float = 60.0,
        longest_pause: float = 5.0,
    ) -> None:
        self.address, self.max_bytes, self.patience, self.call_seconds = address, max_bytes, patience, call_seconds
        self.longest_pause = longest_pause
        self.name = identity_of(credentials.certificate).name if credentials else name
        self.authority = fingerprint_of(credentials.authority) if credentials else "none"
        self.metadata = None if credentials else ((NAME_KEY, name), ("personax-role", role))
        if credentials is None:
            self.channel = grpc.insecure_channel(address, options=_OPTIONS)
        else:
            made = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
            self.channel = grpc.secure_channel(address, made, options=_OPTIONS)
        self.calls = {name: _call(self.channel, method) for name, method in wire.METHODS.items()}
        self.stream: ExchangeStream | None = None
        self.run = ""

    def close(self) -> None:
        """Close the connection."""
        self._hang_up()
        self.channel.close()

    def register(
        self, schema: str = "", newcomer: bool = False, moments: dict[str, Any] | None = None, num_samples: float = 0.0
    ) -> Any:
        """Register a client whose data conform to the schema with this digest; return the server's welcome.

        `moments` has the moments of its `features` and `targets`, for a server that fits a scaling; `num_samples` is
        for a server that weights by it.
        """
        own: dict[str, Any] = {name: one and wire.ClientMoments(**one) for name, one in (moments or {}).items()}
        own["num_samples"] = num_samples
        hello = wire.Hello(wire.PROTOCOL, version_of("personax"), schema, newcomer, **own)
        welcome = self._again(lambda: self._unary("Register", hello))
        if welcome.protocol != wire.PROTOCOL:
            got = f"The server speaks protocol {welcome.protocol}, this client {wire.PROTOCOL}"
            raise RefusedByServer(f"{got}. Update the older one.", grpc.StatusCode.FAILED_PRECONDITION)
        self.run = welcome.run
        return welcome

    def fetch(self, have: int = -1, wait_seconds: float = 0.0, rollbacks: int = 0) -> Newest:
        """The newest model, unless the client has version `have` already."""
        ask = wire.Ask(run=self.run, have=have, wait_seconds=wait_seconds, rollbacks=rollbacks)
        return self._again(lambda: self._fetched(ask))

    def send(
        self,
        id: str,
        update: int,
        version: int,
        content: Content | Buffers,
        num_samples: float = 0.0,
        want_model: bool = True,
        rollbacks: int = 0,
    ) -> Newest:
        """Send an upload; return its outcome and, if `want_model`, the newest model. Retries are settled only once."""
        buffers = content if isinstance(content, list) else [content]
        num_bytes = sum(map(len, buffers))
        about = wire.UploadHeader(
            run=self.run,
            id=id,
            update=update,
            version=version,
            num_samples=num_samples,
            want_model=want_model,
            rollbacks=rollbacks,
            num_bytes=num_bytes,
            checksum=checksum_of(buffers) if num_bytes > PIECE else 0,
        )
        return self._again(lambda: self._exchanged(_parts(buffers, about)))

    def report(self, report: dict[str, Any] | None, update: int, last: bool = False) -> bool:
        """Send the numbers that the owner reports, if any. Return True if the run is finished."""
        message = wire.Numbers(run=self.run, update=update, last=last)
        if report is not None:
            counts = {"num_samples": report["samples"], "num_train_samples": report["train_samples"]}
            message = replace(message, version=report["version"], numbers=report["numbers"], **counts)
        return self._again(lambda: self._unary("Report", message)).finished

    def status(self) -> str:
        """The state of the run as JSON."""
        return self._again(lambda: self._unary("Status", wire.Question())).json

    def exclude(self, client: str, excluded: bool) -> None:
        """Exclude a client's uploads, or admit them again, as an operator."""
        self._again(lambda: self._unary("Exclude", wire.Exclusion(client, excluded)))

    def _unary(self, name: str, request: Any) -> Any:
        return self.calls[name](request, timeout=self.call_seconds, metadata=self.metadata)

    def _fetched(self, ask: Any) -> Newest:
        seconds = self.call_seconds + ask.wait_seconds
        answers = self.calls["Fetch"](ask, timeout=seconds, metadata=self.metadata)
        newest = self._gathered(answers)
        next(answers, None)  # the end of the call
        return newest

    def _exchanged(self, parts: Iterable[wire.MessagePart]) -> Newest:
        """Send an upload on the open stream, or on a new one; return the answer."""
        if self.stream is None or not self.stream.answers.is_active():
            self._hang_up()
            self.stream = ExchangeStream(self.calls["Exchange"], self.metadata)
        try:
            with self.stream.within(self.call_seconds):
                for part in parts:
                    self.stream.uploads.put(part)
                return self._gathered(self.stream.answers)
        except BaseException:
            self._hang_up()  # later answers on this stream would belong to this upload
            raise

    def _hang_up(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _gathered(self, answers: Iterator[wire.MessagePart]) -> Newest:
        """Assemble a model from its pieces; a model in a single message is a view of that message."""
        part = next(answers, None)
        if part is None:
            raise Broken("The server's answer was cut off.")
        first = self._allowed(part.about)
        if first.unchanged:
            return _newest(first, None)
        if len(part.data) >= first.num_bytes:
            return _newest(first, whole(part.data, first.num_bytes, first.checksum or None))
        collector = Collector(first.num_bytes, first.checksum)
        collector.add(part.data)
        while not collector.complete and (part := next(answers, None)) is not None:
            collector.add(part.data)
        return _newest(first, collector.content())

    def _allowed(self, first: Any) -> Any:
        """Return the header of a model; raise if the model is too large."""
        if first.num_bytes > self.max_bytes:
            got = f"{first.num_bytes:,} bytes"
            words = f"The server announced a model of {got}, but this client accepts at most {self.max_bytes:,}."
            raise RefusedByServer(words, grpc.StatusCode.OUT_OF_RANGE)
        return first

    def _again(self, call: Callable[[], Any]) -> Any:
        """Call until the call succeeds, the server refuses, or patience runs out."""
        began, pause = time.monotonic(), 0.1
        while True:
            try:
                return call()
            except (grpc.RpcError, Broken) as error:
                code = error.code() if isinstance(error, grpc.RpcError) else grpc.StatusCode.DATA_LOSS  # pyright: ignore[reportAttributeAccessIssue]
                words = error.details() if isinstance(error, grpc.RpcError) else str(error)  # pyright: ignore[reportAttributeAccessIssue]
                if code not in _AGAIN:
                    raise RefusedByServer(f"The server at {self.address} refused: {words}", code) from None
                left = self.patience - (time.monotonic() - began)
                if left <= 0:
                    message = f"The server at {self.address} did not answer for {self.patience:g} s: {words}"
                    raise Unreachable(
                        f"{printable(message).rstrip('.')}. Is it running, and does it trust this certificate?"
                    ) from None
                logger.info("%s: %s Retrying in about %.1f s.", self.name, words, pause)
                time.sleep(min(pause * random.uniform(0.5, 1.5), left))
                pause = min(2 * pause, self.longest_pause)


_OPTIONS = [
    ("grpc.max_receive_message_length", PIECE + (1 << 16)),
    ("grpc.max_send_message_length", PIECE + (1 << 16)),
    ("grpc.http2.max_frame_size", FRAME),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 5000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]


def _call(channel: Any, method: wire.Method) -> Any:
    kind = ("stream" if method.many_in else "unary", "stream" if method.many_out else "unary")
    make = getattr(channel, f"{kind[0]}_{kind[1]}")
    return make(method.path, method.coders[0], method.coders[3])


def _newest(first: Any, content: Content | None) -> Newest:
    message = (first.outcome, printable(first.words), first.retry_seconds, first.rollbacks)
    return Newest(first.version, content, first.train, first.finished, *message)


def _parts(buffers: Buffers, about: Any) -> Iterator[wire.MessagePart]:
    """Split an upload into messages."""
    for piece in pieces(buffers):
        yield wire.MessagePart(about, piece)
        about = wire.UploadHeader()
