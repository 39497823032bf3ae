"""The command `personax live-demo`. It imports its modules when it runs, so that other commands start fast."""

import contextlib
import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from personax.cli.console import err
from personax.cli.errors import plain_errors
from personax.evaluation.scores import show


def live_demo(
    folder: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder. Default: a new one under runs/.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting.")] = None,
) -> None:
    """Run a server and three clients on this machine, each with its own certificate, and train on the digits."""
    with plain_errors():
        from personax.live import demo
        from personax.live.certificates import read_credentials
        from personax.live.connection import Connection, Unreachable
        from personax.live.status import FederationStatus
        from personax.live.view import table_of

        root = folder or Path("runs") / f"live-demo-{datetime.now():%Y%m%d-%H%M%S}"
        screen = Live(console=err, auto_refresh=False) if err.is_terminal else None
        connections: dict[int, Connection] = {}  # by port, opened on first use

        def watch(port: int) -> None:
            if screen is None:
                return
            if port not in connections:
                credentials = read_credentials(root / "certificates" / "operator")
                connections[port] = Connection(f"127.0.0.1:{port}", credentials, patience=1.0, call_seconds=2.0)
            with contextlib.suppress(Unreachable):
                screen.update(table_of(FederationStatus.from_json(connections[port].status())), refresh=True)

        with screen or contextlib.nullcontext():
            demo.run_demo(root, overrides or [], lambda text: typer.echo(text, err=True), watch)
        for name in demo.CLIENTS:
            _show_scores(name, root / name)
        typer.echo(f"Everything is in {root}, the report in {root / 'run' / 'report.html'}")


def _show_scores(name: str, folder: Path) -> None:
    """Print the accuracies of a client from its folder."""
    (path,) = folder.glob("*/numbers.json")
    numbers = json.loads(path.read_text())
    start, shared, own = (show(numbers[what]["accuracy"], "accuracy") for what in ("start", "shared", "personal"))
    typer.echo(f"{name}: accuracy {start} % at the start, {shared} % shared, {own} % personal model")
