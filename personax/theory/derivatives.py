"""Gradients and Hessian products of one client's loss, as flat vectors."""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from personax.curvature import exact
from personax.theory.spectrum import Product
from personax.typing import Array, Batch, LossFn, Params


def gradient_of(loss: LossFn, model: Params, batch: Batch) -> Array:
    """Return the gradient as a flat vector."""
    return ravel_pytree(jax.grad(loss)(model, batch))[0]


def product_of(loss: LossFn, model: Params, batch: Batch) -> Product:
    """Return the Hessian-vector product as a function of a flat vector."""
    restore = ravel_pytree(model)[1]
    return lambda vector: ravel_pytree(exact(loss, model, restore(vector), batch))[0]


def cubic_of(loss: LossFn, model: Params, batch: Batch) -> Product:
    """Return D^3 f[v, v, .], the change of H v along v, as a function of a flat vector v."""
    flat, restore = ravel_pytree(model)

    def cubic(vector: Array) -> Array:
        product = lambda point: product_of(loss, restore(point), batch)(vector)
        return jax.jvp(product, (flat,), (vector,))[1]

    return cubic


def mean_loss(loss: LossFn) -> LossFn:
    """Return `f(w) = (1/n) sum_i f_i(w)`, Fallah (1), for batches with a leading axis of clients.

    Fallah's and gMeta's Assumption 5 print the sum without 1/n, which (1) has.
    """
    return lambda model, batches: jnp.mean(jax.vmap(loss, in_axes=(None, 0))(model, batches))


def examples_of(batch: Batch) -> Batch:
    """Split a client's batch into batches of one example each."""
    single = lambda leaf: leaf[:, None]
    keys = jnp.broadcast_to(batch.key, batch.weight.shape)
    return Batch(single(batch.x), single(batch.y), jnp.ones_like(single(batch.weight)), keys)


def dimension(models: Params) -> int:
    """Return the number of parameters of one model of a region."""
    return sum(leaf[0].size for leaf in jax.tree.leaves(models))


def starts(models: Params, num: int, key: Array) -> Array:
    """Return random flat vectors, [num, dimension], as starting points of iterations."""
    return jax.random.normal(key, (num, dimension(models)), jnp.result_type(*jax.tree.leaves(models)))
