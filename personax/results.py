"""What a run carries, and what it leaves."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from personax.server import ServerState
from personax.typing import Array, Params, Personal, PyTree, Shared

STAGES = ("local steps", "personal state", "upload beside the delta")
NO_EVENT = np.iinfo(np.int32).max


class NonFiniteUpdate(FloatingPointError):
    """A client's update was not finite."""


class Faults(NamedTuple):
    """Updates that were not finite: how many, and the first one."""

    num: Array
    event: Array
    client: Array
    stage: Array


class State(NamedTuple):
    """Everything that a run carries from wave to wave. Leaves have a leading axis of seeds when there are several."""

    server: ServerState
    personal: Personal  # of all clients
    slots: PyTree  # models that are still in use: (params, shared, version)
    tracked: PyTree
    faults: Faults


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A run between two waves: what `observe` sees and `simulate(..., start=...)` continues from."""

    state: State
    wave: int
    num_events: int | np.ndarray  # with several seeds, one for each
    time: float | np.ndarray  # virtual

    @property
    def params(self) -> Params:
        """The shared model."""
        return self.state.server.params

    @property
    def shared(self) -> Shared:
        """What the server broadcasts beside the model."""
        return self.state.server.shared

    @property
    def personal(self) -> Personal:
        """The personal states of all clients, along the axis after the seeds."""
        return self.state.personal


@dataclass(frozen=True, eq=False)
class Result:
    """The end of a run. With several seeds every array has a leading axis for them.

    `personal` holds the state of all clients, `tracked` what a tracker followed, `history` what `observe` returned.
    Each event moved `bytes_down` to a client and, if the client was aggregated, `bytes_up` back.
    """

    snapshot: Snapshot
    has_seeds: bool
    history: list[Any]
    bytes_up: np.ndarray
    bytes_down: np.ndarray

    @property
    def params(self) -> Params:
        """The shared model."""
        return self.snapshot.params

    @property
    def shared(self) -> Shared:
        """What the server broadcasts beside the model."""
        return self.snapshot.shared

    @property
    def personal(self) -> Personal:
        """The personal states of all clients."""
        return self.snapshot.personal

    @property
    def tracked(self) -> PyTree:
        """The state of the tracker."""
        return self.snapshot.state.tracked

    @property
    def num_dropped(self) -> np.ndarray:
        """Updates that were too stale."""
        return np.asarray(self.snapshot.state.server.num_dropped)

    @property
    def num_skipped(self) -> np.ndarray:
        """Updates that were not finite."""
        return np.asarray(self.snapshot.state.faults.num)
