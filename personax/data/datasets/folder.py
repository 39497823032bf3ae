"""A federation in a folder, memory-mapped."""

from pathlib import Path

from personax.data.federation import Federation
from personax.values import DATASETS


@DATASETS.register("folder", summary="a federation written by `Federation.save`, read on demand", source="Your own")
def open_folder(path: str | Path) -> Federation:
    """Open a federation written by `Federation.save`: training, test and held-out data are read on demand.

    >>> import numpy as np, personax as px
    >>> fed = px.Federation.from_clients([(np.zeros((2, 1)), np.array([0, 1]))])
    >>> fed.save("saved")
    >>> px.datasets.open_folder("saved").is_mapped
    True
    """
    return Federation.open(path)
