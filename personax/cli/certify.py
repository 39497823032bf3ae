"""The commands `personax certify create`, `add`, `renew` and `revoke`.

They import their modules when they run, so that other commands start fast and work without the extra `live`.
"""

from pathlib import Path
from typing import Annotated

import typer

from personax.cli.errors import plain_errors
from personax.cli.options import GROUP_SETTINGS

CERTIFICATES = Path("certificates")  # the default folder of the authority

group = typer.Typer(
    help="Create, add, renew and revoke the certificates of a live federation.",
    epilog="Example: personax certify create certificates --host my.host --client anna --client bert",
    **GROUP_SETTINGS,
)
Days = Annotated[int, typer.Option(min=1, help="Days for which a certificate is valid.")]
Authority = Annotated[Path, typer.Option(help="The folder of the authority.")]


@group.command("create", epilog="Example: personax certify create certificates --host my.host --client anna")
def create(
    folder: Annotated[Path, typer.Argument(help="The folder for the authority and all certificates.")] = CERTIFICATES,
    hosts: Annotated[list[str] | None, typer.Option("--host", help="A name or address of the server.")] = None,
    clients: Annotated[list[str] | None, typer.Option("--client", help="A client's name.")] = None,
    days: Days = 365,
) -> None:
    """Create an authority, and certificates for the server, its operator and each client."""
    with plain_errors():
        from personax.live import certificates

        certificates.create(folder, hosts or ["localhost", "127.0.0.1"], clients or [], days)
        typer.echo(f"The authority is in {folder / 'authority'}. Keep its key there, and never share it.")
        typer.echo(f"For the machine that serves: {folder / 'server'}")
        for name in clients or []:
            typer.echo(f"For {name} only: {folder / 'clients' / name}")


@group.command("add", epilog="Example: personax certify add dora")
def add(
    name: Annotated[str, typer.Argument(help="The client's name.")], folder: Authority = CERTIFICATES, days: Days = 365
) -> None:
    """Create a certificate for one more client, or for a client whose certificate was revoked."""
    with plain_errors():
        from personax.live import certificates

        typer.echo(f"For {name} only: {certificates.add(folder, name, days)}")


@group.command("renew", epilog="Examples: personax certify renew anna | personax certify renew --all")
def renew(
    names: Annotated[list[str] | None, typer.Argument(metavar="[CLIENT]...", help="The clients' names.")] = None,
    server: Annotated[bool, typer.Option("--server", help="The server's certificate.")] = False,
    operator: Annotated[bool, typer.Option("--operator", help="The operator's certificate.")] = False,
    everyone: Annotated[bool, typer.Option("--all", help="All valid certificates.")] = False,
    folder: Authority = CERTIFICATES,
    days: Days = 365,
) -> None:
    """Replace certificates before they expire. The old ones stay valid until then."""
    with plain_errors():
        from personax.live import certificates

        staff = [role for role, wanted in (("server", server), ("operator", operator)) if wanted or everyone]
        clients = certificates.valid_clients(folder) if everyone else names or []
        if not staff and not clients:
            raise ValueError("No certificate is named. Name the clients, or give --server, --operator or --all.")
        for role in staff:
            typer.echo(f"For the {role}: {certificates.renew(folder, role, role, days)}")
        for name in clients:
            typer.echo(f"For {name} only: {certificates.renew(folder, name, 'client', days)}")


@group.command("revoke", epilog="Examples: personax certify revoke anna | personax certify revoke --operator")
def revoke(
    name: Annotated[str | None, typer.Argument(help="The client's name.")] = None,
    operator: Annotated[bool, typer.Option("--operator", help="Revoke the operator's certificates.")] = False,
    folder: Authority = CERTIFICATES,
) -> None:
    """Revoke the certificates of a client or of the operator. A running server rejects them within a second."""
    with plain_errors():
        from personax.live import certificates

        if (name is None) != operator:
            raise ValueError("Give either the name of a client or --operator.")
        name = name or "operator"
        path = certificates.revoke(folder, name, "operator" if operator else "client")
        typer.echo(f"{name} is revoked. If the server is on another machine, copy {path} into its identity folder.")
