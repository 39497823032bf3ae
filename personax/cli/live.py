"""Commands of a live federation: `serve`, `join` and `status`.

They import their modules when they run, so that other commands start fast and work without the extra `live`.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live

from personax.cli.certify import CERTIFICATES
from personax.cli.console import err, out
from personax.cli.errors import plain_errors
from personax.cli.options import GROUP_SETTINGS

PATIENCE = 5.0  # the most seconds that an operator's command waits for its server

Identity = Annotated[Path | None, typer.Option(help="The folder with ca.pem, cert.pem and key.pem.")]
Server = Annotated[str, typer.Argument(metavar="HOST:PORT", help="The address of the server.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS, only on this machine, to try things out.")]


def serve(
    config: Annotated[Path, typer.Argument(help="A TOML file with one algorithm, or use --algorithm.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT. Port 0 picks a free one.")] = "127.0.0.1:7000",
    identity: Identity = None,
    insecure: Insecure = False,
    algorithm: Annotated[str | None, typer.Option(help="The algorithm, if the file has several.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run folder. An existing run is resumed.")
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="After the end, keep serving the last model to newcomers.")
    ] = False,
    metrics_port: Annotated[int | None, typer.Option(help="Serve metrics for Prometheus on this port.")] = None,
    view: Annotated[bool, typer.Option(help="Show the clients on the terminal.")] = True,
    roll_back_to: Annotated[
        int | None, typer.Option("--from", metavar="VERSION", min=0, help="First return to this saved version.")
    ] = None,
) -> None:
    """Serve a recipe to clients on other machines. To resume after a crash, rerun the same command."""
    with plain_errors():
        from personax.live.processes import keep_modules, set_up_server

        set_up_server()  # before gRPC is imported, because it reads its settings then
        from personax.cli.imports import load_and_announce
        from personax.experiment.folders import Folder, readable_slug
        from personax.live import server

        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
        credentials = _find_identity(identity, insecure, "server")
        recipe = server.choose(load_and_announce(config, overrides), algorithm)
        _warn_of_expiry(credentials)
        address = server.Address(listen, credentials, metrics_port)
        root = folder or Path("runs") / f"live-{readable_slug(recipe.config.name)}"
        keep_modules()
        with _show_server(view) as opened:
            record = server.serve(recipe, root, address, stay=stay, roll_back_to=roll_back_to, opened=opened)
        if record is None:
            typer.echo(f"The run is in {root}. There is no report, because no client reported numbers.")
            return
        from personax.report import write_report

        typer.echo(f"The run is in {root}, the report in {write_report([root], Folder(root).report)}")


def join(
    server: Server,
    data: Annotated[Path, typer.Option(help="The client's samples: npz, CSV or Parquet with a label column.")],
    identity: Identity = None,
    insecure: Annotated[str | None, typer.Option(help="Without TLS, only on this machine: the client's name.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="The folder for the personal state. Default: in the identity folder.")
    ] = None,
    label: Annotated[str, typer.Option(help="The column of labels.")] = "label",
    shape: Annotated[str | None, typer.Option(help="The shape of a sample, such as 28x28.")] = None,
    report: Annotated[int | None, typer.Option(min=1, help="Report test scores after every N updates.")] = None,
    limits: Annotated[Path | None, typer.Option(help="A TOML file with limits on the server's requests.")] = None,
    base: Annotated[
        Path | None, typer.Option(help="The file with the base of the server's model, if it has one.")
    ] = None,
    personalize_only: Annotated[
        bool, typer.Option("--personalize-only", help="Do not train; only make a personal model.")
    ] = False,
) -> None:
    """Take part in a live federation with your own data, which stays on this machine, and get a personal model."""
    with plain_errors("Interrupted. To resume, rerun the same command."):
        from personax.live.processes import keep_modules, set_up_client

        set_up_client()  # before gRPC is imported, because it reads its settings then
        from personax.live import client
        from personax.live.certificates import read_credentials
        from personax.live.connection import Connection
        from personax.live.limits import Limits, TooSlow, read_limits
        from personax.live.ports import require_loopback
        from personax.live.samples import SampleFile

        if (identity is None) == (insecure is None):
            raise ValueError("Give either --identity for mutual TLS or --insecure NAME to try without.")
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
        logging.getLogger("personax.live").setLevel(logging.INFO)  # shows attempts to connect, but not JAX's messages
        allowed = Limits() if limits is None else read_limits(limits)
        allowed = allowed if base is None else replace(allowed, base=str(base))
        sizes = None if shape is None else tuple(int(part) for part in shape.split("x"))
        samples = SampleFile(data, label, sizes)
        if identity is None:
            require_loopback(server)
        _warn_of_expiry(identity)
        credentials = None if identity is None else read_credentials(identity)
        state = folder or (identity or Path("personax-client")) / "state"
        most = {"max_bytes": allowed.max_bytes, "patience": allowed.patience}
        connection = Connection(server, credentials, name=insecure or "", **most)
        keep_modules()
        given = {"limits": allowed, "notify": lambda text: typer.echo(text, err=True)}
        try:
            if personalize_only:
                found = client.personalize_only(connection, samples, state, **given)
            else:
                found = client.take_part(connection, samples, state, **given, habits=client.Habits(report))
        except TooSlow as error:
            typer.echo(f"Error: {error}", err=True)
            os._exit(1)  # a thread is still compiling
        finally:
            connection.close()
        _show_client(found)


def status(
    server: Server,
    identity: Identity = None,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the state of a live federation, with all clients for its operator and only itself for a client."""
    with plain_errors(), _operator(server, identity, insecure) as connection:
        from personax.live.status import FederationStatus
        from personax.live.view import table_of

        text = connection.status()
        if as_json:
            typer.echo(json.dumps(json.loads(text)))  # without raw control characters
        else:
            out.print(table_of(FederationStatus.from_json(text)))


group = typer.Typer(
    help="Operate a live federation: exclude a client, read the audit log.",
    epilog="Example: personax live exclude anna --server my.host:7000",
    **GROUP_SETTINGS,
)


@group.command("exclude", epilog="Example: personax live exclude anna --server my.host:7000")
def exclude(
    client: Annotated[str, typer.Argument(help="The client's name.")],
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server's address.")] = "127.0.0.1:7000",
    identity: Identity = None,
    insecure: Insecure = False,
    undo: Annotated[bool, typer.Option("--undo", help="Admit its uploads again.")] = False,
) -> None:
    """Exclude a client's further uploads. To undo earlier ones, return to a saved model: `personax serve --from`."""
    with plain_errors(), _operator(server, identity, insecure) as connection:
        connection.exclude(client, not undo)
        typer.echo(f"{client} is {'admitted again' if undo else 'excluded'}. The journal has a record of it.")


@group.command("audit", epilog="Example: personax live audit runs/live-mine")
def audit(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the audit log of a run: starts, settings, logins, refusals, revocations and operator actions."""
    with plain_errors():
        from personax.live.audit import describe, read_audit

        for line in read_audit(run):
            typer.echo(json.dumps(line) if as_json else describe(line))


@contextlib.contextmanager
def _operator(server: str, identity: Path | None, insecure: bool) -> Iterator[Any]:
    """Connect to a server as its operator."""
    from personax.live.certificates import read_credentials
    from personax.live.connection import Connection
    from personax.live.ports import require_loopback

    chosen = _find_identity(identity, insecure, "operator")
    if chosen is None:
        require_loopback(server)
    _warn_of_expiry(chosen)
    credentials = None if chosen is None else read_credentials(chosen)
    connection = Connection(
        server, credentials, name="operator", role="operator", patience=PATIENCE, call_seconds=PATIENCE
    )
    try:
        yield connection
    finally:
        connection.close()


def _warn_of_expiry(identity: Path | None) -> None:
    """Print a warning if a certificate expires soon."""
    from personax.live.certificates import expiry_warning, read_credentials

    if identity is not None and (warning := expiry_warning(read_credentials(identity).certificate)):
        typer.echo(f"Warning: {warning}", err=True)


def _find_identity(given: Path | None, insecure: bool, role: str) -> Path | None:
    """Return the folder of the certificate, by default where `personax certify` writes it, or None without TLS."""
    usual = CERTIFICATES / role
    found = given or (usual if usual.is_dir() and not insecure else None)
    if (found is None) != insecure:
        raise ValueError(
            f"Give either --identity for mutual TLS ({usual} does not exist) or --insecure to try without."
        )
    return found


@contextlib.contextmanager
def _show_server(view: bool) -> Iterator[Callable[[int, Any], None]]:
    """Yield a function for the server to call once it listens; on a terminal, show the clients until the end."""
    from personax.live.view import table_of

    screen = Live(console=err, auto_refresh=False) if view and err.is_terminal else None
    tasks: list[Any] = []  # keeps a reference, because the event loop keeps only weak ones

    async def refresh(screen: Live, service: Any) -> None:
        while True:
            screen.update(table_of(service.current_status()), refresh=True)
            await asyncio.sleep(0.5)

    def opened(port: int, service: Any) -> None:
        typer.echo(f"Listening on port:{port}")
        if screen is not None:
            tasks.append(asyncio.get_running_loop().create_task(refresh(screen, service)))

    with screen or contextlib.nullcontext():
        yield opened


def _show_client(found: Any) -> None:
    """Print the scores of a client that has finished, and the path of its personal model."""
    from personax.evaluation.scores import show

    typer.echo(f"{found.num_updates} updates. On this client's test samples:")
    for metric, shared in found.numbers["shared"].items():
        numbers = (found.numbers["start"].get(metric), shared, found.numbers["personal"][metric])
        start, before, after = (show(number, metric) for number in numbers)
        typer.echo(
            f"  {metric:10}{start:>8} at the start{before:>8} {found.numbers['shared_model']}{after:>8} personal model"
        )
    typer.echo(f"The personal model is in {found.model}")
