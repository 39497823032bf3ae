"""The command `personax list`: a list of everything that a configuration or a command can name."""

from collections.abc import Sequence

from personax.bench.workloads import rows
from personax.cli.console import print_table
from personax.cli.errors import plain_errors
from personax.data.datasets.sources import SOURCES
from personax.experiment.catalog import CATALOG
from personax.reproduce import EXPERIMENTS

Listed = list[tuple[str, str, str]]  # name, description, source


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
    _print("reproductions", [(one.name, one.title + _needs(one.needs), one.source) for one in found])


def _needs(names: Sequence[str]) -> str:
    """The datasets that an experiment needs, with their sizes, in parentheses."""
    needed = ", ".join(f"{SOURCES[name].title}, {SOURCES[name].size}" for name in names)
    return f" (needs {needed})" if needed else ""


def _print(title: str, listed: Listed) -> None:
    print_table((title, "what", "source"), listed)
