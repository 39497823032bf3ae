"""The calls of a server, around a book. `serving` exposes them over gRPC.

The event loop does the input and output, so a slow, stalled or vanished client delays no other client. Everything that
touches the book runs in one thread: the loop's own thread if uploads are small, otherwise a worker. Checkpoints are
written in another thread, from values that do not change.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc

from personax.experiment.config import Terms
from personax.live import wire
from personax.live.book import Book
from personax.live.certificates import SOON, Identity
from personax.live.exchange import Arrived, Published, Settled
from personax.live.gate import Denied, Gate
from personax.live.ledger import Seat
from personax.live.log import logger
from personax.live.messages import PIECE, Mismatch, pieces
from personax.live.status import FederationStatus, status_of
from personax.live.uploads import END, collect, decoded, numbers_of

_LONGEST_WAIT = 30.0  # seconds that a request for work stays open
SMALL = 1 << 20  # largest size of a small upload or model, in bytes
_LEAVING = "The server is shutting down. Try again later."
SLOWEST = 10_000  # bytes a second at which a client must receive a large model
_MOST_LATE = 60.0  # seconds since the last `tick`, after which the book or the event loop counts as stuck
_RETRY = 0.5  # seconds after which to ask again for work
Code = grpc.StatusCode


class Service:
    """The implementation of the calls of `wire`, for clients and operators that the gate has admitted."""

    def __init__(self, book: Book, gate: Gate, terms: Terms) -> None:
        self.book, self.gate, self.terms = book, gate, terms
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="book")
        # Changing threads costs more than settling a small upload.
        self.inline = book.recipe.up.num_bytes <= SMALL
        self.seen: dict[str, float] = {}
        self.newcomers: set[str] = set()
        self.done: set[str] = set()  # clients that have the last model and have sent their last report
        self.transfers = asyncio.Semaphore(terms.max_transfers)
        self.changed = asyncio.Event()
        self.idle: set[asyncio.Task[Any]] = set()  # tasks of streams without an upload in progress
        self.failure: OSError | None = None
        self.draining, self.ticked = False, time.monotonic()
        self.bytes_up = self.bytes_down = 0
        book.present = self.present

    # Calls

    async def register(self, who: Identity, hello: Any, context: Any) -> Any:
        """Send the recipe to a client, and give it a seat if its data conform to the recipe's schema."""
        if self.draining:
            raise Denied(Code.UNAVAILABLE, _LEAVING)
        if hello.protocol != wire.PROTOCOL:
            got = f"This server speaks protocol {wire.PROTOCOL}, {who.name} speaks {hello.protocol}"
            raise Denied(Code.FAILED_PRECONDITION, f"{got}. Update the older one.")
        self._require_admitted(who, hello.newcomer)
        if hello.schema == self.book.recipe.digest and self.book.recipe.fits_scaling and not hello.newcomer:
            await self._contribute(who, hello)
        recipe, seat = self.book.recipe, Seat(who.id or 0)
        registered = hello.schema == recipe.digest and not recipe.fits_scaling
        if registered:
            self.gate.audit.count("login", client=who.name, newcomer=str(hello.newcomer))
            if who.expires - datetime.now(UTC) < SOON:
                self.gate.audit.count("expires soon", client=who.name, date=f"{who.expires:%Y-%m-%d}")
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
        self.gate.require_room(who.name)
        return await self._work(self._counted, who.name, self.book.join, who.name, who.id, num_samples)

    async def _contribute(self, who: Identity, hello: Any) -> None:
        """Add a client's moments to those from which the scaling is fitted."""
        if hello.features is None:
            words = "This server first fits a scaling from the moments of each client's columns. Update personax."
            raise Denied(Code.FAILED_PRECONDITION, words)
        await self._seat(who, hello.num_samples)
        found = {"features": asdict(hello.features), "targets": hello.targets and asdict(hello.targets)}
        await self._work(self._counted, who.name, self.book.contribute, who.name, found)

    async def fetch(self, who: Identity, ask: Any, context: Any) -> None:
        """Send the newest model, or that it is unchanged; first wait for work if the client asks for it."""
        self._check_run(ask.run)
        self._see(who)
        self._require_admitted(who)
        with self.gate.stream(who.name):
            await self._wait_for_work(who.name, min(ask.wait_seconds, _LONGEST_WAIT))
            self.gate.require_valid(who)  # the certificate may have been revoked meanwhile
            self._require_admitted(who)
            has_it = (ask.have, ask.rollbacks) == (self.book.version, self.book.ledger.rollbacks)
            newest = None if has_it else self.book.fresh or await self._work(self.book.published)
            await self._answer(context, who, Settled(""), newest)

    async def exchange(self, who: Identity, uploads: AsyncIterator[Any], context: Any) -> None:
        """Receive uploads sequentially; answer each with its outcome and, if requested, the newest model."""
        num = 0
        with self.gate.stream(who.name):
            while (content := await self._next_upload(context)) is not END:
                self.gate.require_valid(who)
                if num:  # opening the stream already paid for the first
                    self.gate.spend(who.name)
                num += 1
                part = decoded(self.gate, who, wire.METHODS["Exchange"], content)
                self._check_run(part.about.run)
                self._see(who)
                self._require_admitted(who)
                arrived = await collect(self.book, self.gate, who, part, context)
                self.bytes_up += len(arrived.content)
                self.gate.require_valid(who)  # a large upload takes time
                settled, newest = await self._work(self._settle, who.name, arrived, part.about.want_model)
                await self._answer(context, who, settled, newest)

    async def report(self, who: Identity, numbers: Any, context: Any) -> Any:
        """Store numbers that a client chose to report."""
        self._check_run(numbers.run)
        self._see(who)
        self._require_admitted(who)
        if who.name not in self.book.ledger.seats:
            raise Denied(Code.FAILED_PRECONDITION, f"{who.name} has not registered. Register first.")
        has_room = self.gate.has_room(who.name)
        if numbers.numbers and has_room:
            kept = numbers_of(self.book, self.gate, who, numbers)
            await self._work(self._counted, who.name, self.book.report, who.name, kept)
        elif numbers.numbers:
            self.gate.deny(who.name, "daily bytes", Code.RESOURCE_EXHAUSTED, "The report was dropped.")
        if numbers.last:
            self.done.add(who.name)
        return wire.Thanks(finished=self.book.finished, dropped=bool(numbers.numbers) and not has_room)

    async def exclude(self, who: Identity, asked: Any, context: Any) -> Any:
        """Exclude a client's uploads, or admit them again, at an operator's request."""
        await self._work(self.book.exclude, asked.client, asked.excluded, who.name)
        self.gate.audit.note("exclude" if asked.excluded else "readmit", client=asked.client, by=who.name)
        return wire.Thanks(finished=self.book.finished)

    async def status(self, who: Identity, question: Any, context: Any) -> Any:
        """Send the state of the run, with all clients for an operator and only itself for a client."""
        shown = self.current_status()
        if who.role != "operator":
            shown = shown.of_one(who.name)
        return wire.Status(json=shown.to_json())

    # State

    def present(self) -> list[str]:
        """The clients that train and have sent a request recently."""
        since = time.monotonic() - self.terms.presence
        barred = {name for name, seat in list(self.book.ledger.seats.items()) if seat.excluded} | self.newcomers
        return [name for name, at in list(self.seen.items()) if at >= since and name not in barred]

    def current_status(self) -> FederationStatus:
        """The current state of the run and its clients."""
        now = time.monotonic()
        ago = {name: now - at for name, at in list(self.seen.items())}
        return status_of(self.book, ago, self.gate.refusals, self.bytes_up, self.bytes_down)

    def problem(self) -> str:
        """The reason why the server does not serve, or ""."""
        if self.failure is not None:
            return f"The server is stopping: {self.failure}"
        late = time.monotonic() - self.ticked > _MOST_LATE
        return "The server is shutting down." if self.draining else "The server does not answer." if late else ""

    async def tick(self) -> None:
        """Do periodic work: deadlines, counts for the audit log, and closing excess connections."""
        self.ticked = time.monotonic()
        self.gate.close_connections()
        self.gate.refresh()
        self.gate.audit.flush()
        if not self.draining and self.failure is None:
            await self._work(self.book.advance)

    async def save(self) -> None:
        """Take a checkpoint now, and write it in a thread."""
        write = await self._work(self.book.snapshot)
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            self.failure = error

    # Implementation

    async def _work(self, do: Callable[..., Any], *given: Any) -> Any:
        """Run a function with exclusive access to the book. If the disk cannot be written to, the service ends."""
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
            logger.error("The server is stopping: %s", error)
            words = "The server cannot write to its disk and is stopping. Try again later."
            raise Denied(Code.UNAVAILABLE, words) from None
        except Mismatch as error:
            raise Denied(Code.FAILED_PRECONDITION, str(error)) from None
        if (self.book.version, self.book.ledger.round) != before or self.book.finished:
            self.wake()
        return found

    def wake(self) -> None:
        """Wake the requests that wait for work."""
        self.changed.set()
        self.changed = asyncio.Event()

    def drain(self) -> None:
        """Refuse new requests, and end those that wait."""
        self.draining = True
        self.wake()
        for task in self.idle:
            task.cancel()

    def _require_admitted(self, who: Identity, newcomer: bool = False) -> None:
        """Deny a client that the operator excluded, unless it comes as a newcomer."""
        seat = self.book.ledger.seats.get(who.name)
        if seat is not None and seat.excluded and not newcomer and who.name not in self.newcomers:
            words = f"{who.name} was excluded from this run by its operator."
            raise self.gate.deny(who.name, "excluded", Code.PERMISSION_DENIED, words)

    def _see(self, who: Identity) -> None:
        if self.draining:
            raise Denied(Code.UNAVAILABLE, _LEAVING)
        self.seen[who.name] = time.monotonic()

    def _check_run(self, run: str) -> None:
        if run != self.book.ledger.run:
            words = f"This server's run is {self.book.ledger.run}, the client's is {run or 'none'}. Register again."
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
        """The first message of the next upload. The wait for it ends when the server shuts down."""
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

    async def _answer(self, context: Any, who: Identity, settled: Settled, newest: Published | None) -> None:
        """Send the outcome of an upload and the newest model (None if the client has it or did not ask for it)."""
        name = who.name
        answer = {"outcome": settled.outcome, "words": settled.words, "retry_seconds": _RETRY}
        answer["rollbacks"] = self.book.ledger.rollbacks
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
            self.gate.require_valid(who)  # the client may have waited for other transfers
            long = newest.num_bytes > PIECE
            first = about(checksum=await self._work(lambda: newest.check) if long else 0)  # slow for a large model
            try:
                async with asyncio.timeout(self.terms.stall + newest.num_bytes / SLOWEST):
                    for piece in pieces(newest.buffers):
                        await context.write(wire.MessagePart(first, piece))
                        first = wire.DownloadHeader()
            except TimeoutError:
                words = "The download took too long while other clients wait. Ask for the model again."
                raise self.gate.deny(name, "stalled", Code.DEADLINE_EXCEEDED, words) from None

    def _counted(self, name: str, do: Callable[..., Any], *given: Any) -> Any:
        """Run a function of the book, and count the bytes that it writes for a client."""
        before = self.book.journal.end
        found = do(*given)
        self.gate.write(name, self.book.journal.end - before)
        return found

    def _settle(self, name: str, arrived: Arrived, want_model: bool) -> tuple[Settled, Published | None]:
        """Settle an upload and, if requested, encode the newest model."""
        before = self.book.journal.end
        settled = self.book.settle(name, arrived)
        if settled.outcome != "applied":
            self.gate.write(name, self.book.journal.end - before)
        if settled.outcome == "refused":
            self.gate.audit.count("refusal", client=name, reason="upload")
        return settled, self.book.published() if want_model else None
