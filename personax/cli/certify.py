"""The commands `personax certify create`, `add` and `revoke`.

They import what they need when they run, so that other commands start fast and work without the extra `live`.
"""

from pathlib import Path
from typing import Annotated

import typer

from personax.cli.errors import plain_errors
from personax.cli.options import GROUP_SETTINGS

CERTIFICATES = Path("certificates")  # the default folder of the authority

group = typer.Typer(
    help="Make, add and revoke the certificates of a live federation.",
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


@group.command("revoke", epilog="Example: personax certify revoke anna")
def revoke(name: Annotated[str, typer.Argument(help="The client's name.")], folder: Authority = CERTIFICATES) -> None:
    """Revoke a client's certificate; a running server refuses it within a second."""
    with plain_errors():
        from personax.live import certificates

        path = certificates.revoke(folder, name)
        typer.echo(f"{name} is revoked. If the server is on another machine, copy {path} to its identity folder.")
