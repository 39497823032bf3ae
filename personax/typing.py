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
Metrics = dict[str, Array]


class Apply(Protocol):
    """The outputs of a network. Without a key the network is in evaluation mode: dropout is off."""

    def __call__(self, params: Params, x: Array, key: Array | None = None, /) -> Array: ...


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
    """A network as a pair of pure functions; `init` takes a key and one example batch `x`.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> init = lambda key, x: {"w": jnp.zeros((x.shape[1], 1))}
    >>> model = px.Model(init, lambda params, x, key=None: x @ params["w"])
    >>> params = model.init(jax.random.key(0), jnp.ones((1, 3)))
    >>> model.apply(params, jnp.ones((2, 3))).shape
    (2, 1)
    """

    init: Callable[[Array, Array], Params]
    apply: Apply


class Task(NamedTuple):
    """A model with its training loss and its evaluation metrics.

    `metrics(params, batch)` returns the weighted mean of each metric over the batch, with dropout off.
    `check(outputs, targets)` describes what is wrong with one client's targets, or returns "".

    >>> import personax as px
    >>> px.classification(px.mlp((8,), num_outputs=3))._fields
    ('model', 'loss', 'metrics', 'check')
    """

    model: Model
    loss: LossFn
    metrics: Callable[[Params, Batch], Metrics]
    check: Callable[[Any, Any], str] = lambda outputs, targets: ""
