"""The models at which constants are measured, and the samples that represent each client's loss."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from personax.data.federation import Federation
from personax.keys import HostStream, host_generator
from personax.typing import Array, Batch, Params
from personax.values import require_count, require_positive


class Region(NamedTuple):
    """The models at which a constant is measured, along the leading axis of every leaf, and their description.

    The papers' constants are suprema over the whole space, where many do not exist: the gradient of a quadratic is
    unbounded. Here they are maxima over the given models.

    >>> import jax.numpy as jnp, personax as px
    >>> px.theory.Region({"w": jnp.zeros((3, 2))}, "three models").num_models
    3
    """

    models: Params
    description: str

    @property
    def num_models(self) -> int:
        """Return the number of models."""
        return len(jax.tree.leaves(self.models)[0])


def at(params: Params) -> Region:
    """Return the region of a single model.

    >>> import jax.numpy as jnp, personax as px
    >>> px.theory.at({"w": jnp.zeros(2)}).num_models
    1
    """
    return Region(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], params), "one model")


def path(models: Sequence[Params]) -> Region:
    """Return the region of the models of a run, in order.

    >>> import jax.numpy as jnp, personax as px
    >>> px.theory.path([jnp.zeros(2), jnp.ones(2)]).description
    'a path of 2 models'
    """
    if not len(models):
        raise ValueError("A path needs at least one model.")
    return Region(jax.tree.map(lambda *leaves: jnp.stack(leaves), *models), f"a path of {len(models)} models")


def ball(center: Params, radius: float, num_models: int, *, key: Array) -> Region:
    """Return the region of the center and `num_models - 1` models drawn uniformly from the ball around it.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> region = px.theory.ball(jnp.zeros(2), radius=0.5, num_models=3, key=jax.random.key(0))
    >>> bool((jnp.linalg.norm(region.models, axis=1) <= 0.5).all())
    True
    """
    require_positive("radius", radius, "For the center alone, use `at(params)`.")
    require_count("num_models", num_models)
    flat, restore = ravel_pytree(center)
    direction_key, radius_key = jax.random.split(key)
    directions = jax.random.normal(direction_key, (num_models - 1, flat.size), flat.dtype)
    shares = jax.random.uniform(radius_key, (num_models - 1, 1), flat.dtype) ** (1 / flat.size)
    offsets = radius * shares * directions / jnp.linalg.norm(directions, axis=1, keepdims=True)
    drawn = jnp.concatenate([flat[None], flat[None] + offsets])
    return Region(jax.vmap(restore)(drawn), f"{num_models} models of the ball of radius {radius:g} around the first")


def sample_clients(federation: Federation, num_samples: int | None = None, *, key: Array | None = None) -> Batch:
    """Return training samples that represent each client's loss f_i: leaves [clients, samples, ...].

    Uses all of a client's samples, or `num_samples` drawn without replacement if it has more. Clients with fewer
    samples than others are padded with samples of weight 0.

    >>> import jax, numpy as np, personax as px
    >>> fed = px.Federation.from_clients([(np.zeros((5, 1)), np.zeros(5, int)), (np.zeros((2, 1)), np.zeros(2, int))])
    >>> px.theory.sample_clients(fed, 3, key=jax.random.key(0)).weight.tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    """
    require_count("num_samples", num_samples)
    counts = np.asarray(federation.counts)
    if num_samples is not None and counts.max() > num_samples and key is None:
        raise ValueError(
            f"Drawing {num_samples} samples of each client needs a `key`. Omit the number to use all samples."
        )
    width = int(counts.max()) if num_samples is None else min(num_samples, int(counts.max()))
    rows, weight = np.zeros((len(counts), width), np.int64), np.zeros((len(counts), width))
    for i, (start, count) in enumerate(zip(federation.offsets[:-1], counts, strict=True)):
        taken = np.arange(count)
        if count > width:
            assert key is not None
            taken = host_generator(key, HostStream.THEORY_SAMPLES, int(federation.ids[i])).permutation(count)[:width]
        rows[i, : len(taken)], weight[i, : len(taken)] = start + taken, 1
        rows[i, len(taken) :] = start
    keys = jax.random.split(jax.random.key(0), len(counts))
    return Batch(jnp.asarray(federation.x[rows]), jnp.asarray(federation.y[rows]), jnp.asarray(weight, float), keys)


def by_example(batches: Batch) -> Batch:
    """Make every sample a client, for the constants of single losses l(w; z) in Fallah (14) and (15).

    >>> import numpy as np, personax as px
    >>> fed = px.Federation.from_clients([(np.zeros((3, 1)), np.zeros(3, int)), (np.zeros((2, 1)), np.zeros(2, int))])
    >>> px.theory.by_example(px.theory.sample_clients(fed)).x.shape  # five clients of one sample
    (5, 1, 1)
    """
    flat = lambda leaf: leaf.reshape(-1, 1, *leaf.shape[2:])
    kept = np.flatnonzero(np.asarray(batches.weight).ravel() > 0)
    take = lambda leaf: flat(leaf)[kept]
    keys = jnp.repeat(batches.key, batches.weight.shape[1])[kept]
    return Batch(take(batches.x), take(batches.y), take(batches.weight), keys)
