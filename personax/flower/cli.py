"""`personax flower`: what is needed beside Flower's own commands."""

from pathlib import Path
from typing import Annotated

import typer

flower = typer.Typer(
    help="Run a recipe on an existing Flower deployment.",
    epilog="Example: personax flower init mine",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@flower.callback()
def _group() -> None:
    """Run a recipe on an existing Flower deployment."""


@flower.command("init", epilog="Example: personax flower init mine --config mine.toml --algorithm APFL")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the app.")],
    config: Annotated[Path | None, typer.Option(help="A TOML file. By default the embedded digits.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="Which one, where the file has several.")] = None,
    clients: Annotated[int, typer.Option(min=0, help="How many there are; 0: as many as come.")] = 3,
) -> None:
    """Write a ready Flower app, which `flwr run DIR` starts."""
    from personax.flower.template import write_app

    try:
        write_app(folder, config, algorithm, clients)
    except (ValueError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"Wrote {folder}. Start it with: flwr run {folder} SUPERLINK (docs/flower.md)")
