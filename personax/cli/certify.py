"""The commands `personax certify create`, `add`, `renew` and `revoke`.

They import what they need when they run, so that other commands start fast and work without the extra `live`.
"""

from pathlib import Path
from typing import Annotated

import typer

from personax.cli.errors import plain_errors
from personax.cli.options import GROUP_SETTINGS

CERTIFICATES = Path("certificates")  # the default folder of the authority

group = typer.Typer(
    help="Make, add, renew and revoke the certificates of a live federation.",
    epilog="Example: personax certify create certificates --host my.host --client anna --client bert",
    **GROUP_SETTINGS,
)
Days = Annotated[int, typer.Option(min=1, help="How long a certificate is valid.")]
Authority = Annotated[Path, typer.Option(help="The folder of the authority.")]


@group.command("create", epilog="Example: personax certify create certificates --host my.host --client anna")
def create(
    folder: Annotated[Path, typer.Argument(help="The folder of the authority and what it hands out.")] = CERTIFICATES,
    hosts: Annotated[list[str] | None, typer.Option("--host", help="A name or address of the server.")] = None,
    clients: Annotated[list[str] | None, typer.Option("--client", help="A client's name.")] = None,
    days: Days = 365,
) -> None:
    """Make an authority, a server's and an operator's certificate, and one for each client."""
    with plain_errors():
        from personax.live import certificates

        certificates.create(folder, hosts or ["localhost", "127.0.0.1"], clients or [], days)
        typer.echo(f"The authority is in {folder / 'authority'}: keep its key there, and hand it to no one.")
        typer.echo(f"For the machine that serves: {folder / 'server'}")
        for name in clients or []:
            typer.echo(f"For {name} alone: {folder / 'clients' / name}")


@group.command("add", epilog="Example: personax certify add dora")
def add(
    name: Annotated[str, typer.Argument(help="The client's name.")], folder: Authority = CERTIFICATES, days: Days = 365
) -> None:
    """Make a certificate for one more client, or a new one for a client whose old one was revoked."""
    with plain_errors():
        from personax.live import certificates

        typer.echo(f"For {name} alone: {certificates.add(folder, name, days)}")


@group.command("renew", epilog="Examples: personax certify renew anna | personax certify renew --all")
def renew(
    names: Annotated[list[str] | None, typer.Argument(metavar="[CLIENT]...", help="The clients' names.")] = None,
    server: Annotated[bool, typer.Option("--server", help="The server's certificate.")] = False,
    operator: Annotated[bool, typer.Option("--operator", help="The operator's certificate.")] = False,
    everyone: Annotated[bool, typer.Option("--all", help="All certificates that are valid.")] = False,
    folder: Authority = CERTIFICATES,
    days: Days = 365,
) -> None:
    """Make new certificates before the old ones expire; those stay valid until then, and nobody else is affected."""
    with plain_errors():
        from personax.live import certificates

        staff = [role for role, wanted in (("server", server), ("operator", operator)) if wanted or everyone]
        clients = certificates.valid_clients(folder) if everyone else names or []
        if not staff and not clients:
            raise ValueError("Name the clients, or give --server, --operator or --all.")
        for role in staff:
            typer.echo(f"For the {role}: {certificates.renew(folder, role, role, days)}")
        for name in clients:
            typer.echo(f"For {name} alone: {certificates.renew(folder, name, 'client', days)}")


@group.command("revoke", epilog="Examples: personax certify revoke anna | personax certify revoke --operator")
def revoke(
    name: Annotated[str | None, typer.Argument(help="The client's name.")] = None,
    operator: Annotated[bool, typer.Option("--operator", help="The operator's certificates instead.")] = False,
    folder: Authority = CERTIFICATES,
) -> None:
    """Revoke the certificates of a client or of the operator; a running server refuses them within a second."""
    with plain_errors():
        from personax.live import certificates

        if (name is None) != operator:
            raise ValueError("Name a client, or give --operator: one of them.")
        name = name or "operator"
        path = certificates.revoke(folder, name, "operator" if operator else "client")
        typer.echo(f"{name} is revoked. If the server is on another machine, copy {path} to its identity folder.")
