"""A message for runs that are far slower than their arithmetic."""

from typing import Any

import jax
import jax.numpy as jnp

from personax.algorithms import Algorithm
from personax.data.federation import Federation
from personax.fast.passes import optimized
from personax.fast.speed import expected_seconds, slowest_primitive
from personax.simulation.engine import initial_params
from personax.typing import Batch, Task

PATIENCE = 10.0  # seconds of training below which there is no message
SLOW = 10.0  # the ratio to the expected time above which a run is slow
TIMED_MEMBERS = 4  # the number of clients for which an operation is timed
REMEDIES = {
    "conv_general_dilated": "Only convolutions over one or two axes without batch groups are optimized.",
    "while": "A loop of unknown length runs until the slowest client ends: use `jax.lax.scan` or `fori_loop`.",
    "sort": "Sorting is slow on every backend: use `jax.lax.top_k`, or sort before training.",
}
DEFAULT_REMEDY = "Replace it in the model or compute it before training, or train on a GPU."


def gradient_program(algorithm: Algorithm, task: Task, federation: Federation) -> Any:
    """The traced program of one gradient of the loss on one outer batch."""
    size = algorithm.local.size_of("outer")
    x, y = (jnp.repeat(leaf, size, axis=0) for leaf in federation.first_sample)
    batch = Batch(x, y, jnp.ones(size), jax.random.key(0))
    params = jax.eval_shape(lambda key: initial_params(task, federation, key=key), jax.random.key(0))
    return jax.make_jaxpr(jax.grad(task.loss))(params, batch).jaxpr


def explain_speed(algorithm: Algorithm, task: Task, federation: Federation, num_visits: int, seconds: float) -> str:
    """Explain why training took far longer than its operations should take on this machine; "" if it did not.

    `num_visits` is the total number of visits of all seeds, and `seconds` the time without compilation.

    >>> import personax as px
    >>> fed = px.Federation.from_clients([(jnp.ones((9, 5)), jnp.zeros(9, int))])
    >>> px.explain_speed(px.fedavg(lr=0.1, num_steps=2), px.classification(px.mlp((4,), 2)), fed, 50, seconds=0.5)
    ''
    """
    if seconds < PATIENCE:
        return ""
    program = gradient_program(algorithm, optimized(task), federation)
    num_steps = float(jnp.mean(jnp.asarray(algorithm.local.steps_of(federation.counts))))
    num_gradients = num_visits * num_steps * algorithm.objective.gradients_per_step()
    factor = seconds / (num_gradients * expected_seconds(program))
    found = slowest_primitive(program, TIMED_MEMBERS) if factor > SLOW else None
    if found is None:
        return ""
    return (
        f"Training took {factor:.0f} times as long as its operations should take on this machine. Of the largest "
        f"operations of a gradient, `{found.primitive}` takes the most time ({found.share:.0%}). "
        f"{REMEDIES.get(found.primitive, DEFAULT_REMEDY)}"
    )
