"""Networks with batch normalization, one of each library: dense, normalization, relu, dense."""

import equinox as eqx
import jax
from flax import linen, nnx

import personax as px

MOMENTUM = 0.9
NUM_INPUTS, NUM_CLASSES = 5, 3


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Dense(4, use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=MOMENTUM)(x)
        return linen.Dense(NUM_CLASSES)(jax.nn.relu(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(NUM_INPUTS, 4, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=MOMENTUM, rngs=rngs)
        self.last = nnx.List([nnx.Linear(4, NUM_CLASSES, rngs=rngs)])

    def __call__(self, x):
        return self.last[0](jax.nn.relu(self.norm(self.first(x))))


class Equinox(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key, mode="batch"):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(NUM_INPUTS, 4, use_bias=False, key=keys[0])
        self.norm = eqx.nn.BatchNorm(4, "rows", momentum=MOMENTUM, mode=mode)
        self.last = eqx.nn.Linear(4, NUM_CLASSES, key=keys[1])

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jax.nn.relu(x)), state


def running_equinox(key):
    """An Equinox module that normalizes by the running statistics in training, too."""
    return Equinox(key, mode="ema")


NETWORKS = {
    "own": px.mlp((4,), NUM_CLASSES, "relu", norm="batch"),
    "linen": px.from_flax(Linen()),
    "nnx": px.from_nnx(Nnx),
    "equinox": px.from_equinox(Equinox),
    "equinox running": px.from_equinox(running_equinox),
}
KERNELS = {
    "own": lambda params: params["dense_0"]["kernel"],
    "linen": lambda params: params["params"]["Dense_0"]["kernel"],
    "nnx": lambda params: params["first"]["kernel"],
    "equinox": lambda params: params.first.weight.T,
    "equinox running": lambda params: params.first.weight.T,
}
RUNNING = {  # the running mean and variance
    "own": lambda params: (params["norm_0"]["mean"], params["norm_0"]["var"]),
    "linen": lambda params: (
        params["batch_stats"]["BatchNorm_0"]["mean"],
        params["batch_stats"]["BatchNorm_0"]["var"],
    ),
    "nnx": lambda params: (params["norm"]["mean"], params["norm"]["var"]),
    "equinox": lambda params: params.norm.batch_state_index.init,
    "equinox running": lambda params: params.norm.ema_state_index.init,
}
