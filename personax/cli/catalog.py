"""The command `personax list`."""

from personax.cli.console import print_table
from personax.experiment.catalog import CATALOG


def list_catalog() -> None:
    """Show the algorithms, objectives, partitions and datasets, with their papers."""
    for title, axis in CATALOG.items():
        print_table((title, "what", "source"), [(kind.name, kind.summary, kind.source) for kind in axis.kinds.values()])
