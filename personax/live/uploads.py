"""Reception of uploads: each is announced, collected in pieces within limits, and checked before it is passed on."""

import asyncio
from math import isfinite
from typing import Any

import grpc

from personax.experiment.config import Terms
from personax.live import wire
from personax.live.book import Book
from personax.live.certificates import Identity
from personax.live.exchange import Arrived
from personax.live.gate import Denied, Gate
from personax.live.messages import Broken, Collector, TooLong, whole

END: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
_MOST_SKIPPED = 1_000_000  # updates of a client that the server never saw
_MOST_UPDATES = 1 << 31
_SMALLEST_PIECE = 1 << 16  # bytes; a few smaller ones are tolerated
_MOST_NUMBERS = 1000  # in one report
Code = grpc.StatusCode


def decoded(gate: Gate, who: Identity, method: wire.Method, content: bytes) -> Any:
    """Read a message of an admitted client, or deny it."""
    try:
        return method.coders[1](content)
    except ValueError as error:  # includes pydantic's errors
        words = f"Malformed message for {method.name}: {' '.join(str(error).split())[:200]}"
        raise gate.deny(who.name, "malformed", Code.INVALID_ARGUMENT, words) from None


async def collect(book: Book, gate: Gate, who: Identity, part: wire.MessagePart, context: Any) -> Arrived:
    """Collect a whole upload, given its first message."""
    first = part.about
    _check_announced(book, gate, who, first)
    try:
        if len(part.data) >= first.num_bytes:
            content = whole(part.data, first.num_bytes, first.checksum or None)
        else:
            content = await _pieces(gate, who, part, context)
    except Broken as error:
        code = Code.INVALID_ARGUMENT if isinstance(error, TooLong) else Code.DATA_LOSS
        raise gate.deny(who.name, "broken", code, str(error)) from None
    weight = first.num_samples if book.recipe.counts_samples else 1.0
    if not 0 < weight < 2**31:
        words = f"`num_samples` must be positive, got {weight}."
        raise gate.deny(who.name, "samples", Code.INVALID_ARGUMENT, words)
    return Arrived(first.id, first.update, first.version, weight, content, first.rollbacks)


def numbers_of(book: Book, gate: Gate, who: Identity, numbers: Any) -> dict[str, Any]:
    """Check a report, and return it as the book stores it."""
    scores = book.recipe.training.scorings
    names = {name for metrics in numbers.numbers.values() for name in metrics}
    if sum(map(len, numbers.numbers.values())) > _MOST_NUMBERS or not numbers.numbers.keys() <= scores.keys():
        words = f"A report may have at most {_MOST_NUMBERS} numbers, of the scores {', '.join(scores)}."
        raise gate.deny(who.name, "report", Code.INVALID_ARGUMENT, words)
    if not all(name.isprintable() for name in names):
        words = "The names of metrics must be without control characters. Rename them."
        raise gate.deny(who.name, "report", Code.INVALID_ARGUMENT, words)
    finite = lambda metrics: {metric[:40]: value for metric, value in metrics.items() if isfinite(value)}
    found = {score: kept for score, metrics in numbers.numbers.items() if (kept := finite(metrics))}
    counts = {"samples": numbers.num_samples, "train_samples": numbers.num_train_samples}
    return {"numbers": found, "version": numbers.version, **counts}


def _check_announced(book: Book, gate: Gate, who: Identity, first: Any) -> None:
    """Check an upload's header before storing any of its data."""
    expected, seat = book.recipe.up.num_bytes, book.ledger.seats.get(who.name)
    if seat is None:
        raise Denied(Code.FAILED_PRECONDITION, f"{who.name} has not registered. Register first.")
    if first.num_bytes > expected or not 0 < len(first.id) <= 64 or not first.id.isprintable():
        words = f"An upload must have {expected} bytes and an id of up to 64 letters, got {first.num_bytes} announced."
        raise gate.deny(who.name, "size", Code.INVALID_ARGUMENT, words)
    if first.update >= min(seat.next_update + _MOST_SKIPPED, _MOST_UPDATES):
        words = f"The next update must be {seat.next_update}, got {first.update}. Send that one."
        raise gate.deny(who.name, "update", Code.INVALID_ARGUMENT, words)
    gate.require_room(who.name)


async def _pieces(gate: Gate, who: Identity, part: wire.MessagePart, context: Any) -> Any:
    """Collect the pieces of an upload."""
    first, num = part.about, 1
    most = 16 + first.num_bytes // _SMALLEST_PIECE
    collector = Collector(first.num_bytes, first.checksum)
    collector.add(part.data)
    while not collector.complete and (content := await _next_piece(gate.terms, gate, who, context)) is not END:
        num += 1
        if num > most:
            raise TooLong(f"An upload of {first.num_bytes} bytes may have at most {most} pieces. Send longer pieces.")
        collector.add(decoded(gate, who, wire.METHODS["Exchange"], content).data)
    return collector.content()


async def _next_piece(terms: Terms, gate: Gate, who: Identity, context: Any) -> Any:
    """Read the next piece of an upload; disconnect a client that stalls."""
    try:
        async with asyncio.timeout(terms.stall):
            return await context.read()
    except TimeoutError:
        words = f"Nothing came for {terms.stall:g} s in the middle of an upload. Send it again."
        raise gate.deny(who.name, "stalled", Code.DEADLINE_EXCEEDED, words) from None
