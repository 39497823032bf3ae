"""Serve a service over gRPC with mutual TLS until its run ends. Requests are read within the limits of the gate."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from math import inf
from typing import Any

import grpc

from personax.experiment.config import Terms
from personax.live import wire
from personax.live.audit import Audit
from personax.live.book import Book
from personax.live.certificates import Credentials, Revocations, expiry_warning
from personax.live.gate import Denied, Gate
from personax.live.log import logger
from personax.live.ports import listen, options
from personax.live.service import Service
from personax.live.uploads import decoded

_DAY = 86_400.0
ROLES = {"Status": ("client", "operator"), "Exclude": ("operator",)}  # other calls are for clients only


def handlers(service: Service) -> grpc.GenericRpcHandler:
    """The handlers of the service's calls, which turn refusals into status codes."""
    made = {}
    for name, method in wire.METHODS.items():
        kind = ("stream" if method.many_in else "unary", "stream" if method.many_out else "unary")
        make = getattr(grpc, f"{kind[0]}_{kind[1]}_rpc_method_handler")
        made[name] = make(_guarded(service, method), None, method.coders[2])
    return grpc.method_handlers_generic_handler(wire.SERVICE, made)


def _guarded(service: Service, method: wire.Method) -> Callable[..., Any]:
    """Wrap a call: admit the sender, read the request, and answer it. A failure is logged in one line."""
    answer, gate = getattr(service, method.name.lower()), service.gate

    async def call(request: Any, context: Any) -> Any:
        try:
            who = gate.admit(context, ROLES.get(method.name, ("client",)))
            given = request if method.many_in else decoded(gate, who, method, request)
            return await answer(who, given, context)
        except Denied as denied:
            await context.abort(denied.code, denied.words)
        except Exception as error:
            logger.error("%s failed: %s: %s", method.name, type(error).__name__, error)
            logger.debug("Traceback", exc_info=True)
            await context.abort(grpc.StatusCode.INTERNAL, "The server failed on this request. See its log.")

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
    audit: Audit | None = None,
) -> None:
    """Serve until the run is finished and its clients have been informed, or until `stop`; then drain and save."""
    service = Service(book, Gate(terms, revocations, audit), terms)
    server = grpc.aio.server(options=options(terms, book.recipe.up.num_bytes))
    server.add_generic_rpc_handlers((handlers(service),))
    opened_port = service.gate.connections.port = listen(server, address, credentials)
    await server.start()
    opened(opened_port, service)
    ended, warned = 0.0, -inf
    saved = time.monotonic()
    while not stop.is_set() and service.failure is None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.2)
        if credentials is not None and time.monotonic() - warned >= _DAY:
            warned = time.monotonic()
            if warning := expiry_warning(credentials.certificate):
                logger.warning("%s", warning)
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
