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

group = typer.Typer(help="Download datasets, and list them.", epilog="Example: personax data list", **GROUP_SETTINGS)


def _require_fetchable(name: str) -> None:
    """Raise an error for a dataset that is not downloaded. Unknown names are left to `fetch`."""
    how = next((entry.how for entry in list_datasets() if entry.name == name), "")
    if how:
        raise ValueError(f"{name} is not downloaded ({how}). See `personax.data.datasets.{name}`.")


@group.command("fetch", epilog="Example: personax data fetch mnist")
def fetch_dataset(name: Annotated[str, typer.Argument(help=" or ".join(SOURCES))]) -> None:
    """Download a dataset, verify it, and store it.

    It is stored in the folder PERSONAX_DATA, or in your cache folder if that is not set. A dataset that is already
    there is not downloaded again.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with plain_errors("Interrupted. To continue, run the same command again."):
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
    writers: Annotated[int, typer.Option(min=1, help="Number of writers.")] = 1000,
) -> None:
    """Write a stand-in for FEMNIST in LEAF's format: MNIST's digits, distorted for each of its invented writers.

    To reproduce apfl-figure5 with it, write it to the folder femnist in the folder PERSONAX_DATA.
    """
    with plain_errors("Interrupted. Run the same command again."):
        if folder.exists():
            raise FileExistsError(f"{folder} already exists, so nothing was written. Give another folder.")
        typer.echo(f"A stand-in for FEMNIST is in {write_stand_in(folder, writers)}")


@group.command("list", epilog="Example: personax data list")
def list_command() -> None:
    """Show the datasets, their sizes, and their places on this machine."""
    with plain_errors():
        print_table(
            ("name", "what", "size", "where", "citation"),
            [(entry.name, entry.description, entry.size, entry.where, entry.citation) for entry in list_datasets()],
            padding=(0, 1, 0, 0),
        )
