"""The command `personax list`: the one list of everything that has a name."""

from personax.bench.workloads import rows
from personax.cli.console import print_table
from personax.cli.errors import plain_errors
from personax.experiment.catalog import CATALOG
from personax.reproduce import EXPERIMENTS

Listed = list[tuple[str, str, str]]  # name, what it is, source


def list_catalog() -> None:
    """Show the algorithms, objectives, partitions, datasets, reproductions and benchmarks, with their sources."""
    with plain_errors():
        for title, axis in CATALOG.items():
            _print(title, [(kind.name, kind.summary, kind.source) for kind in axis.kinds.values()])
        list_reproductions()
        _print("benchmarks", [(row.name, row.words, row.workload) for row in rows("cpu")])


def list_reproductions() -> None:
    """Print the tables and figures that `personax reproduce` can repeat."""
    found = [make(False) for make in EXPERIMENTS.values()]
    _print("reproductions", [(one.name, one.title, one.source) for one in found])


def _print(title: str, listed: Listed) -> None:
    print_table((title, "what", "source"), listed)
