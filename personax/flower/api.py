"""Every name that personax uses from Flower's public API."""

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict  # pyright: ignore[reportMissingImports]
    from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
    from flwr.serverapp import Grid, ServerApp  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed. Run: pip install 'personax[flower]'", name=error.name
    ) from None

__all__ = [
    "Array",
    "ArrayRecord",
    "ClientApp",
    "ConfigRecord",
    "Context",
    "Grid",
    "Message",
    "RecordDict",
    "ServerApp",
]
