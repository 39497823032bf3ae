"""The commands `personax data fetch`, `personax data stand-in` and `personax data list`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from personax.cli.console import err, print_table
from personax.cli.errors import plain_errors
from personax.cli.options import GROUP_SETTINGS
from personax.data.datasets.fetch import fetch
from personax.data.datasets.registry import list_datasets
from personax.data.datasets.sources import SOURCES
from personax.data.datasets.stand_in import write_stand_in

group = typer.Typer(
    help="Get datasets, and see which there are.", epilog="Example: personax data list", **GROUP_SETTINGS
)


def _require_fetchable(name: str) -> None:
    """Raise an error for a dataset that needs no download; `fetch` knows which names there are."""
    how = next((entry.how for entry in list_datasets() if entry.name == name), "")
    if how:
        raise ValueError(f"{name} is not fetched ({how}). See `personax.data.datasets.{name}`.")


@group.command("fetch", epilog="Example: personax data fetch mnist")
def fetch_dataset(name: Annotated[str, typer.Argument(help=" or ".join(SOURCES))]) -> None:
    """Get a dataset from the network, verify it, and keep it.

    It goes to the folder PERSONAX_DATA, or else to the user's cache. What is there already is not fetched again.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with plain_errors("Interrupted. Run the same command again to go on from here."):
        _require_fetchable(name)
        with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as bar:
            tasks = {}

            def progress(what: str, done: int, total: int | None) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=total)
                bar.update(tasks[what], completed=done, total=total)

            path = fetch(name, progress=progress)
        typer.echo(f"{name} is in {path}")


@group.command("stand-in", epilog="Example: personax data stand-in femnist --writers 1000")
def stand_in(
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    writers: Annotated[int, typer.Option(min=1, help="How many.")] = 1000,
) -> None:
    """Write a stand-in for FEMNIST in LEAF's format: MNIST's digits in the hands of invented writers.

    To reproduce apfl-figure5 with it, write it to the folder femnist in the folder PERSONAX_DATA.
    """
    with plain_errors("Interrupted. Run the same command again."):
        if folder.exists():
            raise FileExistsError(f"{folder} is there already, and nothing was written. Give another folder.")
        typer.echo(f"A stand-in for FEMNIST is in {write_stand_in(folder, writers)}")


@group.command("list", epilog="Example: personax data list")
def list_command() -> None:
    """Show the datasets, their sizes, and whether they are here."""
    with plain_errors():
        print_table(
            ("name", "what", "size", "where", "citation"),
            [(entry.name, entry.description, entry.size, entry.where, entry.citation) for entry in list_datasets()],
            padding=(0, 1, 0, 0),
        )
