"""The command `personax serve`: a run folder, a book and a service, from the first client to the report."""

import asyncio
import contextlib
import json
import secrets
import signal
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from personax.data.locks import sole_user
from personax.data.scaling import scaled_type
from personax.data.schema import Schema, numbered
from personax.experiment.build import make_federation, outputs_of, resolve
from personax.experiment.config import Config, ConfigError, Sample, Terms, choose_algorithm
from personax.experiment.folders import readable_slug
from personax.experiment.records import RunRecord
from personax.live.audit import NAME as AUDIT
from personax.live.audit import Audit, read_audit, settings_changed
from personax.live.book import Book
from personax.live.certificates import Credentials, Revocations, read_credentials
from personax.live.journal import Journal
from personax.live.ports import require_loopback
from personax.live.recipe import Recipe, make_recipe
from personax.live.results import open_run, write_results
from personax.live.service import Service
from personax.live.serving import run_service
from personax.live.view import Metrics
from personax.values import options_of


@dataclass(frozen=True)
class Address:
    """The address and identity of a server, and its port for metrics. Without an identity: no TLS, only loopback."""

    listen: str
    identity: Path | None
    metrics_port: int | None = None


def choose(config: Config, algorithm: str | None) -> Recipe:
    """Choose the recipe to serve: one algorithm of a configuration."""
    resolved = resolve(choose_algorithm(config, algorithm), baselines=False)
    sample = resolved.live and resolved.live.sample
    # If the server has the data, their schema contains the scaling.
    fits_scaling = sample is not None and (sample.standardize or resolved.data.standardize)
    return make_recipe(resolved, schema_of(resolved), fits_scaling)


def schema_of(config: Config) -> Schema:
    """The schema in `[live.sample]`, or that of the configuration's data if the server has them."""
    given = config.live and config.live.sample
    if given:
        try:
            return _announced(given, config.task.kind == "regression", given.standardize or config.data.standardize)
        except ValueError as error:
            raise ConfigError(f"`live.sample`: {error}") from None
    path = options_of(config.data.table).get("path")
    if path is not None and not Path(path).exists():
        raise ConfigError(
            f"File not found: {path}. If only the clients have data, describe a sample in `[live.sample]`."
        )
    federation = make_federation(config)
    outputs_of(config, federation)  # rejects labels that do not fit the task
    return federation.schema


def _announced(given: Sample, is_regression: bool, standardize: bool) -> Schema:
    """The schema that `[live.sample]` describes."""
    names, classes, num = tuple(given.features), tuple(given.classes), given.num_outputs or len(given.classes) or 10
    if not (given.shape or names):
        raise ConfigError("a sample needs a `shape` or the names of its columns as `features`. Add one of them.")
    if classes and (is_regression or len(classes) != num):
        wanted = "A regression has no `classes`" if is_regression else f"{num} outputs need {num} `classes`"
        raise ConfigError(f"{wanted}, got {len(classes)}. Remove one of the two settings.")
    dtype = str(scaled_type(given.type)) if standardize else given.type
    if standardize and given.type == "uint8":
        raise ConfigError("samples of type uint8 are images, which are not standardized. Remove `standardize`.")
    targets = tuple(given.label_shape) or ((num,) if is_regression and num > 1 else ())
    known = () if is_regression else classes or numbered(num)
    return Schema(tuple(given.shape) or (len(names),), dtype, names, known, targets)


def serve(
    recipe: Recipe,
    root: Path,
    address: Address,
    *,
    stay: bool = False,
    roll_back_to: int | None = None,
    opened: Callable[[int, Service], None] = lambda port, service: None,
) -> RunRecord | None:
    """Serve a run until it is finished or interrupted; return its record if clients reported any numbers.

    With `roll_back_to`, first return to the state of that version.
    """
    shown, revoked = _credentials(address)
    terms = recipe.config.live or Terms()
    root.mkdir(parents=True, exist_ok=True)
    with sole_user(root / "server.lock", f"The live run {root}"):
        folder, run = open_run(root, recipe, f"{readable_slug(recipe.config.name)}-{secrets.token_hex(4)}")
        journal = Journal(root, terms.sync)
        book = Book(recipe, terms, journal, folder.checkpoints(recipe.training.name), run)
        audit = _open_audit(root, terms)
        if roll_back_to is not None:
            audit.note("rollback", version=roll_back_to, before=book.version)
            book.roll_back(roll_back_to)
        try:
            service = _run(book, terms, address, (shown, revoked), stay, opened, audit)
        finally:
            audit.note("stop")
            audit.close()
        journal.close()
        return write_results(folder, book, service.bytes_up, service.bytes_down)


def _open_audit(root: Path, terms: Terms) -> Audit:
    """Open the audit log of a run; add a line for this start and one for each setting that changed."""
    lines = read_audit(root) if (root / AUDIT).exists() else []
    settings = json.loads(json.dumps(asdict(terms)))
    audit = Audit(root)
    for name, (old, new) in settings_changed(lines, settings).items():
        audit.note("setting", name=name, old=old, new=new)
    audit.note("start", settings=settings)
    return audit


def _run(
    book: Book,
    terms: Terms,
    address: Address,
    trust: tuple[Credentials | None, Revocations | None],
    stay: bool,
    opened: Callable[[int, Service], None],
    audit: Audit,
) -> Service:
    """Serve a book until it is finished or interrupted."""
    kept: list[Service] = []

    def ready(port: int, service: Service) -> None:
        kept.append(service)
        if address.metrics_port is not None:
            Metrics(service.current_status, service.problem).start(address.metrics_port)
        opened(port, service)

    tls = {"credentials": trust[0], "revocations": trust[1], "audit": audit}
    asyncio.run(_until_stopped(partial(run_service, book, terms, address.listen, **tls, stay=stay, opened=ready)))
    return kept[0]


async def _until_stopped(run: Callable[..., Awaitable[None]]) -> None:
    """Serve until the run ends or SIGINT or SIGTERM stops it cleanly."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError, NotImplementedError):  # outside the main thread, the caller stops it
            loop.add_signal_handler(number, stop.set)
    await run(stop=stop)


def _credentials(address: Address) -> tuple[Credentials | None, Revocations | None]:
    if address.identity is None:
        require_loopback(address.listen)
        return None, None
    shown = read_credentials(address.identity)
    return shown, Revocations(address.identity / "revoked.pem", shown.authority)
