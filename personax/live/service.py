"""The server: gRPC with mutual TLS around a book.

The event loop reads and writes, so a slow, stalled or vanished client holds up nobody else; everything that touches the
book runs in one thread: the loop's own where uploads are small, a worker where they are not. Checkpoints are written in
another, from values that do not change.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from math import isfinite
from typing import Any

import grpc

from personax.experiment.config import Terms
from personax.live import wire
from personax.live.book import Arrived, Book, Published, Settled
from personax.live.certificates import Credentials, Identity, Revocations
from personax.live.gate import Denied, Gate
from personax.live.ledger import Seat
from personax.live.messages import PIECE, Broken, Collector, Mismatch, TooLong, pieces, whole
from personax.live.ports import listen, options
from personax.live.standing import Standing, standing_of

logger = logging.getLogger("personax.live")
_LONGEST_WAIT = 30.0  # seconds that a request for work stays open
_MOST_NUMBERS = 1000  # in one report
SMALL = 1 << 20  # bytes of an upload or a model
_LEAVING = "The server is shutting down. Try again later."
SLOWEST = 10_000  # bytes a second at which a client gets a large model
_RETRY = 0.5  # seconds after which to ask again for work
_END: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
Code = grpc.StatusCode


class Service:
    """Answers the calls of `wire`."""

    def __init__(self, book: Book, gate: Gate, terms: Terms) -> None:
        self.book, self.gate, self.terms = book, gate, terms
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="book")
        # Changing threads costs more than settling a small upload.
        self.inline = book.recipe.up.num_bytes <= SMALL
        self.seen: dict[str, float] = {}
        self.newcomers: set[str] = set()
        self.done: set[str] = set()  # clients that have the last model and have said all they want to
        self.transfers = asyncio.Semaphore(terms.max_transfers)
        self.changed = asyncio.Event()
        self.idle: set[asyncio.Task[Any]] = set()  # of streams on which no upload is under way
        self.failure: OSError | None = None
        self.draining = False
        self.bytes_up = self.bytes_down = 0
        book.present = self.present

    # Calls

    async def register(self, hello: Any, context: Any) -> Any:
        """Tell the client what is trained, and let it in if its data conform to that."""
        who = self.gate.client(context)
        if self.draining:
            raise Denied(Code.UNAVAILABLE, _LEAVING)
        if hello.protocol != wire.PROTOCOL:
            words = (
                f"This server speaks protocol {wire.PROTOCOL}, {who.name} speaks {hello.protocol}. Update the older."
            )
            raise Denied(Code.FAILED_PRECONDITION, words)
        if hello.schema == self.book.recipe.digest and self.book.recipe.fits_scaling and not hello.newcomer:
            await self._contribute(who, hello)
        recipe, seat = self.book.recipe, Seat(who.id or 0)
        registered = hello.schema == recipe.digest and not recipe.fits_scaling
        if registered and hello.newcomer:
            self._see(who)
            self.newcomers.add(who.name)
        elif registered:
            seat = await self._seat(who, hello.num_samples)
        return wire.Welcome(
            protocol=wire.PROTOCOL,
            registered=registered,
            run=self.book.ledger.run,
            recipe=recipe.to_text(),
            layout=recipe.layout_text(),
            id=seat.id,
            next_update=seat.next_update,
        )

    async def _seat(self, who: Identity, num_samples: float) -> Seat:
        """The seat of a client that trains."""
        self._see(who)
        self.newcomers.discard(who.name)
        self.done.discard(who.name)
        return await self._work(self.book.join, who.name, who.id, num_samples)

    async def _contribute(self, who: Identity, hello: Any) -> None:
        """Add a client's moments to those from which the scaling is fitted."""
        if hello.features is None:
            words = "This server fits a scaling first, from the moments of each client's columns. Update personax."
            raise Denied(Code.FAILED_PRECONDITION, words)
        await self._seat(who, hello.num_samples)
        found = {"features": asdict(hello.features), "targets": hello.targets and asdict(hello.targets)}
        await self._work(self.book.contribute, who.name, found)

    async def fetch(self, ask: Any, context: Any) -> None:
        """The newest model, or that it is unchanged; after waiting for work, if the client wants to."""
        who = self.gate.client(context)
        self._check_run(ask.run)
        self._see(who)
        with self.gate.stream(who.name):
            await self._wait_for_work(who.name, min(ask.wait_seconds, _LONGEST_WAIT))
            newest = None if ask.have == self.book.version else self.book.fresh or await self._work(self.book.published)
            await self._answer(context, who.name, Settled(""), newest)

    async def exchange(self, uploads: AsyncIterator[Any], context: Any) -> None:
        """Uploads one after another; each is answered by what became of it and, if it is wanted, the newest model."""
        who, num = self.gate.client(context), 0
        with self.gate.stream(who.name):
            while (part := await self._next_upload(context)) is not _END:
                self.gate.require_valid(who)
                if num:  # the first is what the stream was opened for
                    self.gate.spend(who.name)
                num += 1
                arrived = await self._collect(who, part, context)
                settled, newest = await self._work(self._settle, who.name, arrived, part.about.want_model)
                await self._answer(context, who.name, settled, newest)

    async def report(self, numbers: Any, context: Any) -> Any:
        """Numbers that a client chose to report."""
        who = self.gate.client(context)
        self._check_run(numbers.run)
        self._see(who)
        if who.name not in self.book.ledger.seats:
            raise Denied(Code.FAILED_PRECONDITION, f"{who.name} has not registered. Register first.")
        if numbers.numbers:
            await self._work(self.book.report, who.name, self._numbers(who, numbers))
        if numbers.last:
            self.done.add(who.name)
        return wire.Thanks(finished=self.book.finished)

    async def status(self, question: Any, context: Any) -> Any:
        """How it goes: an operator sees all clients, a client itself."""
        who = self.gate.identify(context)
        self.gate.spend(who.name)
        shown = self.standing()
        if who.role != "operator":
            shown = shown.of_one(who.name)
        return wire.Status(json=shown.to_json())

    # State

    def present(self) -> list[str]:
        """Clients that train and were heard of lately."""
        since = time.monotonic() - self.terms.presence
        return [name for name, at in list(self.seen.items()) if at >= since and name not in self.newcomers]

    def standing(self) -> Standing:
        """Where everything stands."""
        now = time.monotonic()
        ago = {name: now - at for name, at in list(self.seen.items())}
        return standing_of(self.book, ago, self.gate.refusals, self.bytes_up, self.bytes_down)

    async def tick(self) -> None:
        """What is due without anyone asking: the deadline of a round."""
        if not self.draining and self.failure is None:
            await self._work(self.book.advance)

    async def save(self) -> None:
        """A checkpoint: taken at once, written meanwhile."""
        write = await self._work(self.book.snapshot)
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            self.failure = error

    # How

    async def _work(self, do: Callable[..., Any], *given: Any) -> Any:
        """Do something with the book, alone; a disk that cannot be written to ends the service."""
        if self.failure is not None:
            raise Denied(Code.UNAVAILABLE, "The server is stopping.")
        before = (self.book.version, self.book.ledger.round)
        try:
            if self.inline:
                found = do(*given)
            else:
                found = await asyncio.get_running_loop().run_in_executor(self.worker, do, *given)
        except OSError as error:
            self.failure = error
            logger.error("The server stops: %s", error)
            raise Denied(Code.UNAVAILABLE, "The server cannot write to its disk, and stops. Try again later.") from None
        except Mismatch as error:
            raise Denied(Code.FAILED_PRECONDITION, str(error)) from None
        if (self.book.version, self.book.ledger.round) != before or self.book.finished:
            self.wake()
        return found

    def wake(self) -> None:
        """Let those who wait look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    def drain(self) -> None:
        """Let nobody in any more, and those go who wait."""
        self.draining = True
        self.wake()
        for task in self.idle:
            task.cancel()

    def _see(self, who: Identity) -> None:
        if self.draining:
            raise Denied(Code.UNAVAILABLE, _LEAVING)
        self.seen[who.name] = time.monotonic()

    def _check_run(self, run: str) -> None:
        if run != self.book.ledger.run:
            words = f"This server runs {self.book.ledger.run}, the client was in {run or 'none'}. Register again."
            raise Denied(Code.FAILED_PRECONDITION, words)

    async def _wait_for_work(self, name: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not (self.book.finished or self.draining or self.book.trains(name)):
            changed, left = self.changed, until - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)
            self.seen[name] = time.monotonic()

    async def _next_upload(self, context: Any) -> Any:
        """The first message of an upload. A client may take its time; a server that shuts down does not wait for it."""
        if self.draining:
            raise Denied(Code.UNAVAILABLE, _LEAVING)
        task = asyncio.current_task()
        assert task is not None
        self.idle.add(task)
        try:
            return await context.read()
        except asyncio.CancelledError:
            if not self.draining:
                raise
            task.uncancel()
            raise Denied(Code.UNAVAILABLE, _LEAVING) from None
        finally:
            self.idle.discard(task)

    async def _answer(self, context: Any, name: str, settled: Settled, newest: Published | None) -> None:
        """What became of an upload and the newest model; None: the client has it, or does not want it."""
        answer = {"outcome": settled.outcome, "words": settled.words, "retry_seconds": _RETRY}
        about = partial(wire.DownloadHeader, **answer, finished=self.book.finished, train=self.book.trains(name))
        if newest is None:
            self.book.hand_out(name, self.book.version, self.book.ledger.num_events)
            await context.write(wire.MessagePart(about(version=self.book.version, unchanged=True)))
            return
        self.book.hand_out(name, newest.version, newest.num_events)
        self.bytes_down += newest.num_bytes
        about = partial(about, version=newest.version, num_bytes=newest.num_bytes)
        if newest.num_bytes <= SMALL:
            await context.write(wire.MessagePart(about(), newest.buffers))
            return
        async with self.transfers:
            long = newest.num_bytes > PIECE
            first = about(checksum=await self._work(lambda: newest.check) if long else 0)  # reads all of a large model
            try:
                async with asyncio.timeout(self.terms.stall + newest.num_bytes / SLOWEST):
                    for piece in pieces(newest.buffers):
                        await context.write(wire.MessagePart(first, piece))
                        first = wire.DownloadHeader()
            except TimeoutError:
                words = "The model was not taken in time, and others wait. Ask for it again."
                raise self.gate.deny(name, "stalled", Code.DEADLINE_EXCEEDED, words) from None

    def _check_announced(self, who: Identity, first: Any) -> None:
        """What an upload says of itself, before any of it is kept."""
        self._check_run(first.run)
        self._see(who)
        expected = self.book.recipe.up.num_bytes
        if who.name not in self.book.ledger.seats:
            raise Denied(Code.FAILED_PRECONDITION, f"{who.name} has not registered. Register first.")
        if first.num_bytes > expected or not 0 < len(first.id) <= 64:
            words = f"An upload has {expected} bytes and an id of up to 64 letters, got {first.num_bytes} announced."
            logger.warning("%s: upload refused. %s", who.name, words)
            raise self.gate.deny(who.name, "size", Code.INVALID_ARGUMENT, words)

    async def _collect(self, who: Identity, part: wire.MessagePart, context: Any) -> Arrived:
        """A whole upload, from its first message on."""
        first = part.about
        self._check_announced(who, first)
        try:
            if len(part.data) >= first.num_bytes:
                content = whole(part.data, first.num_bytes, first.checksum or None)
            else:
                collector = Collector(first.num_bytes, first.checksum)
                collector.add(part.data)
                while not collector.complete and (part := await self._next_piece(who, context)) is not _END:
                    collector.add(part.data)
                content = collector.content()
        except Broken as error:
            code = Code.INVALID_ARGUMENT if isinstance(error, TooLong) else Code.DATA_LOSS
            raise self.gate.deny(who.name, "broken", code, str(error)) from None
        self.bytes_up += len(content)
        weight = first.num_samples if self.book.recipe.counts_samples else 1.0
        if not 0 < weight < 2**31:
            words = f"`num_samples` must be positive, got {weight}."
            raise self.gate.deny(who.name, "samples", Code.INVALID_ARGUMENT, words)
        return Arrived(first.id, first.update, first.version, weight, content)

    async def _next_piece(self, who: Identity, context: Any) -> Any:
        """The next piece of an upload; a client that stalls is let go."""
        try:
            async with asyncio.timeout(self.terms.stall):
                return await context.read()
        except TimeoutError:
            words = f"Nothing came for {self.terms.stall:g} s in the middle of an upload. Send it again."
            raise self.gate.deny(who.name, "stalled", Code.DEADLINE_EXCEEDED, words) from None

    def _settle(self, name: str, arrived: Arrived, want_model: bool) -> tuple[Settled, Published | None]:
        """Settle an upload and, if it is wanted, encode the newest model."""
        settled = self.book.settle(name, arrived)
        return settled, self.book.published() if want_model else None

    def _numbers(self, who: Identity, numbers: Any) -> dict[str, Any]:
        """A report, as it is kept."""
        scores = self.book.recipe.training.scorings
        if sum(map(len, numbers.numbers.values())) > _MOST_NUMBERS or not numbers.numbers.keys() <= scores.keys():
            words = f"A report has up to {_MOST_NUMBERS} numbers of the scores {', '.join(scores)}."
            raise self.gate.deny(who.name, "report", Code.INVALID_ARGUMENT, words)
        finite = lambda metrics: {metric[:40]: value for metric, value in metrics.items() if isfinite(value)}
        found = {score: kept for score, metrics in numbers.numbers.items() if (kept := finite(metrics))}
        counts = {"samples": numbers.num_samples, "train_samples": numbers.num_train_samples}
        return {"numbers": found, "version": numbers.version, **counts}


def handlers(service: Service) -> grpc.GenericRpcHandler:
    """The calls of the service, each with its refusals as status codes."""
    made = {}
    for name, method in wire.METHODS.items():
        answer = getattr(service, name.lower())
        kind = ("stream" if method.many_in else "unary", "stream" if method.many_out else "unary")
        make = getattr(grpc, f"{kind[0]}_{kind[1]}_rpc_method_handler")
        made[name] = make(_guarded(answer), *method.coders[1:3])
    return grpc.method_handlers_generic_handler(wire.SERVICE, made)


def _guarded(answer: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await answer(request, context)
        except Denied as denied:
            await context.abort(denied.code, denied.words)

    return call


async def run_service(
    book: Book,
    terms: Terms,
    address: str,
    *,
    credentials: Credentials | None,
    revocations: Revocations | None,
    stop: asyncio.Event,
    stay: bool = False,
    opened: Callable[[int, Service], None] = lambda port, service: None,
) -> None:
    """Serve until the run is finished and its clients know it, or until `stop`; then drain and save."""
    service = Service(book, Gate(terms, revocations), terms)
    server = grpc.aio.server(options=options(terms, book.recipe.up.num_bytes))
    server.add_generic_rpc_handlers((handlers(service),))
    opened_port = listen(server, address, credentials)
    await server.start()
    opened(opened_port, service)
    ended = 0.0
    saved = time.monotonic()
    while not stop.is_set() and service.failure is None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.2)
        with contextlib.suppress(Denied):
            await service.tick()
            if time.monotonic() - saved >= terms.checkpoint:
                await service.save()
                saved = time.monotonic()
        if book.finished and not stay:
            ended = ended or time.monotonic()
            waiting = set(service.present()) - service.done
            if not waiting or time.monotonic() - ended > terms.linger:
                break
    service.drain()
    await server.stop(grace=10.0)
    with contextlib.suppress(Denied):
        await service.save()
    service.worker.shutdown()
    if service.failure is not None:
        raise service.failure
