"""A federation in a folder, memory-mapped."""

from pathlib import Path

from personax.data.federation import Federation
from personax.values import DATASETS


@DATASETS.register(
    "folder", summary="a federation that `Federation.save` wrote, read as it is needed", source="Your own"
)
def open_folder(path: str | Path) -> Federation:
    """Open the federation that `Federation.save` wrote: training, test and held-out data, read as it is needed."""
    return Federation.open(path)
