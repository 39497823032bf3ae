"""The vocabulary: what passes between the packages.

A client is one data set with its own loss. Everything in `objectives/` and `client/` is written for one client;
`simulation/` adds the others with `vmap`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

from jax import Array

PyTree = Any
Scalar = Array | float
Params = PyTree  # w: what the server shares
Personal = PyTree  # what never leaves client i: (), or v_i and its mixing weight, theta_i, a control variate
Shared = PyTree  # what the server broadcasts beside w: (), SCAFFOLD's c, ARUBA's sums
Extra = PyTree  # what a client uploads beside its delta; the server adds these up


class Batch(NamedTuple):
    """Examples along the leading axis.

    `weight` is 0 for filler rows; `key` seeds dropout, so that a loss is a function of (params, batch) and the
    two ends of a finite difference see the same mask.
    """

    x: Array
    y: Array
    weight: Array
    key: Array


Batches = dict[str, Batch]  # by role; the leading axis counts the batches of that role in one local step
LossFn = Callable[[Params, Batch], Scalar]  # f_i(w; xi): one client's loss on a batch
Metrics = dict[str, Array]


class Apply(Protocol):
    """Outputs of a network. Without a key the network is evaluated: dropout is off."""

    def __call__(self, params: Params, x: Array, key: Array | None = None, /) -> Array: ...


ClockName = Literal["step", "round"]


class Clock(NamedTuple):
    """Where a local step stands: the round, the step within the visit, and the visit's number of steps."""

    round: Scalar
    step: Scalar
    num_steps: Scalar

    def ticks(self, name: ClockName) -> Scalar:
        """The number of ticks before now: 0 at the first step of the first round."""
        return self.round if name == "round" else self.round * self.num_steps + self.step


class Model(NamedTuple):
    """A network as pure functions; `init` takes a key and one example batch `x`."""

    init: Callable[[Array, Array], Params]
    apply: Apply


class Task(NamedTuple):
    """What a model is trained for: its loss, and per-example metrics for evaluation.

    `metrics(params, batch)` gives the weighted mean over the batch of each metric, dropout off.
    `check(outputs, targets)` explains what is wrong with one client's targets, or returns "".
    """

    model: Model
    loss: LossFn
    metrics: Callable[[Params, Batch], Metrics]
    check: Callable[[Any, Any], str] = lambda outputs, targets: ""
