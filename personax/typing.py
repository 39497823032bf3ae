"""The types that the packages exchange.

A client is one dataset with its own loss. Everything in `objectives/` and `client/` is written for one client;
`simulation/` maps it over many with `vmap`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

from jax import Array

PyTree = Any
Scalar = Array | float
Params = PyTree  # w: the shared model
Personal = PyTree  # the state that never leaves client i: (), or v_i and its mixing weight, theta_i, a control variate
Shared = PyTree  # the state that the server broadcasts with w: (), SCAFFOLD's c, ARUBA's sums
Extra = PyTree  # the upload besides the delta; the server sums it over clients


class Batch(NamedTuple):
    """A batch of examples along the leading axis.

    `weight` is 0 for filler rows. `key` seeds dropout, so that a loss is a function of (params, batch) and both ends of
    a finite difference use the same mask.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> px.Batch(x=jnp.zeros((2, 3)), y=jnp.zeros(2, int), weight=jnp.ones(2), key=jax.random.key(0)).x.shape
    (2, 3)
    """

    x: Array
    y: Array
    weight: Array
    key: Array


Batches = dict[str, Batch]  # by role; the leading axis counts the batches of that role in one local step
LossFn = Callable[[Params, Batch], Scalar]  # f_i(w; xi): one client's loss on a batch
StatisticsFn = Callable[[Params, Batch], Params]  # new values of the leaves that no gradient moves, None elsewhere
Metrics = dict[str, Array]


class Apply(Protocol):
    """The outputs of a network. Without a key the network is in evaluation mode: dropout is off."""

    def __call__(self, params: Params, x: Array, key: Array | None = None, /) -> Array: ...


class Train(Protocol):
    """The outputs of a network in training, and new values of its statistics.

    The statistics are a tree like the parameters, with None for all leaves that a gradient moves. Rows of weight 0 are
    filler: the outputs of the others and the statistics do not depend on them.
    """

    def __call__(self, params: Params, x: Array, weight: Array, key: Array, /) -> tuple[Array, Params]: ...


ClockName = Literal["step", "round"]


class Clock(NamedTuple):
    """The time of a local step: the round, the step within the visit, and the visit's number of steps.

    >>> import personax as px
    >>> px.Clock(round=2, step=1, num_steps=5).ticks("step")
    11
    """

    round: Scalar
    step: Scalar
    num_steps: Scalar

    def ticks(self, name: ClockName) -> Scalar:
        """Return the number of ticks so far: 0 at the first step of the first round."""
        return self.round if name == "round" else self.round * self.num_steps + self.step


class Model(NamedTuple):
    """A network as pure functions; `init` takes a key and one example batch `x`.

    `train` is for networks with statistics, such as the running means of batch normalization, which no gradient moves.
    Without it, the network in training is `apply` with a key.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> init = lambda key, x: {"w": jnp.zeros((x.shape[1], 1))}
    >>> model = px.Model(init, lambda params, x, key=None: x @ params["w"])
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 3)))
    >>> model.apply(params, jnp.ones((2, 3))).shape
    (2, 1)
    """

    init: Callable[[Array, Array], Params]
    apply: Apply
    train: Train | None = None


class Task(NamedTuple):
    """A model with its training loss and its evaluation metrics.

    `metrics(params, batch)` returns the weighted mean of each metric over the batch, with dropout off.
    `check(outputs, targets)` describes what is wrong with one client's targets, or returns "".
    `statistics(params, batch)` returns the values after a step on this batch of the leaves that no gradient moves, such
    as the running means of batch normalization: a tree like `params` with None for all other leaves. Optimizers, weight
    decay and clipping skip these leaves. Apart from that they are parameters: the server averages them like the others.

    >>> import personax as px
    >>> px.classification(px.mlp((8,), num_outputs=3))._fields
    ('model', 'loss', 'metrics', 'check', 'statistics')
    """

    model: Model
    loss: LossFn
    metrics: Callable[[Params, Batch], Metrics]
    check: Callable[[Any, Any], str] = lambda outputs, targets: ""
    statistics: StatisticsFn | None = None
