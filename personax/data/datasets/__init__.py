"""Data sets: pools of samples to divide among clients, and federations that are already divided.

`digits`, `mnist`, `cifar10` and `read_pool` are pools.
`synthetic`, `femnist`, `read_leaf` and `read_table` are federations.
`fetch` downloads a pool once; `write_stand_in` simulates writers if FEMNIST is not available.
"""

from personax.data.datasets.cifar10 import cifar10
from personax.data.datasets.digits import digits
from personax.data.datasets.fetch import CannotFetch, fetch
from personax.data.datasets.files import read_client, read_pool, read_table
from personax.data.datasets.folder import open_folder
from personax.data.datasets.leaf import femnist, read_leaf
from personax.data.datasets.mnist import mnist
from personax.data.datasets.pool import Pool
from personax.data.datasets.registry import DatasetInfo, list_datasets
from personax.data.datasets.stand_in import write_stand_in
from personax.data.datasets.synthetic import synthetic

__all__ = [
    "CannotFetch",
    "DatasetInfo",
    "Pool",
    "cifar10",
    "digits",
    "femnist",
    "fetch",
    "list_datasets",
    "mnist",
    "open_folder",
    "read_client",
    "read_leaf",
    "read_pool",
    "read_table",
    "synthetic",
    "write_stand_in",
]
