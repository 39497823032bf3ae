"""A list of the registered data sets and where they are stored."""

from dataclasses import dataclass

from personax.data.datasets.fetch import folder
from personax.data.datasets.sources import SOURCES
from personax.values import DATASETS, Kind, parameters_of


@dataclass(frozen=True)
class DatasetInfo:
    """A data set in the catalog; `how` states how to get one that is not downloaded.

    >>> import personax as px
    >>> px.datasets.DatasetInfo("mine", "my own images", "3 MB", "Me 2026", how="comes with my package").where
    'comes with my package'
    """

    name: str
    description: str
    size: str
    citation: str
    how: str = ""

    @property
    def where(self) -> str:
        """Return the location of the data set, or how to get it."""
        if self.name not in SOURCES:
            return self.how
        return "here" if (folder() / f"{self.name}.npz").exists() else "not here"


def list_datasets() -> list[DatasetInfo]:
    """Describe every registered data set.

    >>> import personax as px
    >>> [info.name for info in px.datasets.list_datasets() if info.where == "comes with personax"]
    ['digits', 'synthetic']
    """
    return [_info(kind) for kind in DATASETS.kinds.values()]


def _info(kind: Kind) -> DatasetInfo:
    size = SOURCES[kind.name].size if kind.name in SOURCES else ""
    needs_path = "path" in parameters_of(kind.make)
    how = "" if kind.name in SOURCES else "needs a path" if needs_path else "comes with personax"
    return DatasetInfo(kind.name, kind.summary, size, kind.source, how)
