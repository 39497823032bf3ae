"""The rules of a live run beside its recipe: when a round ends, what is refused, how much a client may ask."""

from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Literal

from personax.values import require, require_count, require_nonnegative, require_one_of, require_positive


@dataclass(frozen=True)
class Terms:
    """What a server's operator decides. Times are in seconds.

    A synchronous round ends when its cohort has reported, or at its `deadline` if `least_share` of the cohort has; else
    those who are away are replaced and it waits once more. `num_clients` is how many there are (SCAFFOLD's N): a
    synchronous run begins when so many are there.
    An upload whose norm is more than `outlier_factor` times the median of the other clients' last is refused, or
    clipped to that; with a factor of 0 any norm will do.
    """

    num_clients: int | None = None
    deadline: float = 600.0
    least_share: float = 0.5
    outliers: Literal["refuse", "clip"] = "refuse"
    outlier_factor: float = 20.0
    least_peers: int = 2  # who must have reported before norms are compared
    rate: float = 100.0  # requests of one client in a second
    max_streams: int = 4  # of one client at the same time
    max_transfers: int = 64  # models on their way at the same time
    stall: float = 30.0  # without a piece of an upload
    presence: float = 60.0  # since a client was last heard of
    checkpoint: float = 10.0  # between checkpoints
    linger: float = 60.0  # after the end, for the clients' last numbers
    max_connections: int = 4096
    sync: bool = False  # wait for the disk before answering

    def __post_init__(self) -> None:
        require_count("num_clients", self.num_clients)
        for name in ("least_peers", "max_streams", "max_transfers", "max_connections"):
            require_count(name, getattr(self, name))
        for name in ("deadline", "rate", "stall", "presence", "checkpoint"):
            require_positive(name, getattr(self, name))
        require_nonnegative("linger", self.linger)
        require_nonnegative("outlier_factor", self.outlier_factor, "0 allows any norm.")
        require(lambda v: (v > 0) & (v <= 1), "least_share", self.least_share, "lie in (0, 1]")
        require_one_of("outliers", self.outliers, ("refuse", "clip"))

    def bound(self, peers: list[float]) -> float:
        """The largest norm that is not out of line with the last ones of the other clients."""
        if self.outlier_factor == 0 or len(peers) < self.least_peers:
            return inf
        return self.outlier_factor * median(peers)
