"""The command line. Each group of commands is a Typer of its own, added to `app`."""

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from personax.datasets.fetch import CannotFetch, fetch, find_source
from personax.datasets.registry import ENTRIES

app = typer.Typer(
    name="personax",
    help="Personalized federated learning in JAX.",
    epilog="Example: personax data fetch mnist",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
data = typer.Typer(
    help="Get datasets, and see which there are.",
    epilog="Example: personax data list",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(data, name="data")


@app.callback()
def _root() -> None:
    """Personalized federated learning in JAX."""


@contextlib.contextmanager
def plain_errors(interrupted: str = "Interrupted.") -> Iterator[None]:
    """Around a command: an error is one message, without a traceback. Exit status 1, or 130 for Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(interrupted, err=True)
        raise typer.Exit(130) from None
    except (ValueError, OSError, CannotFetch) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None


def _fetchable(name: str) -> str:
    how = next((entry.how for entry in ENTRIES if entry.name == name), "")
    if how:
        raise typer.BadParameter(f"{name} is not fetched ({how}). See `personax.datasets.{name}`.")
    try:
        return find_source(name).name
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@data.command("fetch", epilog="Example: personax data fetch mnist")
@plain_errors("Interrupted. Run the same command again to go on from here.")
def fetch_command(name: Annotated[str, typer.Argument(help="mnist or cifar10", callback=_fetchable)]) -> None:
    """Get a dataset from the network, verify it, and keep it.

    It goes to the folder PERSONAX_DATA, or else to the user's cache. What is there already is not fetched again.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    screen = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=screen, transient=True, disable=not screen.is_terminal
    ) as bar:
        tasks = {}

        def show(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        path = fetch(name, progress=show)
    typer.echo(f"{name} is in {path}")


@data.command("list", epilog="Example: personax data list")
@plain_errors()
def list_command() -> None:
    """Show the datasets, their sizes, and whether they are here."""
    table = Table("name", "what", "size", "where", "citation", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for entry in ENTRIES:
        table.add_row(entry.name, entry.description, entry.size, entry.where, entry.citation)
    Console().print(table)
