"""The ServerApp, which drives the same book as `personax serve` over Flower.

A killed ServerApp cannot be resumed; Flower starts another one in a new run. With the same `out` folder, it continues
where the last one stopped and keeps the run's name, by which the nodes identify their personal states.
"""

import logging
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from personax.data.locks import sole_user
from personax.experiment.config import Config, Terms, load
from personax.experiment.folders import Folder, readable_slug
from personax.flower.api import Context, Grid, ServerApp  # pyright: ignore[reportAttributeAccessIssue]
from personax.flower.driver import Driver, Manners
from personax.live.book import Book
from personax.live.journal import Journal
from personax.live.results import open_run, write_results
from personax.live.server import choose
from personax.report import write_report
from personax.values import check_names

logger = logging.getLogger("personax.flower")
TERM_KEYS = ("num-clients", "deadline", "least-share", "outliers", "outlier-factor", "least-peers", "sync")
MANNER_KEYS = ("ttl", "drain")
KEYS = ("out", "algorithm", *TERM_KEYS, *MANNER_KEYS)


def server_app(recipe: Path) -> ServerApp:
    """Make the ServerApp of an app whose recipe is in this file."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        _speak_up()
        serve(grid, load(recipe), context.run_config)

    return app


def _speak_up() -> None:
    """Log to stderr, where `flwr log` shows it, without changing the loggers of other packages."""
    speaker = logging.getLogger("personax")
    if not speaker.handlers:
        speaker.addHandler(logging.StreamHandler(sys.stderr))
        speaker.setLevel(logging.INFO)
        speaker.propagate = False


def serve(grid: Grid, config: Config, given: Mapping[str, Any]) -> None:
    """Run a recipe over a grid until it is finished, and write its results. `given` has the run configuration."""
    terms, manners = read_terms(config, given)
    recipe = choose(config, str(given.get("algorithm") or "") or None)
    name = readable_slug(recipe.config.name)
    root = Path(str(given.get("out") or f"runs/flower-{name}")).expanduser().resolve()
    root.mkdir(parents=True, exist_ok=True)
    with sole_user(root / "server.lock", f"The run {root}"):
        folder, run = open_run(root, recipe, f"{name}-{secrets.token_hex(4)}")
        journal = Journal(root, terms.sync)
        book = Book(recipe, terms, journal, folder.checkpoints(recipe.training.name), run)
        done = f"{book.ledger.num_events} updates are done" if book.ledger.num_events else "a new run"
        logger.info("%s: %s in %s; %s.", run, recipe.training.name, root, done)
        driver = Driver(grid, book, manners)
        driver.run()
        journal.close()
        _conclude(folder, book, driver)


def read_terms(config: Config, given: Mapping[str, Any]) -> tuple[Terms, Manners]:
    """The terms and timeouts: `[live]` of the recipe, with the changes in the run configuration."""
    check_names("the run's configuration", given, KEYS, "key")
    chosen = lambda keys: {key.replace("-", "_"): given[key] for key in keys if key in given}
    terms = chosen(TERM_KEYS)
    if terms.get("num_clients") == 0:
        terms["num_clients"] = None
    return replace(config.live or Terms(), **terms), Manners(**chosen(MANNER_KEYS))


def _conclude(folder: Folder, book: Book, driver: Driver) -> None:
    record = write_results(folder, book, driver.bytes_up, driver.bytes_down)
    if record is None:
        logger.info("The run is in %s. There is no report, because no client reported numbers.", folder.root)
    else:
        logger.info("The run is in %s, its report in %s", folder.root, write_report([folder.root], folder.report))
