"""All that is used of Flower: its public API."""

try:
    from flwr.app import (  # pyright: ignore[reportMissingImports]
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Message,
        RecordDict,
    )
    from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
    from flwr.serverapp import Grid, ServerApp  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Flower is needed here, and {error.name} is not installed. Say: pip install 'personax[flower]'",
        name=error.name,
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
