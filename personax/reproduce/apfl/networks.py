"""The networks and data of the code that APFL's authors published."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.data.datasets.synthetic import draw_client
from personax.data.federation import Federation
from personax.data.partition import Partition
from personax.keys import HostStream, host_generator
from personax.models.networks import drop_units
from personax.typing import Array, Model, Params

VARIANCE_FLOOR = 1e-5
MARGIN = 4  # the largest shift of an image, in pixels


class MixedOutputs(NamedTuple):
    """Parameters of two copies of a network, and the weight of the first one's outputs."""

    own: Params
    shared: Params
    mix: Array


@functools.cache
def mixing_outputs(model: Model) -> Model:
    """Extend a network to accept `MixedOutputs`: mix f(own, x) + (1 - mix) f(shared, x)."""

    def apply(params: Params, x: Array, key: Array | None = None, /) -> Array:
        if not isinstance(params, MixedOutputs):
            return model.apply(params, x, key)
        other = None if key is None else jax.random.fold_in(key, 1)
        own, shared = model.apply(params.own, x, key), model.apply(params.shared, x, other)
        return params.mix * own + (1 - params.mix) * shared

    return Model(model.init, apply)


@functools.cache
def batch_norm_mlp(widths: tuple[int, ...], num_outputs: int, dropout: float = 0.0) -> Model:
    """Return ReLU layers with batch normalization and dropout, using batch statistics in evaluation too.

    The output layer has no bias. Kernels and biases are initialized as in PyTorch, scales to 1 and shifts to 0.
    """
    sizes = (*widths, num_outputs)

    def init(key: Array, x: Array) -> Params:
        inputs = (math.prod(x.shape[1:]), *widths)
        params = {}
        for i, (num_in, num_out) in enumerate(zip(inputs, sizes, strict=True)):
            keys, bound = jax.random.split(jax.random.fold_in(key, i)), num_in**-0.5
            draw = lambda key, shape, bound=bound: jax.random.uniform(key, shape, minval=-bound, maxval=bound)
            layer = {"kernel": draw(keys[0], (num_in, num_out))}
            if i < len(widths):
                layer |= {"bias": draw(keys[1], (num_out,)), "scale": jnp.ones(num_out), "shift": jnp.zeros(num_out)}
            params[f"dense_{i}"] = layer
        return params

    def apply(params: Params, x: Array, key: Array | None = None, /) -> Array:
        x = x.reshape(x.shape[0], -1).astype(params["dense_0"]["kernel"].dtype)
        for i in range(len(widths)):
            layer = params[f"dense_{i}"]
            x = x @ layer["kernel"] + layer["bias"][None, :]
            x = (x - x.mean(axis=0)[None, :]) / jnp.sqrt(x.var(axis=0)[None, :] + VARIANCE_FLOOR)
            x = jax.nn.relu(layer["scale"][None, :] * x + layer["shift"][None, :])
            if dropout and key is not None:
                x = drop_units(x, dropout, jax.random.fold_in(key, i))
        return x @ params[f"dense_{len(widths)}"]["kernel"]

    return Model(init, apply)


@functools.cache
def augmented(model: Model) -> Model:
    """Wrap a network so that training images are flipped and shifted by up to 4 pixels at random."""

    def apply(params: Params, x: Array, key: Array | None = None, /) -> Array:
        return model.apply(params, x if key is None else _moved(x, jax.random.fold_in(key, 7)), key)

    return Model(model.init, apply)


def _moved(images: Array, key: Array) -> Array:
    """Shift each image over a frame of zeros, and flip it with probability 1/2."""
    crop_key, flip_key = jax.random.split(key)
    corners = jax.random.randint(crop_key, (len(images), 2), 0, 2 * MARGIN + 1)
    flips = jax.random.bernoulli(flip_key, shape=(len(images),))
    framed = jnp.pad(images, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)))

    def one(image: Array, corner: Array, flip: Array) -> Array:
        cut = jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), images.shape[1:])
        return jnp.where(flip, cut[:, ::-1], cut)

    return jax.vmap(one)(framed, corners, flips)


def pairs(labels: np.ndarray, num_clients: int, *, key: Array) -> Partition:
    """Give client i the classes k and k + 5 for k = i mod 5, dividing each class equally among its clients."""
    rng = host_generator(key, HostStream.PARTITION_ROWS)
    of_class = {k: rng.permutation(np.flatnonzero(labels == k)) for k in range(10)}
    holders = {k: [i for i in range(num_clients) if i % 5 == k % 5] for k in range(10)}
    parts = {
        (k, i): part
        for k in of_class
        for i, part in zip(holders[k], np.array_split(of_class[k], len(holders[k])), strict=True)
    }
    rows = [np.concatenate([parts[k, i] for k in (i % 5, i % 5 + 5)]) for i in range(num_clients)]
    offsets = np.r_[0, np.cumsum([len(one) for one in rows])]
    return Partition(np.concatenate(rows), offsets, f"classes k and k + 5 for k = i mod 5, {num_clients} clients")


def synthetic_of_authors(spread: float, num_clients: int, key: Array) -> Federation:
    """Make synthetic(spread, spread) with 2 classes, 500 to 1000 samples per client, and spreads as deviations."""
    train, test = [], []
    for i in range(num_clients):
        rng = host_generator(key, HostStream.SYNTHETIC, i)
        num = int(rng.integers(500, 1001))
        made = draw_client(rng, spread**2, spread**2, 60, 2, num)
        cut = num - round(0.2 * num)
        train.append((made.x[:cut], made.y[:cut]))
        test.append((made.x[cut:], made.y[cut:]))
    origin = f"synthetic({spread:g}, {spread:g}) with 2 classes, 500 to 1000 samples, spreads as standard deviations."
    return Federation.from_clients(train, test, origin=origin)
