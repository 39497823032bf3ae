"""Errors of commands: one message on stderr instead of a traceback."""

import contextlib
from collections.abc import Iterator

import typer
from jax.errors import JaxRuntimeError

from personax.data.datasets.fetch import CannotFetch
from personax.experiment.names import printable
from personax.values import NotInstalled

_EXPECTED = (ValueError, OSError, CannotFetch, ArithmeticError, MemoryError, JaxRuntimeError)
_LIVE_PACKAGES = ("grpc", "cryptography", "prometheus_client", "xxhash")  # of the extra `live`


@contextlib.contextmanager
def plain_errors(interrupted: str = "Interrupted.") -> Iterator[None]:
    """Turn the errors of a command into a message and an exit status.

    Ctrl-C and SIGTERM print `interrupted` and exit with status 130. An expected error prints "Error: ..." and exits
    with status 1, and so does a missing optional package, with the command that installs it. Any other error is a bug
    and keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(interrupted, err=True)
        raise typer.Exit(130) from None
    except NotInstalled as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _LIVE_PACKAGES:
            raise
        typer.echo(f"Error: {error.name} is not installed. Install it with: pip install 'personax[live]'", err=True)
        raise typer.Exit(1) from None
    except _EXPECTED as error:
        # The message may come from another machine or from an untrusted file.
        words = "\n".join(printable(line) for line in str(error).split("\n"))
        typer.echo(f"Error: {words}", err=True)
        raise typer.Exit(1) from None
