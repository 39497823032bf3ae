"""Synchronous, buffered and asynchronous servers: three names for one buffered state machine."""

from typing import Literal, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import optax

from personax.client.optimizers import Optimizer
from personax.objectives import Objective
from personax.server.discounts import Constant, Discount
from personax.typing import Array, Extra, Params, PyTree, Shared
from personax.values import SERVERS, Static, require_count, require_one_of, require_positive, value


class Upload(NamedTuple):
    """The uploads that arrive at the server, with a leading axis of clients."""

    delta: Params
    end: Params  # the client's last iterate; used only if `applies="models"`
    extra: Extra
    version: Array  # the server version that the client downloaded
    weight: Array  # its number of samples
    accepted: Array  # False: not aggregated


class ServerState(NamedTuple):
    """The model and the sums received since the last step."""

    params: Params
    shared: Shared
    optimizer: PyTree
    version: Array
    pending: Params  # sum of weight x discount x pseudo-gradient
    pending_extra: Extra
    pending_weight: Array
    num_pending: Array
    num_dropped: Array


@SERVERS.register()
@value
class Server:
    """A server that collects updates and, when its buffer is full, takes an optimizer step along their mean.

    For plain SGD a step is

        w <- w - lr * (sum_i weight_i discount(s_i) delta_i) / (sum_i weight_i).

    Args:
        lr: the server's step size.
        buffer_size: the number of updates per step; None for one step at the end of each round.
        optimizer: an optax optimizer; by default plain SGD.
        discount: a factor for stale updates, by their staleness s_i in server versions.
        max_staleness: updates that are staler than this are dropped and counted.
        weighting: `"uniform"` for weights of 1, `"samples"` for the clients' numbers of samples.
        applies: `"deltas"`, or `"models"` to use w - w_i in place of delta_i, which mixes models instead of adding
            differences.
    """

    lr: float = 1.0
    buffer_size: Static[int | None] = None
    optimizer: Optimizer = Optimizer()
    discount: Discount = Constant()
    max_staleness: Static[int | None] = None
    weighting: Static[Literal["uniform", "samples"]] = "uniform"
    applies: Static[Literal["deltas", "models"]] = "deltas"

    def __post_init__(self) -> None:
        require_positive("lr", self.lr, "To train without a shared model, use `local_only(...)`.")
        require_count("buffer_size", self.buffer_size)
        require_count("max_staleness", self.max_staleness, least=0)
        require_one_of("weighting", self.weighting, ("uniform", "samples"))
        require_one_of("applies", self.applies, ("deltas", "models"))

    @property
    def is_synchronous(self) -> bool:
        """True if the server waits for a whole round before each step."""
        return self.buffer_size is None

    def init(self, objective: Objective, params: Params, extra: Extra) -> ServerState:
        """Return the state before the first update; `extra` has the shapes of the clients' extra uploads."""
        zeros = lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)
        count = jnp.zeros((), jnp.int32)
        return ServerState(
            params=params,
            shared=objective.init_shared(params),
            optimizer=self.optimizer.at(self.lr).init(params),
            version=count,
            pending=zeros(params),
            pending_extra=zeros(extra),
            pending_weight=jnp.zeros(()),
            num_pending=count,
            num_dropped=count,
        )

    def receive(self, state: ServerState, uploads: Upload) -> ServerState:
        """Add uploads that arrive before the next step."""
        staleness = state.version - uploads.version
        bound = self.max_staleness
        fresh = jnp.ones_like(uploads.accepted) if bound is None else staleness <= bound
        counted = uploads.accepted & fresh
        weight = uploads.weight if self.weighting == "samples" else jnp.ones_like(uploads.weight)
        weight = jnp.where(counted, weight, 0)
        factor = weight * self.discount(staleness)
        if self.applies == "deltas":
            pseudo_gradient = uploads.delta
        else:
            pseudo_gradient = jax.tree.map(lambda w, end: w[None] - end, state.params, uploads.end)
        return state._replace(
            pending=jax.tree.map(lambda t, d: t + _total(factor, counted, d), state.pending, pseudo_gradient),
            pending_extra=jax.tree.map(
                lambda t, e: t + _total(jnp.ones_like(factor), counted, e), state.pending_extra, uploads.extra
            ),
            pending_weight=state.pending_weight + weight.sum(),
            num_pending=state.num_pending + counted.sum(dtype=jnp.int32),
            num_dropped=state.num_dropped + (uploads.accepted & ~fresh).sum(dtype=jnp.int32),
        )

    def step(self, state: ServerState, objective: Objective, num_clients: int) -> ServerState:
        """Apply the pending updates; without any, return the state unchanged."""
        mean = jax.tree.map(lambda t: (t / jnp.maximum(state.pending_weight, 1e-30)).astype(t.dtype), state.pending)
        changes, optimizer = self.optimizer.at(self.lr).update(mean, state.optimizer, state.params)
        stepped = ServerState(
            params=optax.apply_updates(state.params, changes),
            shared=objective.absorb(state.shared, state.pending_extra, num_clients),
            optimizer=optimizer,
            version=state.version + 1,
            pending=optax.tree.zeros_like(state.pending),
            pending_extra=optax.tree.zeros_like(state.pending_extra),
            pending_weight=jnp.zeros_like(state.pending_weight),
            num_pending=jnp.zeros_like(state.num_pending),
            num_dropped=state.num_dropped,
        )
        return jax.tree.map(lambda new, old: jnp.where(state.num_pending > 0, new, old), stepped, state)

    def step_if_full(self, state: ServerState, objective: Objective, num_clients: int) -> ServerState:
        """Take a step if `buffer_size` updates are pending."""
        assert self.buffer_size is not None  # synchronous servers step at the end of a round
        if self.buffer_size == 1:
            return self.step(state, objective, num_clients)
        full = state.num_pending >= self.buffer_size
        return jax.lax.cond(full, lambda s: self.step(s, objective, num_clients), lambda s: s, state)


def _total(factor: Array, counted: Array, values: Array) -> Array:
    """Return `sum_i factor_i values_i` over the counted entries, ignoring the others even if they are not finite.

    This is a matrix product because XLA's sum over a leading axis is 20 times slower on a CPU. It has full precision
    because a GPU would otherwise round to TF32.
    """
    kept = jnp.where(counted.reshape((-1,) + (1,) * (values.ndim - 1)), values, jnp.zeros_like(values))
    return jnp.tensordot(factor.astype(values.dtype), kept, axes=1, precision="highest")


class ServerOptions(TypedDict, total=False):
    """The options that every mode accepts: the fields of `Server` about how, not when, updates are applied."""

    optimizer: Optimizer
    discount: Discount
    max_staleness: int | None
    weighting: Literal["uniform", "samples"]
    applies: Literal["deltas", "models"]


@SERVERS.register()
def synchronous(lr: float = 1.0, **options: Unpack[ServerOptions]) -> Server:
    """Create a server that steps at the end of each round: FedAvg, Fallah Algorithm 1, gMeta Algorithm 1.

    >>> import personax as px
    >>> px.synchronous(0.5).is_synchronous
    True
    """
    return Server(lr, buffer_size=None, **options)


@SERVERS.register()
def buffered(buffer_size: int, lr: float = 1.0, **options: Unpack[ServerOptions]) -> Server:
    """Create a server that steps after every `buffer_size` arrivals: FedBuff (Nguyen 2022, Algorithm 1).

    >>> import personax as px
    >>> px.buffered(4, weighting="samples").buffer_size
    4
    """
    return Server(lr, buffer_size=buffer_size, **options)


@SERVERS.register()
def asynchronous(lr: float = 1.0, **options: Unpack[ServerOptions]) -> Server:
    """Create a server that applies `w <- w - lr * delta` at each arrival: PersA-FL Algorithm 1, whose beta is `lr`.

    >>> import personax as px
    >>> px.asynchronous(0.5, max_staleness=10).buffer_size
    1
    """
    return Server(lr, buffer_size=1, **options)
