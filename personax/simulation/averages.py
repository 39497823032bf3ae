"""Averages over a cohort at every local step, which only a simulator can observe."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from personax.keys import round_key
from personax.objectives import Objective
from personax.objectives.mixture import Mixed, mix_models, mixes_models
from personax.typing import Array, Params, Personal, PyTree
from personax.values import require_nonnegative, value


class Path(NamedTuple):
    """The path of a round: iterates and personal states after each local step, leaves [cohort, steps, ...]."""

    anchor: Params
    iterates: Params
    memories: PyTree
    client: Array  # positions; the number of clients for invalid entries
    valid: Array
    round: Array
    key: Array


class Tracker(Protocol):
    """An observer of the iterates of a synchronous run. `explain` returns why it cannot follow a run, or ""."""

    def explain(self, objective: Objective, streams: bool) -> str: ...
    def init(self, params: Params, personal: Personal) -> PyTree: ...
    def update(self, state: PyTree, path: Path, personal: Personal) -> PyTree: ...


class WeightedSum(NamedTuple):
    """Sums over local steps of the weights p_t and, for each client, of p_t times its mixed model."""

    weight: Array
    models: Params


@value
class WeightedAverage:
    """The average iterate of APFL Theorem 2 for each client i, selected or not:

        (1 / S_T) sum_t p_t (mix_i v_i(t) + (1 - mix_i) mean_j w_j(t)),   p_t = (t + a)^2,   S_T = sum_t p_t,

    with the mean over the cohort of the round; a is `offset`, t = 1, 2, ... counts local steps. Departures from the
    paper: none. For `Mixture` objectives with a number of steps, not of epochs.

    >>> import jax, personax as px
    >>> fed = px.datasets.synthetic(num_clients=3, num_features=4, num_samples=20, key=jax.random.key(0))
    >>> task, algorithm = px.classification(px.logistic_regression(10)), px.apfl(lr=0.1, mix=0.5, num_steps=2)
    >>> monitor, schedule = px.Monitor(tracker=px.WeightedAverage(offset=10.0)), px.rounds(3, 2, key=jax.random.key(0))
    >>> result = px.simulate(algorithm, task, fed, schedule, key=jax.random.key(0), monitor=monitor)
    >>> monitor.tracker.read(result.tracked)["dense_0"]["kernel"].shape  # a model for each client
    (3, 4, 10)
    """

    offset: float

    def __post_init__(self) -> None:
        require_nonnegative("offset", self.offset)

    def explain(self, objective: Objective, streams: bool) -> str:
        """Require a mixture, and all clients on the device in every round."""
        if not mixes_models(objective):
            return f"`WeightedAverage` is for `Mixture` objectives, got {objective}."
        follows_all = "`WeightedAverage` follows all clients in every round, but this run streams a few at a time."
        return follows_all if streams else ""

    def init(self, params: Params, personal: Personal) -> WeightedSum:
        """Sums of zero."""
        return WeightedSum(jnp.zeros(()), jax.tree.map(jnp.zeros_like, personal.model))

    def update(self, state: WeightedSum, path: Path, personal: Personal) -> WeightedSum:
        """Add the local steps of one round. `personal` is the state of all clients before the round."""
        num_steps = path.memories.mix.shape[1]
        t = path.round * num_steps + 1.0 + jnp.arange(num_steps)
        p = (t + self.offset) ** 2
        mean = _cohort_mean(path)
        weighted_mean = jax.tree.map(lambda w: _along(p, w).sum(axis=0), mean)
        idle = lambda own: mix_models(Mixed(_scaled(own.model, p.sum()), own.mix), weighted_mean)
        busy = lambda own: jax.tree.map(lambda leaf: _along(p, leaf).sum(axis=0), jax.vmap(mix_models)(own, mean))
        everyone, members = jax.vmap(idle)(personal), jax.vmap(busy)(path.memories)
        added = jax.tree.map(lambda e, m: e.at[path.client].set(m, mode="drop"), everyone, members)
        return WeightedSum(state.weight + p.sum(), jax.tree.map(jnp.add, state.models, added))

    def read(self, state: WeightedSum) -> Params:
        """The average model of each client, with a leading axis of seeds if there are several."""
        over = lambda total: state.weight.reshape(state.weight.shape + (1,) * (total.ndim - state.weight.ndim))
        return jax.tree.map(lambda total: total / over(total).astype(total.dtype), state.models)


@value
class RandomIterate:
    """The random iterate of Fallah Remark 4.7: the cohort's mean iterate at a uniformly drawn step of each round.

    The step is one of 0 ... num_steps - 1. The state is the iterate of the last round. Departures from the paper: none.

    >>> import jax, personax as px
    >>> fed = px.datasets.synthetic(num_clients=3, num_features=4, num_samples=20, key=jax.random.key(0))
    >>> task, algorithm = px.classification(px.logistic_regression(10)), px.fedavg(lr=0.1, num_steps=2)
    >>> monitor, schedule = px.Monitor(tracker=px.RandomIterate()), px.rounds(3, 2, key=jax.random.key(0))
    >>> result = px.simulate(algorithm, task, fed, schedule, key=jax.random.key(0), monitor=monitor)
    >>> result.tracked["dense_0"]["kernel"].shape
    (4, 10)
    """

    def explain(self, objective: Objective, streams: bool) -> str:
        """Return "", because every run has random iterates."""
        return ""

    def init(self, params: Params, personal: Personal) -> Params:
        """The initial model."""
        return params

    def update(self, state: Params, path: Path, personal: Personal) -> Params:
        """The mean iterate at this round's step. Step 0 is the model that the cohort downloaded."""
        num_steps = jax.tree.leaves(path.iterates)[0].shape[1]
        step = jax.random.randint(round_key(path.key, path.round), (), 0, num_steps)
        mean = _cohort_mean(path)
        return jax.tree.map(lambda a, m: jnp.where(step == 0, a, m[jnp.maximum(step - 1, 0)]), path.anchor, mean)


def _cohort_mean(path: Path) -> Params:
    """The mean iterate after each step, leaves [steps, ...]; the anchor if no entry is valid."""
    share = path.valid / jnp.maximum(path.valid.sum(), 1)

    def mean(anchor: Array, leaf: Array) -> Array:
        kept = jnp.where(path.valid.reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, 0)
        return jnp.where(path.valid.any(), _along(share, kept).sum(axis=0), anchor[None])

    return jax.tree.map(mean, path.anchor, path.iterates)


def _along(factor: Array, leaf: Array) -> Array:
    """Scale the entries along the leading axis."""
    return factor.reshape((-1,) + (1,) * (leaf.ndim - 1)).astype(leaf.dtype) * leaf


def _scaled(tree: Params, factor: Any) -> Params:
    return jax.tree.map(lambda leaf: factor.astype(leaf.dtype) * leaf, tree)
