"""The commands of a live federation. What they need is imported when they run: `personax --help` stays fast."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

_CERTIFICATES = Path("certificates")
_PLAIN: dict[str, Any] = {"rich_markup_mode": None, "no_args_is_help": True}
certify = typer.Typer(
    help="Make, add and revoke the certificates of a live federation.",
    epilog="Example: personax certify create certificates --host my.host --client anna --client bert",
    **_PLAIN,
)
Place = Annotated[Path, typer.Argument(help="The folder of the authority and what it hands out.")]
Days = Annotated[int, typer.Option(min=1, help="How long a certificate is valid.")]
Identity = Annotated[Path | None, typer.Option(help="The folder with ca.pem, cert.pem and key.pem.")]
Server = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the server listens.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS: on this machine alone, for trying.")]


def mount(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(certify, name="certify")
    add = lambda command, name, epilog: app.command(name, epilog=f"Example: {epilog}")(command)
    add(serve, "serve", "personax serve mine.toml --listen 0.0.0.0:7000 --identity certificates/server")
    add(join, "join", "personax join my.host:7000 --data mine.csv --identity anna")
    add(status, "status", "personax status my.host:7000 --identity certificates/operator")
    add(live_demo, "live-demo", "personax live-demo")


@contextlib.contextmanager
def _plain_errors(interrupted: str = "Interrupted.") -> Iterator[None]:
    """Around a command: an error is one message, and a missing extra says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("grpc", "google", "cryptography", "prometheus_client", "xxhash"):
            raise
        typer.echo(f"Error: {error.name} is not installed. Say: pip install 'personax[live]'", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(interrupted, err=True)
        raise typer.Exit(130) from None
    except (ValueError, OSError, ArithmeticError, MemoryError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None


def _identity(given: Path | None, insecure: bool, role: str) -> Path | None:
    """Where the certificate is, by default where `personax certify` put it; None without TLS."""
    usual = _CERTIFICATES / role
    found = given or (usual if usual.is_dir() and not insecure else None)
    if (found is None) != insecure:
        raise ValueError(f"Give --identity for mutual TLS ({usual} is not there), or --insecure to try: one of them.")
    return found


@certify.command("create", epilog="Example: personax certify create certificates --host my.host --client anna")
def certify_create(
    folder: Place = _CERTIFICATES,
    hosts: Annotated[list[str] | None, typer.Option("--host", help="A name or address of the server.")] = None,
    clients: Annotated[list[str] | None, typer.Option("--client", help="A client's name.")] = None,
    days: Days = 365,
) -> None:
    """Make an authority, a server's and an operator's certificate, and one for each client."""
    with _plain_errors():
        from personax.live import certificates

        certificates.create(folder, hosts or ["localhost", "127.0.0.1"], clients or [], days)
        typer.echo(f"The authority is in {folder / 'authority'}: keep its key there, and hand it to no one.")
        typer.echo(f"For the machine that serves: {folder / 'server'}")
        for name in clients or []:
            typer.echo(f"For {name} alone: {folder / 'clients' / name}")


@certify.command("add", epilog="Example: personax certify add dora")
def certify_add(
    name: Annotated[str, typer.Argument(help="The client's name.")],
    folder: Annotated[Path, typer.Option(help="The folder of the authority.")] = _CERTIFICATES,
    days: Days = 365,
) -> None:
    """Make a certificate for one more client, or a new one for a client whose old one was revoked."""
    with _plain_errors():
        from personax.live import certificates

        typer.echo(f"For {name} alone: {certificates.add(folder, name, days)}")


@certify.command("revoke", epilog="Example: personax certify revoke anna")
def certify_revoke(
    name: Annotated[str, typer.Argument(help="The client's name.")],
    folder: Annotated[Path, typer.Option(help="The folder of the authority.")] = _CERTIFICATES,
) -> None:
    """Revoke a client's certificate; a running server refuses it within a second."""
    with _plain_errors():
        from personax.live import certificates

        path = certificates.revoke(folder, name)
        typer.echo(f"{name} is revoked. If the server is on another machine, copy {path} to its identity folder.")


def serve(
    config: Annotated[Path, typer.Argument(help="A TOML file with one algorithm, or use --algorithm.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 is any free one.")] = "127.0.0.1:7000",
    identity: Identity = None,
    insecure: Insecure = False,
    algorithm: Annotated[str | None, typer.Option(help="Which one, where the file has several.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting.")] = None,
    folder: Annotated[Path | None, typer.Option("--out", "-o", help="The run folder; an old one goes on.")] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Serve the last model after the end, to newcomers.")] = False,
    metrics_port: Annotated[int | None, typer.Option(help="A page for Prometheus on this machine.")] = None,
    view: Annotated[bool, typer.Option(help="Show the clients on the terminal.")] = True,
) -> None:
    """Serve a recipe to clients on other machines; killed, it goes on with the same command."""
    with _plain_errors():
        from personax.live.processes import keep_modules, set_up_server

        set_up_server()
        from personax.config import load
        from personax.live import server

        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
        shown = _identity(identity, insecure, "server")
        recipe = server.choose(load(config, overrides or ()), algorithm)
        place = server.Address(listen, shown, metrics_port)
        root = folder or Path("runs") / f"live-{recipe.config.name}"
        keep_modules()
        with _viewed(view) as opened:
            record = server.serve(recipe, root, place, stay=stay, opened=opened)
        if record is None:
            typer.echo(f"The run is in {root}. No client reported numbers, so there is nothing to show in a report.")
            return
        from personax.folders import Folder
        from personax.report import write_report

        typer.echo(f"The run is in {root}, the report in {write_report([root], Folder(root).report)}")


@contextlib.contextmanager
def _viewed(view: bool) -> Iterator[Any]:
    """Say where the server listens and, on a terminal, show how it goes."""
    import asyncio

    from rich.console import Console
    from rich.live import Live

    from personax.live.view import table_of

    console = Console(stderr=True, markup=False, emoji=False)
    shown = Live(console=console, auto_refresh=False) if view and console.is_terminal else None

    tasks: list[Any] = []  # or the loop would forget them

    async def draw(service: Any) -> None:
        while shown is not None:
            shown.update(table_of(service.standing()), refresh=True)
            await asyncio.sleep(0.5)

    def opened(port: int, service: Any) -> None:
        typer.echo(f"Listening on port:{port}")
        if shown is not None:
            tasks.append(asyncio.get_running_loop().create_task(draw(service)))

    with shown or contextlib.nullcontext():
        yield opened


def join(
    server: Server,
    data: Annotated[Path, typer.Option(help="The client's samples: npz, CSV or Parquet with a label column.")],
    identity: Identity = None,
    insecure: Annotated[str | None, typer.Option(help="Without TLS, on this machine alone: the client's name.")] = None,
    folder: Annotated[Path | None, typer.Option(help="For the personal state; by default in the identity.")] = None,
    label: Annotated[str, typer.Option(help="The column of labels.")] = "label",
    shape: Annotated[str | None, typer.Option(help="The shape of a sample, such as 28x28.")] = None,
    report: Annotated[int | None, typer.Option(min=1, help="Report test scores every so many updates.")] = None,
    limits: Annotated[Path | None, typer.Option(help="A TOML file: what you allow the server to ask for.")] = None,
    personalize_only: Annotated[bool, typer.Option("--personalize-only", help="No training.")] = False,
) -> None:
    """Take part in a live federation with your own data, which stays here, and get your own model."""
    with _plain_errors("Interrupted. The same command goes on from here."):
        from personax.live.processes import keep_modules, set_up_client

        set_up_client()
        from personax.live import client
        from personax.live.certificates import read_credentials
        from personax.live.connection import Connection
        from personax.live.ports import require_loopback
        from personax.live.recipe import Limits, read_limits

        if (identity is None) == (insecure is None):
            raise ValueError("Give --identity for mutual TLS, or --insecure NAME to try without: one of them.")
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
        logging.getLogger("personax.live").setLevel(logging.INFO)  # tries to connect; not what JAX looks for
        allowed = Limits() if limits is None else read_limits(limits)
        sizes = None if shape is None else tuple(int(part) for part in shape.split("x"))
        samples = client.read_data(data, label=label, shape=sizes)
        if identity is None:
            require_loopback(server)
        shown = None if identity is None else read_credentials(identity)
        place = folder or (identity or Path("personax-client")) / "state"
        most = {"max_bytes": allowed.max_bytes, "patience": allowed.patience}
        connection = Connection(server, shown, name=insecure or "", **most)
        keep_modules()
        given = {"limits": allowed, "told": lambda text: typer.echo(text, err=True)}
        try:
            if personalize_only:
                found = client.personalize_only(connection, samples, place, **given)
            else:
                found = client.take_part(connection, samples, place, **given, habits=client.Habits(report))
        finally:
            connection.close()
        _tell(found)


def _tell(found: Any) -> None:
    from personax.scores import show

    typer.echo(f"{found.num_updates} updates. On this client's test samples:")
    for metric, shared in found.numbers["shared"].items():
        numbers = (found.numbers["start"].get(metric), shared, found.numbers["personal"][metric])
        start, before, after = (show(number, metric) for number in numbers)
        typer.echo(f"  {metric:10}{start:>8} at the start{before:>8} shared model{after:>8} personal model")
    typer.echo(f"The personal model is in {found.model}")


def status(
    server: Server,
    identity: Identity = None,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show how a live federation goes: all clients to its operator, a client itself."""
    with _plain_errors():
        from rich.console import Console

        from personax.live.certificates import read_credentials
        from personax.live.connection import Connection
        from personax.live.ports import require_loopback
        from personax.live.standing import Standing
        from personax.live.view import table_of

        chosen = _identity(identity, insecure, "operator")
        if chosen is None:
            require_loopback(server)
        shown = None if chosen is None else read_credentials(chosen)
        connection = Connection(server, shown, name="operator", role="operator", patience=5.0, call_seconds=5.0)
        try:
            text = connection.status()
        finally:
            connection.close()
        if as_json:
            typer.echo(text)
        else:
            Console(markup=False, emoji=False).print(table_of(Standing.from_json(text)))


def live_demo(
    folder: Annotated[Path | None, typer.Option("--out", "-o", help="By default a new one under runs/.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting.")] = None,
) -> None:
    """A server and three clients on this machine, with certificates of their own: the digits, trained live."""
    with _plain_errors():
        import json
        from datetime import datetime

        from rich.console import Console
        from rich.live import Live

        from personax.live import demo
        from personax.live.certificates import read_credentials
        from personax.live.connection import Connection, Unreachable
        from personax.live.standing import Standing
        from personax.live.view import table_of

        place = folder or Path("runs") / f"live-demo-{datetime.now():%Y%m%d-%H%M%S}"
        console = Console(stderr=True, markup=False, emoji=False)
        live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        open_connections: dict[int, Connection] = {}

        def watch(port: int) -> None:
            if live is None:
                return
            if port not in open_connections:
                shown = read_credentials(place / "certificates" / "operator")
                open_connections[port] = Connection(f"127.0.0.1:{port}", shown, patience=1.0, call_seconds=2.0)
            with contextlib.suppress(Unreachable):
                live.update(table_of(Standing.from_json(open_connections[port].status())), refresh=True)

        with live or contextlib.nullcontext():
            demo.run_demo(place, overrides or [], lambda text: typer.echo(text, err=True), watch)
        for name in demo.CLIENTS:
            (path,) = (place / name).glob("*/numbers.json")
            numbers = json.loads(path.read_text())
            start, shared, own = (100 * numbers[what]["accuracy"] for what in ("start", "shared", "personal"))
            typer.echo(
                f"{name}: accuracy {start:.1f} % at the start, {shared:.1f} % shared, {own:.1f} % personal model"
            )
        typer.echo(f"Everything is in {place}, the report in {place / 'run' / 'report.html'}")
