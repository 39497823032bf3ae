"""Batch normalization with running statistics that are leaves of the parameters."""

import math

import jax
import jax.numpy as jnp

from personax.typing import Array, Params

MOMENTUM = 0.9
VARIANCE_FLOOR = 1e-5


def init_batch_norm(num_channels: int) -> Params:
    """Return the scale, shift, mean and variance of a layer that changes nothing."""
    ones, zeros = jnp.ones(num_channels), jnp.zeros(num_channels)
    return {"scale": ones, "bias": zeros, "mean": zeros, "var": ones}


def batch_norm(layer: Params, x: Array, weight: Array | None) -> tuple[Array, Params]:
    """Normalize each channel (the last axis): `scale (x - m) / sqrt(v + 1e-5) + bias`; also return new statistics.

    With `weight`, in training, m and v are the weighted mean and variance of the rows of the batch, and

        mean <- 0.9 mean + 0.1 m,     var <- 0.9 var + 0.1 v.

    Without it, in evaluation, they are `mean` and `var`, which are unchanged. Ioffe and Szegedy 2015, Algorithms 1 and
    2.

    Departures from the paper: `var` averages v itself, not v n / (n - 1), as in Flax. An averaged `var` may become
    negative if a server adds the updates of several clients; it then counts as 0.
    """
    if weight is None:
        return _scaled(layer, x, layer["mean"], jnp.maximum(layer["var"], 0)), {}
    axes = tuple(range(x.ndim - 1))
    share = weight.astype(x.dtype) / jnp.maximum(weight.sum(), jnp.finfo(x.dtype).tiny).astype(x.dtype)
    share = share.reshape(-1, *(1,) * (x.ndim - 1)) / math.prod(x.shape[1:-1])
    mean = jnp.sum(share * x, axis=axes)
    var = jnp.sum(share * jnp.square(x - _of_channels(mean, x)), axis=axes)
    moved = lambda old, new: MOMENTUM * old + (1 - MOMENTUM) * new
    new = {"mean": moved(layer["mean"], mean), "var": moved(layer["var"], var)}
    return _scaled(layer, x, mean, var), jax.lax.stop_gradient(new)


def _scaled(layer: Params, x: Array, mean: Array, var: Array) -> Array:
    factor = layer["scale"] * jax.lax.rsqrt(var + VARIANCE_FLOOR)
    return (x - _of_channels(mean, x)) * _of_channels(factor, x) + _of_channels(layer["bias"], x)


def _of_channels(values: Array, x: Array) -> Array:
    return values.reshape((1,) * (x.ndim - 1) + (-1,))
