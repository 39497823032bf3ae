"""The command `personax flower init`. Flower's own commands do the rest."""

from pathlib import Path
from typing import Annotated

import typer

from personax.cli.errors import plain_errors
from personax.cli.options import GROUP_SETTINGS

group = typer.Typer(
    help="Run a recipe on an existing Flower deployment.", epilog="Example: personax flower init mine", **GROUP_SETTINGS
)


@group.callback()
def _group() -> None:  # without a callback, Typer would merge the only command into the group
    """Run a recipe on an existing Flower deployment."""


@group.command("init", epilog="Example: personax flower init mine --config mine.toml --algorithm APFL")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the app.")],
    config: Annotated[Path | None, typer.Option(help="A TOML file. Default: the embedded digits.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="The algorithm, if the file has several.")] = None,
    clients: Annotated[int, typer.Option(min=0, help="Number of clients to wait for; 0: do not wait.")] = 3,
) -> None:
    """Write a complete Flower app, which `flwr run DIR` starts."""
    with plain_errors():
        from personax.flower.template import write_app

        write_app(folder, config, algorithm, clients)
        typer.echo(f"Wrote {folder}. Start it with: flwr run {folder} SUPERLINK (docs/flower.md)")
