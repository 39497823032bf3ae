"""Random streams that follow from a run's key."""

import jax
import jax.numpy as jnp
import numpy as np

from personax.typing import Array

INIT, BATCHES, ITERATES, ADAPTATION = range(4)  # streams of a run's key


def typed_key(key: Array) -> Array:
    """The key itself; one of the old style, two plain words, becomes a typed one."""
    if not hasattr(key, "dtype"):
        raise ValueError(f"A key must be one of JAX's, such as `jax.random.key(0)`, got {key!r}.")
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def run_stream(key: Array, stream: int = BATCHES) -> Array:
    """The key from which all batches of a run follow: threefry, which `vmap` does not change, whatever `key` is."""
    words = jax.random.key_data(key)
    own = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
    for word in words[2:]:
        own = jax.random.fold_in(own, word)
    return jax.random.fold_in(own, stream)


def host_generator(key: Array, *stream: int) -> np.random.Generator:
    """A NumPy generator that follows a JAX key: splits and schedules are made before a run, on the host."""
    if typed_key(key).ndim:
        raise ValueError(f"Splits and schedules take one key, got {len(key)}. Make one for each.")
    return np.random.default_rng([*np.asarray(jax.random.key_data(typed_key(key))).ravel().tolist(), *stream])
