"""Data: pools of samples to divide among clients, and federations that come divided.

`digits`, `mnist` and `cifar10` are pools. `synthetic`, `femnist`, `read_leaf` and `read_table` are federations.
`fetch` gets a pool from the network, once; `write_stand_in` invents writers where FEMNIST is not at hand.
"""

from personax.datasets.cifar10 import cifar10
from personax.datasets.digits import digits
from personax.datasets.fetch import CannotFetch, fetch
from personax.datasets.files import read_client, read_table
from personax.datasets.leaf import femnist, read_leaf
from personax.datasets.mnist import mnist
from personax.datasets.pool import Pool
from personax.datasets.registry import ENTRIES, Entry
from personax.datasets.stand_in import write_stand_in
from personax.datasets.synthetic import synthetic

__all__ = [
    "ENTRIES",
    "CannotFetch",
    "Entry",
    "Pool",
    "cifar10",
    "digits",
    "femnist",
    "fetch",
    "mnist",
    "read_client",
    "read_leaf",
    "read_table",
    "synthetic",
    "write_stand_in",
]
