"""The command `personax watch`: a page that follows a run while it trains."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from personax.cli.errors import plain_errors


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, simulated or live.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port. Default: any free port.")] = 0,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between updates of the page.")] = 2.0,
) -> None:
    """Follow a run in a browser on this machine: progress, curves and clients, while it trains."""
    with plain_errors():
        from personax.report.following import read_simulated, render
        from personax.report.serving import HOST, page_server

        read = lambda: read_simulated(run)
        if (run / "live.json").exists():
            from personax.live.following import Follower

            read = Follower(run).read
        read()  # raises an error here rather than in the browser
        try:
            server = page_server(lambda: render(read(), every), port)
        except OSError as error:
            raise ValueError(f"Port {port} cannot be used: {error.strerror}. Choose another with --port.") from None
        with contextlib.suppress(KeyboardInterrupt), server:
            typer.echo(f"Following {run} at http://{HOST}:{server.server_address[1]}/ (Ctrl-C ends)")
            server.serve_forever()
