"""The state and the result of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.schedules import Schedule
from personax.server import ServerState
from personax.sharing import fingerprint, join
from personax.simulation.store import Kept
from personax.typing import Array, Params, Personal, PyTree, Shared
from personax.values.notebook import html_table

STAGES = ("local steps", "personal state", "upload beside the delta")
NO_EVENT = np.iinfo(np.int32).max


class Fault(NamedTuple):
    """The first update of one seed that was not finite."""

    seed: int  # its position among the seeds
    event: int
    client: int  # its position in the federation
    stage: str


class NonFiniteUpdate(FloatingPointError):
    """A client's update, `fault`, was not finite.

    >>> import jax, numpy as np, personax as px
    >>> fed = px.Federation.from_clients([(np.full((4, 1), 1e30), np.zeros(4))])
    >>> task = px.regression(px.logistic_regression(1))
    >>> schedule = px.rounds(1, num_rounds=30, key=jax.random.key(0))
    >>> try:
    ...     _ = px.simulate(px.fedavg(lr=1e30, num_steps=5), task, fed, schedule, key=jax.random.key(0))
    ... except px.NonFiniteUpdate as error:
    ...     print(error.fault.stage)
    local steps
    """

    def __init__(self, message: str, fault: Fault | None = None) -> None:
        FloatingPointError.__init__(self, message)
        self.fault = fault


class Faults(NamedTuple):
    """Updates that were not finite: their number, and the event and stage of the first one."""

    num: Array
    event: Array
    stage: Array


class State(NamedTuple):
    """Everything that a run carries from wave to wave. With several seeds, leaves have a leading axis for them."""

    server: ServerState
    personal: Personal  # states of all clients; between the waves of a streamed run, a `Kept`
    slots: PyTree  # models still in use: (params, shared, version)
    held: PyTree  # updates that wait for their turn to arrive
    tracked: PyTree
    faults: Faults


class Unshared(NamedTuple):
    """The parameters that the server does not have: the frozen ones, and the initial personal ones of each client.

    With `has_seeds`, every array has a leading axis of seeds; otherwise they are the same for all seeds.
    """

    frozen: Params = None
    start: Params = None
    has_seeds: bool = False

    def of_seeds(self, part: slice) -> "Unshared":
        """Return the parameters of some of the seeds."""
        if not self.has_seeds:
            return self
        pick = lambda tree: jax.tree.map(lambda leaf: leaf[part], tree)
        return Unshared(pick(self.frozen), pick(self.start), has_seeds=True)

    def joined_to(self, shared: Params, num_seeds: int) -> Params:
        """Return whole models, for `num_seeds` seeds unless it is 0."""
        own = (self.frozen, self.start)
        return join(shared, *(own if self.has_seeds or not num_seeds else repeat(own, num_seeds)))

    @property
    def fingerprint(self) -> str:
        """A digest of these parameters; "" if everything is shared."""
        return fingerprint(join(self.frozen, self.start))


@dataclass(frozen=True)
class Controlled:
    """The control of one seed so far: the controller's state, the cohorts it chose, and why and where the run ended.

    `chosen` has pairs (first round, members); with None as members, cohorts are drawn again. `asked` has pairs (event,
    number of clients): those that downloaded the model before that event only to report their losses.
    """

    state: dict[str, Any]
    chosen: tuple[tuple[int, tuple[int, ...] | None], ...] = ()
    ended: str = ""
    wave: int = 0
    asked: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A run between two waves, which `observe` receives and from which `simulate(..., start=...)` continues.

    >>> import jax, personax as px
    >>> fed = px.datasets.synthetic(num_clients=3, num_features=4, num_samples=20, key=jax.random.key(0))
    >>> task, algorithm = px.classification(px.logistic_regression(10)), px.fedavg(lr=0.1, num_steps=2)
    >>> schedule = px.rounds(3, num_rounds=4, key=jax.random.key(0))
    >>> monitor = px.Monitor(every=2, observe=lambda snapshot: snapshot.num_events)
    >>> result = px.simulate(algorithm, task, fed, schedule, key=jax.random.key(0), monitor=monitor)
    >>> [int(num) for num in result.history]
    [0, 6, 12]
    """

    state: State
    wave: int
    num_events: int | np.ndarray  # with several seeds, one number for each
    time: float | np.ndarray  # virtual time
    schedules: tuple[Schedule, ...]  # one for each seed
    ids: np.ndarray  # ids of the federation's clients, in its order
    unshared: Unshared = Unshared()
    control: tuple[Controlled, ...] = ()  # of each seed, if there is a controller

    @property
    def has_seeds(self) -> bool:
        """True if every array has a leading axis for several seeds."""
        return np.ndim(self.num_events) > 0

    @property
    def visits(self) -> np.ndarray:
        """The number of updates that each client has made so far, [clients] or [seeds, clients]."""
        return self._of_each_seed(Schedule.visits)

    @property
    def cohort(self) -> np.ndarray:
        """The clients of the last round, in the order of the federation, [members] or [seeds, members]."""
        return self._of_each_seed(Schedule.cohort)

    @property
    def faults(self) -> list[Fault]:
        """The first update that was not finite for each seed that has one, in the order of the seeds."""
        event, stage = (np.atleast_1d(leaf) for leaf in self.state.faults[1:])
        return [
            Fault(int(seed), int(event[seed]), int(self.schedules[seed].client[event[seed]]), STAGES[stage[seed]])
            for seed in np.flatnonzero(event != NO_EVENT)
        ]

    def of_seeds(self, begin: int, end: int) -> "Snapshot":
        """The snapshot of some of the seeds."""
        part = slice(begin, end)
        kept = self.state.personal
        state = jax.tree.map(lambda leaf: leaf[part], self.state._replace(personal=()))
        personal = kept.of_seeds(begin, end) if isinstance(kept, Kept) else jax.tree.map(lambda leaf: leaf[part], kept)
        at = (np.asarray(self.num_events)[part], np.asarray(self.time)[part])
        seeds = (self.schedules[part], self.ids, self.unshared.of_seeds(part), self.control[part])
        return Snapshot(state._replace(personal=personal), self.wave, *at, *seeds)

    def _of_each_seed(self, ask: Callable[[Schedule, int], np.ndarray]) -> np.ndarray:
        asked = [ask(s, int(n)) for s, n in zip(self.schedules, np.atleast_1d(self.num_events), strict=True)]
        return np.stack(asked) if self.has_seeds else asked[0]

    @property
    def params(self) -> Params:
        """The shared model. If parameters are divided, it includes the frozen and the initial personal ones."""
        shared, unshared = self.state.server.params, self.unshared
        if unshared.frozen is None and unshared.start is None:
            return shared
        return unshared.joined_to(shared, len(self.schedules) if self.has_seeds else 0)

    @property
    def shared(self) -> Shared:
        """The state that the server broadcasts beside the model."""
        return self.state.server.shared

    @property
    def personal(self) -> Personal:
        """The personal states of all clients, along the axis after that of seeds."""
        if not isinstance(self.state.personal, Kept):
            return self.state.personal
        everyone = (*np.shape(self.num_events), len(self.ids))
        return self.personal_of(np.broadcast_to(np.arange(len(self.ids)), everyone))

    def personal_of(self, positions: np.ndarray) -> Personal:
        """The personal states of the clients at these positions, [positions] or [seeds, positions]."""
        if isinstance(self.state.personal, Kept):
            return self.state.personal.read(positions)
        pick = lambda tree, at: jax.tree.map(lambda leaf: leaf[at], tree)
        return (jax.vmap(pick) if self.has_seeds else pick)(self.state.personal, jnp.asarray(positions))


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a run. With several seeds, every array has a leading axis for them.

    `personal` has the states of all clients, `tracked` the state of the tracker, and `history` the results of
    `observe`. Each event moved `bytes_down` to a client and, if the client was aggregated, `bytes_up` back. Downloads
    of clients that a controller asked for their losses are added to the next event.

    >>> import jax, personax as px
    >>> fed = px.datasets.synthetic(num_clients=3, num_features=4, num_samples=20, key=jax.random.key(0))
    >>> task, algorithm = px.classification(px.logistic_regression(10)), px.fedavg(lr=0.1, num_steps=2)
    >>> schedule = px.rounds(3, num_rounds=2, key=jax.random.key(0))
    >>> px.simulate(algorithm, task, fed, schedule, key=jax.random.key(0))
    <Result: events 6 of 6, clients 3, seeds 1, parameters 50, evaluations 0>
    """

    snapshot: Snapshot
    history: list[Any]
    bytes_up: np.ndarray
    bytes_down: np.ndarray

    def __repr__(self) -> str:
        return f"<Result: {', '.join(f'{title} {text}' for title, text in self._facts())}>"

    def _repr_html_(self) -> str:
        return html_table("Result", self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        """The titles and texts of a summary."""
        snapshot, num = self.snapshot, len(self.snapshot.schedules)
        size = sum(leaf.size for leaf in jax.tree.leaves(self.params)) // num
        events = np.atleast_1d(snapshot.num_events)
        facts = [
            ("events", f"{events.max():,} of {snapshot.schedules[0].num_events:,}"),
            ("clients", f"{len(snapshot.ids):,}"),
            ("seeds", str(num)),
            ("parameters", f"{size:,}"),
            ("evaluations", str(len(self.history))),
        ]
        facts += [("ended early", one.ended) for one in snapshot.control if one.ended][:1]
        counts = (("too stale", self.num_dropped), ("not finite", self.num_skipped))
        return [*facts, *((title, f"{np.sum(of):,} updates") for title, of in counts if np.sum(of))]

    @property
    def has_seeds(self) -> bool:
        """True if every array has a leading axis for several seeds."""
        return self.snapshot.has_seeds

    @property
    def params(self) -> Params:
        """The shared model. If parameters are divided, it includes the frozen and the initial personal ones."""
        return self.snapshot.params

    @property
    def shared(self) -> Shared:
        """The state that the server broadcasts beside the model."""
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
        """The number of updates dropped because they were too stale."""
        return np.asarray(self.snapshot.state.server.num_dropped)

    @property
    def num_skipped(self) -> np.ndarray:
        """The number of updates that were not finite."""
        return np.asarray(self.snapshot.state.faults.num)


def repeat(tree: PyTree, num: int) -> PyTree:
    """Repeat a tree `num` times along a new leading axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *jnp.shape(leaf))), tree)
