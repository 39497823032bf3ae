"""`personax serve`: a run folder, a book and a service, from the first client to the report."""

import asyncio
import contextlib
import logging
import secrets
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from personax.data.locks import sole_user
from personax.experiment.build import Outputs, make_federation, outputs_of, resolve
from personax.experiment.config import Config, ConfigError, Terms, choose_algorithm
from personax.experiment.folders import readable_slug
from personax.experiment.records import RunRecord
from personax.live.book import Book
from personax.live.certificates import Credentials, Revocations, read_credentials
from personax.live.journal import Journal
from personax.live.ports import require_loopback
from personax.live.recipe import Recipe, Spec, make_recipe
from personax.live.results import open_run, write_results
from personax.live.service import Service, run_service
from personax.live.view import Metrics
from personax.values import options_of

logger = logging.getLogger("personax.live")


@dataclass(frozen=True)
class Address:
    """Where to listen, as whom, and where to show numbers. Without an identity there is no TLS, on loopback alone."""

    listen: str
    identity: Path | None
    metrics_port: int | None = None


def choose(config: Config, algorithm: str | None) -> Recipe:
    """The recipe to serve: one algorithm of a configuration."""
    resolved = resolve(choose_algorithm(config, algorithm), baselines=False)
    return make_recipe(resolved, spec_of(resolved))


def spec_of(config: Config) -> Spec:
    """What samples look like: from `[live.sample]`, or from the data that a configuration names, if it is no file."""
    given = config.live and config.live.sample
    if given:
        kind = "classification" if config.task.kind == "auto" else config.task.kind
        return Spec(tuple(given.shape), given.type, Outputs(kind, given.num_outputs))
    if "path" in options_of(config.data.table):
        raise ConfigError("The clients have the data: say what a sample looks like in `[live.sample]`.")
    federation = make_federation(config)
    return Spec(federation.x.shape[1:], str(federation.x.dtype), outputs_of(config, federation))


def serve(
    recipe: Recipe,
    root: Path,
    address: Address,
    *,
    stay: bool = False,
    opened: Callable[[int, Service], None] = lambda port, service: None,
) -> RunRecord | None:
    """Serve a run until it is finished or interrupted; its record, if clients reported any numbers."""
    shown, revoked = _credentials(address)
    terms = recipe.config.live or Terms()
    root.mkdir(parents=True, exist_ok=True)
    with sole_user(root / "server.lock", f"The live run {root}"):
        folder, run = open_run(root, recipe, f"{readable_slug(recipe.config.name)}-{secrets.token_hex(4)}")
        journal = Journal(root, terms.sync)
        book = Book(recipe, terms, journal, folder.checkpoints(recipe.training.name), run)
        service = _run(book, terms, address, shown, revoked, stay, opened)
        journal.close()
        return write_results(folder, book, service.bytes_up, service.bytes_down)


def _run(
    book: Book,
    terms: Terms,
    address: Address,
    shown: Credentials | None,
    revoked: Revocations | None,
    stay: bool,
    opened: Callable[[int, Service], None],
) -> Service:
    """Serve a book until it is finished or interrupted."""
    kept: list[Service] = []

    def ready(port: int, service: Service) -> None:
        kept.append(service)
        if address.metrics_port is not None:
            Metrics(service.standing).start(address.metrics_port)
        opened(port, service)

    tls = {"credentials": shown, "revocations": revoked}
    asyncio.run(_until_stopped(partial(run_service, book, terms, address.listen, **tls, stay=stay, opened=ready)))
    return kept[0]


async def _until_stopped(run: Callable[..., Awaitable[None]]) -> None:
    """Serve; SIGINT and SIGTERM end it cleanly."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError, NotImplementedError):  # not in the main thread: whoever started it
            loop.add_signal_handler(number, stop.set)
    await run(stop=stop)


def _credentials(address: Address) -> tuple[Credentials | None, Revocations | None]:
    if address.identity is None:
        require_loopback(address.listen)
        return None, None
    shown = read_credentials(address.identity)
    return shown, Revocations(address.identity / "revoked.pem", shown.authority)
