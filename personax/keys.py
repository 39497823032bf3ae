"""Random streams: one table of every stream, and the functions that derive keys and generators from them.

A run has one key per seed. `RunStream` numbers the JAX keys that follow from it and `HostStream` the NumPy generators.
The key of a batch follows from `(run key, client id, that client's update count, step, draw)` and from nothing else, so
vmapped runs equal sequential ones and live runs equal simulated ones.

    run key -> RunStream -> client id -> update count -> batch -> dropout
                                                      -> epoch -> batch
"""

from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np

from personax.typing import Array

MAX_DRAWS = 4096  # numbered draws of one local step
MAX_STEPS = 2**32 // MAX_DRAWS  # local steps of one visit, so that every draw of every step has its own 32-bit number

# The last 32-bit number is never the number of a draw: it marks what follows from a visit or a batch as a whole.
_EPOCH = _DROPOUT = 2**32 - 1


class RunStream(IntEnum):
    """JAX streams of a run's key."""

    INIT = 0  # initial parameters
    BATCHES = 1  # batches of local steps, by client, update and step
    ITERATES = 2  # Fallah's random iterate of each round
    ADAPTATION = 3  # batches on which a scored model is adapted


class HostStream(IntEnum):
    """NumPy streams of a key. Extra indices, where a stream has any, are given in parentheses."""

    DELAY_FACTORS = 0  # the ratio of each client's upload time to its download time
    COHORTS = 1  # members of each synchronous round
    AGGREGATED = 2  # the members of a cohort that are averaged
    ARRIVING_CLIENTS = 3  # the client of each uniform arrival
    DOWNLOADS = 4  # the model version that each uniform arrival started from
    DELAYS = 5  # + the number of the block: download, compute, upload and pause times
    PARTITION_CLASSES = 2**30  # classes, or class proportions, of each client
    PARTITION_COUNTS = 2**30 + 1  # samples of each class for each client
    PARTITION_ROWS = 2**30 + 2  # samples of a class
    TEST_SPLIT = 2**30 + 3  # a client's test samples
    HELD_OUT = 2**31 + 16  # clients kept out of training
    THEORY_SAMPLES = 2**31 + 24  # samples that represent a client's loss (client id)
    DIRECTIONS = 2**31 + 25  # projections of sliced distances
    SUBSETS = 2**31 + 26  # samples whose distance is measured
    INSPECTED_CLIENTS = 2**31 + 30  # clients that `inspect` measures
    TRIALS = 2**31 + 34  # combinations of options that a random search tries
    DEVICES = 2**31 + 40  # the device of each client (client id)
    GENERATED_DEVICES = 2**31 + 41  # speeds, bandwidths and availability of devices without a trace
    ONLINE_COHORTS = 2**31 + 42  # members of a round that are drawn among clients online (round)
    NEXT_CLIENTS = 2**31 + 43  # the next client of a server with a limited number of active clients
    VISIT_DELAYS = 2**31 + 44  # delays of single visits (client, update)
    CONTROL = 2**31 + 45  # decisions of controllers (event)
    EXPECTED_DELAYS = 2**31 + 46  # the delays from which the expected durations of visits are estimated
    LIVE_COHORTS = 2**31 + 64  # members of a live round (server version, journal entry)
    SYNTHETIC = 2**31 + 100  # model and samples of a synthetic client (client)


class InspectionStream(IntEnum):
    """JAX streams of the key that `inspect` uses: they are folded into the key itself."""

    SAMPLES = 2**31 + 31
    MEASURED = 2**31 + 32


def typed_key(key: Array) -> Array:
    """Return `key` as a typed key; an old-style key of plain words is wrapped."""
    if not hasattr(key, "dtype"):
        raise ValueError(f"A key must be a JAX key such as `jax.random.key(0)` (got {key!r}).")
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def run_stream(key: Array, stream: IntEnum = RunStream.BATCHES) -> Array:
    """Derive a stream from a run's key. It is always threefry, whose bits `vmap` does not change."""
    words = jax.random.key_data(key)
    own = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
    for word in words[2:]:
        own = jax.random.fold_in(own, word)
    return jax.random.fold_in(own, int(stream))


def inspection_key(key: Array, stream: InspectionStream) -> Array:
    """Derive a stream from the key of an inspection."""
    return jax.random.fold_in(key, int(stream))


def round_key(stream: Array, round: Array) -> Array:
    """Derive the key of one round from a stream of the run."""
    return jax.random.fold_in(stream, round)


def visit_key(stream: Array, client_id: Array, update: Array) -> Array:
    """Derive the key of one visit from a stream of the run."""
    return jax.random.fold_in(jax.random.fold_in(stream, client_id), update)


def draw_key(key: Array, step: Array, draw: Array) -> Array:
    """Derive the key of one batch of a visit (or of an epoch of it): draw number `draw` of local step `step`."""
    return jax.random.fold_in(key, MAX_DRAWS * step.astype(jnp.uint32) + draw)


def epoch_key(visit: Array) -> Array:
    """Derive the key that the permutations of a visit's epochs follow from."""
    return jax.random.fold_in(visit, _EPOCH)


def dropout_key(draw: Array) -> Array:
    """Derive the dropout key of a batch from the batch's own."""
    return jax.random.fold_in(draw, _DROPOUT)


def host_generator(key: Array, stream: int | None = None, *indices: int) -> np.random.Generator:
    """Make a NumPy generator from a JAX key: splits and schedules are drawn before a run, on the host.

    `stream` is a `HostStream` (for delays, plus a block). A caller that owns its key needs none.
    """
    if typed_key(key).ndim:
        raise ValueError(f"Splits and schedules take a single key (got {len(key)}). Make one split for each key.")
    words = np.asarray(jax.random.key_data(typed_key(key))).ravel().tolist()
    return np.random.default_rng([*words, *(() if stream is None else (int(stream), *indices))])


def client_uniforms(key: Array, stream: HostStream, ids: np.ndarray) -> np.ndarray:
    """Draw one uniform number in [0, 1) for each client: a function of the key, the stream and its stable id."""
    base = run_stream(typed_key(key), stream)
    bits = jax.vmap(lambda id: jax.random.bits(jax.random.fold_in(base, id), (2,), jnp.uint32))
    high, low = np.asarray(bits(jnp.asarray(ids, jnp.uint32))).T.astype(np.uint64)
    return ((high << np.uint64(21)) | (low >> np.uint64(11))).astype(float) / 2**53
