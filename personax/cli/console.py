"""The two consoles that commands print to, and tables."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

# Without markup and emoji, because names such as "[red]" or ":smile:" must be printed literally.
out = Console(markup=False, emoji=False)
err = Console(markup=False, emoji=False, stderr=True)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, padding: tuple[int, int, int, int] = (0, 1, 0, 1)
) -> None:
    """Print a table with a header to stdout. `padding` is around each cell: top, right, bottom, left."""
    table = Table(*columns, box=SIMPLE, pad_edge=False, padding=padding)
    for row in rows:
        table.add_row(*row)
    out.print(table)
